// How well a stored vector tells texts apart that somebody brings, with how sure that is.
import { useMemo, useState } from "preact/hooks";
import { call, type Schemas } from "../../lib/api";
import { fixed, interval, number, percent, plural, short } from "../../lib/format";
import { useTask } from "../../lib/task";
import type { VectorCard } from "../../lib/vectors";
import { CopyAs } from "../../parts/CopyAs";
import { ErrorNote, RunButton, RunForm } from "../../parts/controls";
import { TextArea } from "../../parts/fields";
import { LineChart } from "../../parts/LineChart";
import { Table, type TableColumn } from "../../parts/Table";
import { readPairs } from "./pairs";

interface Found {
  layer: number;
  pairs: number;
  auc: number;
  /** Standard error of the AUC. */
  error: number;
  /** Pairs whose positive text reads higher. */
  ordered: number;
  difference: number;
}

/** Probability that a positive text reads higher than a negative one; ties count half. */
function areaUnder(positive: readonly number[], negative: readonly number[]): number {
  const wins = positive.reduce(
    (sum, a) => sum + negative.reduce((own, b) => own + (a > b ? 1 : a === b ? 0.5 : 0), 0),
    0,
  );
  return wins / (positive.length * negative.length);
}

/** Standard error of an AUC of so many texts on either side: Hanley and McNeil, 1982. */
export function errorOfArea(auc: number, count: number): number {
  const [first, second] = [auc / (2 - auc), (2 * auc * auc) / (1 + auc)];
  const variance = auc * (1 - auc) + (count - 1) * (first - auc * auc + (second - auc * auc));
  return Math.sqrt(Math.max(0, variance)) / count;
}

/** A text's reading: the mean over its tokens that were read. */
function meanOf(values: readonly (number | null)[]): number {
  const known = values.filter((value) => value !== null);
  return known.reduce((sum, value) => sum + value, 0) / known.length;
}

function evaluate(layers: readonly number[], answer: Schemas["PerplexityAnswer"]): Found[] {
  const pairs = answer.results.length / 2;
  return layers.map((layer, at) => {
    const reading = answer.results.map((text) => meanOf(text.tokens?.probes?.[at]?.before ?? []));
    const [positive, negative] = [reading.slice(0, pairs), reading.slice(pairs)];
    const auc = areaUnder(positive, negative);
    const ordered = positive.filter((value, pair) => value > (negative[pair] ?? 0)).length;
    return { layer, pairs, auc, error: errorOfArea(auc, pairs), ordered, difference: meanOf(positive) - meanOf(negative) };
  });
}

const COLUMNS: TableColumn<Found>[] = [
  { name: "Layer", value: ({ layer }) => layer },
  { name: "AUC", value: ({ auc }) => auc, show: ({ auc, error }) => `${fixed(auc, 3)} ± ${fixed(error, 3)}`, isDescending: true },
  {
    name: "Pairs in order",
    value: ({ ordered }) => ordered,
    show: ({ ordered, pairs }) => `${ordered} of ${pairs}, ${percent(ordered / pairs)}; 95 %: ${interval(ordered, pairs)}`,
    isDescending: true,
  },
  { name: "Difference of means", value: ({ difference }) => difference, show: ({ difference }) => number(difference), isDescending: true },
];

export function Evaluate({ card, model }: { card: VectorCard; model: string | undefined }) {
  const task = useTask();
  const [text, setText] = useState("");
  const [found, setFound] = useState<Found[] | null>(null);
  const { pairs, wrong } = useMemo(() => readPairs(text), [text]);
  const body = {
    model,
    texts: [...pairs.map(({ positive }) => positive), ...pairs.map(({ negative }) => negative)],
    tokens: true,
    probes: [{ name: card.name, layers: card.layers }],
  };
  const run = (): void => {
    if (pairs.length === 0 || wrong.length > 0) return;
    task.run(async (signal) => {
      setFound(evaluate(card.layers, await call("post", "/perplexity", body as never, { signal })));
    });
  };
  return (
    <details class="more">
      <summary>Try it on other pairs</summary>
      <RunForm label={`Pairs to try ${card.name} on`} onRun={run}>
        <TextArea
          label="Pairs that it was not trained from, a pair a line: positive | negative"
          value={text}
          rows={3}
          maxRows={8}
          placeholder="He laughed with joy. | He cried with pain."
          hint={`${plural(pairs.length, "pair")}${wrong.length ? `; no pair: line ${wrong.slice(0, 8).join(", ")}` : ""}. Each text counts by the mean of its tokens' projections.`}
          onChange={setText}
        />
        <div class="actions">
          <RunButton task={task} onRun={run} label="Evaluate" disabled={pairs.length === 0 || wrong.length > 0} />
        </div>
        <ErrorNote error={task.error} />
        {found && (
          <>
            {found.length > 1 && (
              <LineChart
                label="Area under the curve on these pairs, by layer, with one standard error on either side; the table below has the numbers."
                x={found.map(({ layer }) => layer)}
                xLabel="Layer"
                yLabel="AUC"
                xFormat={(layer) => (Number.isInteger(layer) ? String(layer) : "")}
                yFormat={short}
                yRange={[0, 1.02]}
                rules={[0.5]}
                height={180}
                series={[
                  { label: "AUC", values: found.map(({ auc }) => auc), points: true },
                  { label: "− standard error", values: found.map(({ auc, error }) => auc - error), dash: [3, 4], colour: 0, width: 1 },
                  { label: "+ standard error", values: found.map(({ auc, error }) => auc + error), dash: [3, 4], colour: 0, width: 1 },
                ]}
                exportName={`${card.name}-evaluation`}
              />
            )}
            <Table label={`${card.name} on these pairs`} rows={found} columns={COLUMNS} exportName={`${card.name}-pairs`} />
          </>
        )}
        {pairs.length > 0 && <CopyAs asked={{ endpoint: "perplexity", body }} />}
      </RunForm>
    </details>
  );
}

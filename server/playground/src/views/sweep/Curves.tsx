// The curves of a sweep, and one of its points in words.
import { useMemo } from "preact/hooks";
import { fixed, number, percent, short, signed } from "../../lib/format";
import { LineChart, type Series } from "../../parts/LineChart";
import { toCsv, type Measure, type Swept } from "./request";

interface CurvesProps {
  swept: Swept;
  measure: Measure;
  /** What a scale is a factor of, for the axis. */
  vector: string;
  /** Index of the scale that is explained. */
  chosen: number;
  onChoose: (index: number) => void;
}

/** Solid for the first set of layers, then dashes of other lengths. */
const DASHES: (number[] | undefined)[] = [undefined, [8, 5], [2, 4], [12, 4, 2, 4]];

const MEASURES: Record<Measure, string> = {
  change: "Change of log-probability, nats",
  logprob: "Log-probability, nats",
  prob: "Probability",
};

export function Curves({ swept, measure, vector, chosen, onChoose }: CurvesProps) {
  const { cases, scales, hasText, answer } = swept;
  const order = useMemo(() => scales.map((_, at) => at).sort((a, b) => (scales[a] ?? 0) - (scales[b] ?? 0)), [scales]);
  const x = useMemo(() => order.map((at) => scales[at] ?? 0), [order, scales]);
  const lines = useMemo(() => drawTargets(swept, measure, order), [swept, measure, order]);
  const divergence = useMemo(() => drawDivergence(swept, order), [swept, order]);
  const perplexity = useMemo(() => drawPerplexity(swept, order), [swept, order]);
  const common = {
    x,
    xLabel: `Scale of ${vector}`,
    xFormat: short,
    plainLegend: true,
    onHover: (at: number | null) => {
      if (at !== null) onChoose(order[at] ?? 0);
    },
  };
  return (
    <div class="curves">
      {cases.length > 0 && (
        <LineChart
          {...common}
          label={`${MEASURES[measure]} of every target by the scale of ${vector}: the table below says the same in numbers.`}
          series={lines}
          yLabel={MEASURES[measure]}
          yFormat={measure === "prob" ? (v) => `${short(100 * v)} %` : short}
          yRange={measure === "prob" ? [0, 1] : undefined}
          rules={measure === "change" ? [0] : []}
          height={340}
          exportName="dose-response"
          csv={() => toCsv(swept)}
        />
      )}
      <Explained swept={swept} index={Math.min(chosen, scales.length - 1)} />
      <div class="curves-small">
        {cases.length > 0 && (
          <section>
            <h2>How far the next token's distribution moves</h2>
            <LineChart
              {...common}
              label={`Kullback–Leibler divergence from unsteered by the scale of ${vector}.`}
              series={divergence}
              yLabel="KL, nats"
              yFormat={short}
              height={200}
              exportName="dose-response-kl"
            />
          </section>
        )}
        {hasText && (
          <section>
            <h2>Perplexity of the text</h2>
            <LineChart
              {...common}
              label={`Perplexity of the text by the scale of ${vector}; ${number(answer.unsteered.texts[0]?.perplexity)} unsteered.`}
              series={perplexity}
              yLabel="Perplexity"
              yFormat={short}
              height={200}
              logY={isWide(perplexity)}
              exportName="dose-response-perplexity"
              csv={() => toCsv(swept)}
            />
          </section>
        )}
      </div>
      <Table swept={swept} />
    </div>
  );
}

function drawTargets({ cases, sets }: Swept, measure: Measure, order: number[]): Series[] {
  return sets.flatMap(({ name, points }, set) =>
    cases.flatMap(({ context, targets }, item) => {
      const first = cases.slice(0, item).reduce((sum, one) => sum + one.targets.length, 0);
      return targets.map((target, index) => ({
        label: `${cases.length > 1 ? `${shorten(context)}…` : ""}${target}${sets.length > 1 ? `, ${name}` : ""}`,
        colour: first + index,
        dash: DASHES[set % DASHES.length],
        points: order.length <= 30,
        values: order.map((at) => {
          const found = points[at]?.items[item]?.targets[index];
          if (found === undefined) return null;
          if (measure === "prob") return found.logprob === null ? null : Math.exp(found.logprob);
          return found[measure];
        }),
      }));
    }),
  );
}

function drawDivergence({ cases, sets }: Swept, order: number[]): Series[] {
  return sets.flatMap(({ name, points }, set) =>
    cases.map(({ context }, item) => ({
      label: `after ${shorten(context)}${sets.length > 1 ? `, ${name}` : ""}`,
      colour: item,
      dash: DASHES[set % DASHES.length],
      points: order.length <= 30,
      values: order.map((at) => points[at]?.items[item]?.kl ?? null),
    })),
  );
}

function drawPerplexity({ sets }: Swept, order: number[]): Series[] {
  return sets.map(({ name, points }, set) => ({
    label: sets.length > 1 ? name : "perplexity",
    dash: DASHES[set % DASHES.length],
    points: order.length <= 30,
    values: order.map((at) => points[at]?.texts[0]?.perplexity ?? null),
  }));
}

/** Whether numbers come to more than a decade, for which even steps are too small. */
function isWide(series: Series[]): boolean {
  const values = series.flatMap(({ values: all }) => all.filter((v): v is number => v !== null));
  return Math.max(...values) > 10 * Math.min(...values);
}

function shorten(context: string): string {
  return context.length <= 24 ? context : `…${context.slice(-22)}`;
}

/** One scale in words, for every set of layers. */
function Explained({ swept, index }: { swept: Swept; index: number }) {
  const { cases, sets, answer, hasText } = swept;
  const scale = swept.scales[index] ?? 0;
  return (
    <section class="explained" aria-live="polite" aria-label="The chosen scale in words">
      <h2>
        At scale <span class="num">{short(scale)}</span>
      </h2>
      {sets.map(({ name, points }) => {
        const point = points[index];
        if (point === undefined) return null;
        return (
          <div key={name}>
            <p>
              {point.relative_norm === null || point.relative_norm === undefined ? (
                <>Nothing is changed: this is the model as it is.</>
              ) : (
                <>
                  Steering at {name} changes the stream by{" "}
                  <b class="num">{number(100 * point.relative_norm)} %</b> of its length.
                </>
              )}
              {hasText && (
                <>
                  {" "}The text has perplexity <b class="num">{number(point.texts[0]?.perplexity)}</b>, unsteered{" "}
                  <span class="num">{number(answer.unsteered.texts[0]?.perplexity)}</span>.
                </>
              )}
            </p>
            <ul>
              {point.items.map((item, at) => (
                <li key={at}>
                  After “{cases[at]?.context}”:{" "}
                  {item.targets.map((target, nth) => (
                    <span key={nth}>
                      {nth > 0 && "; "}
                      <b>{cases[at]?.targets[nth]?.trim()}</b> has probability{" "}
                      <b class="num">{percent(Math.exp(target.logprob ?? -Infinity))}</b> (
                      <span class="num">{signed(target.change)}</span> nats)
                    </span>
                  ))}
                  . The distribution moves by <span class="num">{number(item.kl)}</span> nats (KL).
                </li>
              ))}
            </ul>
          </div>
        );
      })}
    </section>
  );
}

/** The same numbers as a table. */
function Table({ swept }: { swept: Swept }) {
  const { cases, sets, scales, hasText } = swept;
  return (
    <details class="more">
      <summary>All points as a table</summary>
      <div class="number-box" tabIndex={0} role="region" aria-label="All points">
        <table class="num">
          <thead>
            <tr>
              <th scope="col">Scale</th>
              {sets.length > 1 && <th scope="col">Layers</th>}
              <th scope="col">Change of the stream</th>
              {cases.flatMap(({ context, targets }) =>
                targets.map((target) => (
                  <th scope="col" key={context + target}>
                    {shorten(context)}<b>{target}</b>
                  </th>
                )),
              )}
              {hasText && <th scope="col">Perplexity</th>}
            </tr>
          </thead>
          <tbody>
            {sets.flatMap(({ name, points }) =>
              points.map((point, at) => (
                <tr key={`${name} ${at}`}>
                  <th scope="row">{short(scales[at] ?? 0)}</th>
                  {sets.length > 1 && <td>{name}</td>}
                  <td>{point.relative_norm == null ? "–" : `${number(100 * point.relative_norm)} %`}</td>
                  {point.items.flatMap(({ targets }, item) =>
                    targets.map((target, nth) => <td key={`${item} ${nth}`}>{fixed(target.logprob, 3)}</td>),
                  )}
                  {hasText && <td>{number(point.texts[0]?.perplexity)}</td>}
                </tr>
              )),
            )}
          </tbody>
        </table>
      </div>
    </details>
  );
}

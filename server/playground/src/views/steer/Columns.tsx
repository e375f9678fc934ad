// The two texts side by side, their tokens coloured by one scale.
import { useMemo, useState } from "preact/hooks";
import { fixed, number, plural } from "../../lib/format";
import { divergingScale, linearScale, type Scale } from "../../lib/scales";
import { Legend } from "../../parts/Legend";
import { TokenCard } from "../../parts/TokenCard";
import { TokenText } from "../../parts/TokenText";
import type { Column, Streams } from "./stream";

export type Colouring = "probe" | "surprisal" | "none";

interface ColumnsProps {
  shown: Streams;
  colouring: Colouring;
  isRunning: boolean;
  /** Whether the form asks for something else by now. */
  isStale: boolean;
}

/**
 * A token's own reading: entry i was read at the token in front of token i, so it is the next one.
 *
 * The last token has none: the model has not read it.
 */
function ownReadings(readings: readonly (number | null)[], count: number): (number | null)[] {
  return Array.from({ length: count }, (_, index) => readings[index + 1] ?? null);
}

function valuesOf(column: Column, colouring: Colouring): (number | null)[] {
  if (colouring === "surprisal") return column.logprobs.map((value) => (value === null ? null : -value));
  if (colouring === "probe") return ownReadings(column.after, column.tokens.length);
  return [];
}

function makeScale(colouring: Colouring, probe: string, values: readonly (number | null)[]): Scale | undefined {
  if (colouring === "none") return undefined;
  const sizes = values.flatMap((value) => (value === null ? [] : [Math.abs(value)])).sort((a, b) => a - b);
  // One outlier would leave all others pale.
  const reach = sizes[Math.floor(0.97 * (sizes.length - 1))] ?? 1;
  if (colouring === "surprisal") return linearScale("Surprisal, nats", Math.max(reach, 1), (v) => number(v, 2));
  return divergingScale(`The probe's ${probe}`, reach, (v) => number(v, 2));
}

export function Columns({ shown, colouring, isRunning, isStale }: ColumnsProps) {
  const { steered, baseline } = shown;
  const { prompt, probe, scale } = shown.caption;
  const [marked, setMarked] = useState<number | null>(null);
  const values = useMemo(
    () => [valuesOf(baseline, colouring), valuesOf(steered, colouring)] as const,
    [steered, baseline, colouring],
  );
  const colours = useMemo(
    () => makeScale(colouring, probe, values.flat()),
    [values, colouring, probe],
  );
  const common = { prompt, colours, probe: colouring === "probe" ? probe : null, marked, setMarked };
  return (
    <section
      class={`continuations ${isStale ? "is-stale" : ""}`}
      aria-label="Continuations"
      aria-busy={isRunning}
    >
      {isStale && (
        <p class="hint" role="status">
          The form has changed since: these texts answer the request before. Generate for new ones.
        </p>
      )}
      {colours && <Legend scale={colours} />}
      <div class="beside">
        <OneColumn {...common} title="Without steering" column={baseline} values={values[0]} />
        <OneColumn {...common} title="Steered" note={scale} column={steered} values={values[1]} />
      </div>
      {shown.answer && <p class="hint">{compare(baseline.ids, steered.ids)}</p>}
    </section>
  );
}

interface OneColumnProps {
  title: string;
  note?: string;
  column: Column;
  values: readonly (number | null)[];
  prompt: string;
  colours: Scale | undefined;
  probe: string | null;
  marked: number | null;
  setMarked: (index: number | null) => void;
}

function OneColumn(props: OneColumnProps) {
  const { title, note, column, values, prompt, colours, probe, marked, setMarked } = props;
  const offset = prompt === "" ? 0 : 1;
  const tokens = useMemo(
    () => (prompt === "" ? column.tokens : [prompt, ...column.tokens]),
    [prompt, column.tokens],
  );
  const shifted = useMemo(() => (prompt === "" ? values : [null, ...values]), [prompt, values]);
  const describe = (at: number) => {
    const index = at - offset;
    if (index < 0) return <p>The prompt</p>;
    const [before, after] = [column.before, column.after].map((list) => list[index + 1]);
    const isChanged = before !== after;
    const readings = [
      [isChanged ? "Probe, before steering" : "Probe", number(before)],
      ...(isChanged ? [["Probe, after steering", number(after)]] : []),
    ] as [string, string][];
    return (
      <TokenCard
        token={column.tokens[index] ?? ""}
        id={column.ids[index]}
        logprob={column.logprobs[index]}
        rows={probe === null ? [] : before === undefined ? [["Probe", "not read yet"]] : readings}
      />
    );
  };
  return (
    <section class="column sheet" data-column={title}>
      <h2>
        {title} {note && <small class="num">{note}</small>}
      </h2>
      <div class={`continuation ${offset ? "has-prompt" : ""}`}>
        <TokenText
          label={`${title}: the text, by its tokens`}
          tokens={tokens}
          values={shifted}
          scale={colours}
          describe={describe}
          marked={marked}
          onActive={setMarked}
          noLegend
        />
      </div>
      {column.completion && (
        <p class="hint num">
          {plural(column.completion.num_tokens, "token")},{" "}
          {column.completion.finish_reason === "stop" ? "ended by itself" : "cut at the limit"} ·
          log-probability {fixed(column.completion.logprob, 2)}
        </p>
      )}
    </section>
  );
}

function compare(baseline: readonly number[], steered: readonly number[]): string {
  const length = Math.max(baseline.length, steered.length);
  let same = 0;
  while (same < length && baseline[same] === steered[same]) same += 1;
  if (same === length) return "Both texts are the same, token by token.";
  return same === 0
    ? "The texts differ from their first token on: same prompt, same seed."
    : `Same prompt, same seed: the texts are the same for ${plural(same, "token")}, then differ.`;
}

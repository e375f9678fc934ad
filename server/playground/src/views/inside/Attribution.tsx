// What each input token contributes to the score of a target.
import { useMemo } from "preact/hooks";
import type { Schemas } from "../../lib/api";
import { number, signed, tick, visible } from "../../lib/format";
import { divergingScale, findReach } from "../../lib/scales";
import { Stats } from "../../parts/Stats";
import { Table, type TableColumn } from "../../parts/Table";
import { TokenCard } from "../../parts/TokenCard";
import { TokenText } from "../../parts/TokenText";

export function Attributions({ targets }: { targets: readonly Schemas["TargetGradient"][] }) {
  const scale = useMemo(() => {
    const { reach, isClipped } = findReach(targets.flatMap(({ attributions }) => attributions ?? []));
    return { ...divergingScale("Contribution to the log-probability, nats", reach, tick), isClipped };
  }, [targets]);
  return (
    <section class="result" aria-label="Result">
      {targets.map((target, at) => (
        <Attribution key={at} target={target} scale={scale} />
      ))}
      <p class="hint">
        A token in orange makes the target more probable, one in blue less. Tokens of the target
        are read, too: each contributes to the tokens after it.
      </p>
    </section>
  );
}

interface Row {
  at: number;
  token: string;
  value: number | null;
}

const COLUMNS: TableColumn<Row>[] = [
  { name: "position", value: ({ at }) => at },
  { name: "token", value: ({ token }) => token, show: ({ token }) => <code>{visible(token)}</code>, isText: true },
  { name: "contribution, nats", value: ({ value }) => value, show: ({ value }) => signed(value, 4), isDescending: true },
];

interface AttributionProps {
  target: Schemas["TargetGradient"];
  scale: ReturnType<typeof divergingScale>;
}

function Attribution({ target, scale }: AttributionProps) {
  const [tokens, values] = useMemo(() => [target.input_tokens ?? [], target.attributions ?? []], [target]);
  const rows = useMemo(() => tokens.map((token, at) => ({ at, token, value: values[at] ?? null })), [tokens, values]);
  const delta = target.convergence_delta;
  return (
    <div class="sheet">
      <h2>
        Contributions to <code>{visible(target.target)}</code>
      </h2>
      <TokenText
        label={`What the tokens contribute to ${target.target}`}
        tokens={tokens}
        values={values}
        scale={scale}
        describe={(index) => (
          <TokenCard
            token={tokens[index] ?? ""}
            id={target.input_ids?.[index]}
            rows={[
              ["Position", index],
              ["Contribution", `${signed(values[index], 3)} nats`],
            ]}
          />
        )}
      />
      <Stats
        label={`Sums for ${target.target}`}
        stats={[
          { label: "Log-probability", value: number(target.logprob), note: "nats" },
          { label: "At the baseline", value: number(target.baseline_logprob), note: "nats" },
          ...(delta == null ? [] : [{ label: "Left over", value: number(delta, 2), note: "nats, less with more steps" }]),
        ]}
      />
      <details class="more">
        <summary>All numbers</summary>
        <Table label={`Contributions to ${target.target}`} rows={rows} columns={COLUMNS} exportName="attribution" />
      </details>
    </div>
  );
}

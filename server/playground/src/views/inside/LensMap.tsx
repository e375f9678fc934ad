// What each layer would predict: the model's own norm and head on its stream.
import { useMemo } from "preact/hooks";
import { count, fixed, percent, tick, visible } from "../../lib/format";
import { cutTokens } from "../../lib/reading";
import { linearScale, logScale, type Scale } from "../../lib/scales";
import { LayerMap } from "../../parts/LayerMap";
import { TokenCard } from "../../parts/TokenCard";
import type { InsideState, LensSide } from "./request";

type Says = InsideState["says"];
type Cells = (number | null)[][];

function readCells({ target }: LensSide, says: Says): Cells {
  return Object.values(target.layers).map((rows) => {
    if (says === "rank") return rows.ranks ?? [];
    if (says === "entropy") return rows.columns?.entropy ?? [];
    return rows.logprobs.map((value) => (value === null ? null : Math.exp(value)));
  });
}

function scaleOf(says: Says, cells: readonly Cells[]): Scale {
  const most = cells.flat(2).reduce<number>((top, value) => Math.max(top, value ?? 0), 0);
  if (says === "rank") return logScale("Rank of the text's token", most, count);
  if (says === "entropy") return linearScale("Entropy of the prediction, nats", Math.max(1, Math.ceil(most)), tick);
  return linearScale("Probability of the text's token", 1, tick);
}

const WRITE: Record<Says, (value: number) => string> = {
  probability: percent,
  rank: count,
  entropy: (value) => `${fixed(value)} nats`,
};

export function LensMaps({ sides, says }: { sides: readonly LensSide[]; says: Says }) {
  const cells = useMemo(() => sides.map((side) => readCells(side, says)), [sides, says]);
  const scale = useMemo(() => scaleOf(says, cells), [cells, says]);
  return (
    <section class="result" aria-label="Result">
      {sides.map((side, at) => (
        <LensMap key={side.name} side={side} values={cells[at] ?? []} scale={scale} says={says} />
      ))}
    </section>
  );
}

interface LensMapProps {
  side: LensSide;
  values: Cells;
  scale: Scale;
  says: Says;
}

function LensMap({ side: { name, target }, values, scale, says }: LensMapProps) {
  const tokens = useMemo(() => cutTokens(target.target, target.tokens, target.offsets ?? []), [target]);
  const layers = useMemo(() => Object.keys(target.layers), [target]);
  const rows = useMemo(() => Object.values(target.layers), [target]);
  const texts = useMemo(() => rows.map(({ top }) => (top?.tokens ?? []).map((tokens) => visible(tokens[0] ?? ""))), [rows]);
  return (
    <LayerMap
      title={`What each layer would say, ${name}`}
      label="The most probable token by layer, and how probable the text's own is"
      layers={layers}
      tokens={tokens}
      values={values}
      scale={scale}
      format={WRITE[says]}
      texts={texts}
      describe={(layer, token) => {
        const row = rows[layer];
        const top = row?.top;
        return (
          <TokenCard
            token={tokens[token] ?? ""}
            id={target.token_ids[token]}
            logprob={row?.logprobs[token]}
            rank={row?.ranks?.[token]}
            rows={[
              ["Layer", layers[layer]],
              ["Entropy", `${fixed(row?.columns?.entropy?.[token], 3)} nats`],
            ]}
            alternatives={(top?.tokens?.[token] ?? []).map((alternative, at) => ({
              token: alternative,
              logprob: top?.logprobs[token]?.[at] ?? null,
              isTaken: top?.token_ids[token]?.[at] === target.token_ids[token],
            }))}
          />
        );
      }}
      exportName="logit-lens"
    >
      A column is a token of the text; its cells say what each layer expected in its place, by the
      model's own norm and head. The last layer is the model's prediction.
    </LayerMap>
  );
}

// Which activations carry an answer: the metric after each patch, against both runs.
import { useMemo } from "preact/hooks";
import { fixed, number, signed, tick, visible } from "../../lib/format";
import { divergingScale, findReach } from "../../lib/scales";
import { nameLayers } from "../../lib/steering";
import { LayerMap } from "../../parts/LayerMap";
import { Stats } from "../../parts/Stats";
import type { InsideState, Patched } from "./request";

const METRICS: Record<InsideState["metric"], string> = {
  logprob: "log-probability of the first target",
  difference: "log-probability of the first target less that of the second",
  kl: "KL divergence from the clean run",
};

export function PatchMap({ found, cells }: { found: Patched; cells: InsideState["cells"] }) {
  const { result, metric, direction, hook } = found;
  const isDenoising = direction === "denoise";
  const [from, to] = isDenoising ? [result.corrupted, result.clean] : [result.clean, result.corrupted];
  const width = from === null || to === null ? 0 : to - from;
  // Two runs that say the same leave nothing to have a share of.
  const isShare = cells === "share" && Math.abs(width) > 1e-6;
  const values = useMemo(
    () =>
      result.matrix.map((row) =>
        row.map((value) => (value === null || from === null ? null : (value - from) / (isShare ? width : 1))),
      ),
    [result, from, width, isShare],
  );
  const layers = useMemo(() => result.layers.map(nameLayers), [result]);
  const scale = useMemo(() => {
    const { reach, isClipped } = findReach(values.flat());
    const share = isDenoising ? "Share of the clean run restored" : "Share of the clean run undone";
    return { ...divergingScale(isShare ? share : "Change of the metric, nats", reach, tick), isClipped };
  }, [values, isShare, isDenoising]);
  return (
    <section class="result" aria-label="Result">
      <Stats
        label="Both runs"
        stats={[
          { label: "Clean", value: number(result.clean), note: "nats" },
          { label: "Corrupted", value: number(result.corrupted), note: "nats" },
        ]}
      />
      <LayerMap
        title={`${isDenoising ? "Clean" : "Corrupted"} ${hook} in the ${isDenoising ? "corrupted" : "clean"} run`}
        label={`What each patch does to the ${METRICS[metric]}, by layer and token`}
        layers={layers}
        tokens={result.tokens}
        values={values}
        scale={scale}
        format={(value) => (isShare ? `${fixed(100 * value, 0)} %` : signed(value))}
        describe={(layer, token) => {
          const value = result.matrix[layer]?.[token] ?? null;
          const shown = values[layer]?.[token];
          return (
            <>
              <div class="card-head">
                <code class="card-token">{visible(result.tokens[token] ?? "")}</code>
                <span class="card-id num">token {result.positions[token]}</span>
              </div>
              <dl class="card-rows num">
                <dt>Layer</dt>
                <dd>{layers[layer]}</dd>
                <dt>Metric</dt>
                <dd>{fixed(value, 3)} nats</dd>
                <dt>Change</dt>
                <dd>{signed(value === null || from === null ? null : value - from, 3)} nats</dd>
                {isShare && (
                  <>
                    <dt>Share</dt>
                    <dd>{fixed(shown, 3)}</dd>
                  </>
                )}
              </dl>
            </>
          );
        }}
        exportName="patching"
      >
        A cell is one run in which that layer, at that token alone, has the other run's
        activations; it says what becomes of the {METRICS[metric]}.
      </LayerMap>
    </section>
  );
}

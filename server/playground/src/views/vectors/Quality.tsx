// How well a trained vector tells texts apart that it has not seen, and where to begin with it.
import { fixed, number, plural, short } from "../../lib/format";
import type { VectorCard } from "../../lib/vectors";
import { Icon } from "../../parts/Icon";
import { LineChart } from "../../parts/LineChart";
import { errorOfArea } from "./Evaluate";
import { Table, type TableColumn } from "../../parts/Table";

export function Quality({ card, onSteer }: { card: VectorCard; onSteer: (layer?: number, scale?: number) => void }) {
  const { recommendation: best, quality, validation } = card.about;
  const layers = card.layers.filter((layer) => quality?.[layer]);
  const column = (name: "auc" | "accuracy" | "gain") => layers.map((layer) => quality?.[layer]?.[name] ?? null);
  const isHeldOut = typeof validation?.folds === "number";
  const columns: TableColumn<number>[] = [
    { name: "Layer", value: (layer) => layer },
    { name: "AUC", value: (layer) => quality?.[layer]?.auc, show: (layer) => describeArea(quality?.[layer]?.auc, isHeldOut ? card.about.pairs : null), isDescending: true },
    { name: "Accuracy", value: (layer) => quality?.[layer]?.accuracy, show: (layer) => fixed(quality?.[layer]?.accuracy, 3), isDescending: true },
    { name: "Pairs in order", value: (layer) => quality?.[layer]?.pair_accuracy, show: (layer) => fixed(quality?.[layer]?.pair_accuracy, 3), isDescending: true },
    { name: "Scale", value: (layer) => quality?.[layer]?.scale, show: (layer) => number(quality?.[layer]?.scale) },
    { name: "Gain", value: (layer) => quality?.[layer]?.gain, show: (layer) => fixed(quality?.[layer]?.gain, 2), isDescending: true },
    { name: "Harm", value: (layer) => quality?.[layer]?.harm, show: (layer) => fixed(quality?.[layer]?.harm, 3) },
    { name: "Norm", value: (layer) => card.norms[layer], show: (layer) => number(card.norms[layer]) },
    { name: "Stream's norm", value: (layer) => quality?.[layer]?.activation_norm, show: (layer) => number(quality?.[layer]?.activation_norm) },
  ];
  return (
    <div class="quality">
      {isHeldOut && layers.length > 1 && (
        <div class="quality-charts">
          <section>
            <h3>Held-out texts on the right side</h3>
            <LineChart
              label="Area under the curve and accuracy on held-out pairs, by layer; the table below has the numbers."
              x={layers}
              xLabel="Layer"
              yLabel="Share"
              xFormat={nameLayer}
              yFormat={short}
              yRange={[0.45, 1.02]}
              rules={[0.5]}
              height={200}
              series={[
                { label: "AUC", values: column("auc"), points: true },
                { label: "accuracy", values: column("accuracy"), points: true, dash: [6, 4] },
              ]}
              exportName={`${card.name}-separation`}
            />
          </section>
          <section>
            <h3>What it does</h3>
            <LineChart
              label="Gain of preference for the positive continuation, in nats, by layer; empty where none was measured."
              x={layers}
              xLabel="Layer"
              yLabel="Nats"
              xFormat={nameLayer}
              yFormat={short}
              height={200}
              series={[{ label: "gain of preference", values: column("gain"), points: true, colour: 2 }]}
              exportName={`${card.name}-effect`}
            />
          </section>
        </div>
      )}
      {best ? (
        <div class="recommended">
          <p>
            Begin at <b>layer {best.layer}</b> with scale <b class="num">{short(best.scale)}</b>, or the same with a
            minus for the opposite: {best.reason}.
          </p>
          <button type="button" class="run" onClick={() => onSteer(best.layer, best.scale)}>
            <Icon name="steer" /> Steer with it
          </button>
        </div>
      ) : (
        <p class={validation?.caution ? "caution" : "hint"}>
          {validation?.caution
            ? `Nothing is recommended: ${validation.caution}.`
            : (validation?.reason ?? "Nothing is known of how well it tells texts apart.")}
        </p>
      )}
      {layers.length > 0 && (
        <details class="more">
          <summary>
            Every layer{isHeldOut && `, by ${plural(validation?.folds ?? 0, "fold")} of ${plural(card.about.pairs ?? 0, "pair")}`}
          </summary>
          <Table label="Every layer" rows={layers} columns={columns} />
        </details>
      )}
    </div>
  );
}

/** An AUC with its standard error, where it is of held-out pairs. */
function describeArea(auc: number | null | undefined, pairs: number | null | undefined): string {
  if (auc === null || auc === undefined || !pairs) return fixed(auc, 3);
  return `${fixed(auc, 3)} ± ${fixed(errorOfArea(auc, pairs), 3)}`;
}

/** Layers are whole: the axis has no labels between two of them. */
function nameLayer(layer: number): string {
  return Number.isInteger(layer) ? String(layer) : "";
}

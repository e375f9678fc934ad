// How alike the stored vectors are: the cosine of every two at a layer.
import { useMemo, useState } from "preact/hooks";
import { download } from "../../lib/api";
import { fixed } from "../../lib/format";
import { divergingScale } from "../../lib/scales";
import { useTask } from "../../lib/task";
import type { VectorCard } from "../../lib/vectors";
import { ErrorNote, RunButton } from "../../parts/controls";
import { Select } from "../../parts/fields";
import { HeatMap } from "../../parts/HeatMap";

/** Vectors that are compared: each file is fetched whole. */
const MOST = 40;

type Directions = Map<number, Float32Array>;

/** The directions of a safetensors file as this server writes it: float32, by layer. */
function readDirections(file: ArrayBuffer): Directions {
  const length = Number(new DataView(file).getBigUint64(0, true));
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 8, length))) as Record<
    string,
    { dtype?: string; data_offsets: [number, number] }
  >;
  const found: Directions = new Map();
  for (const [name, { dtype, data_offsets: [start, end] = [0, 0] }] of Object.entries(head)) {
    const layer = /\.(\d+)\./.exec(name)?.[1];
    if (layer === undefined || dtype !== "F32") continue;
    found.set(Number(layer), new Float32Array(file.slice(8 + length + start, 8 + length + end)));
  }
  return found;
}

function cosine(a: Float32Array | undefined, b: Float32Array | undefined): number | null {
  if (a === undefined || b === undefined || a.length !== b.length) return null;
  let [dot, own, other] = [0, 0, 0];
  a.forEach((value, at) => {
    dot += value * (b[at] ?? 0);
    own += value * value;
    other += (b[at] ?? 0) ** 2;
  });
  return own > 0 && other > 0 ? dot / Math.sqrt(own * other) : null;
}

/** By content: what was fetched stays as it is. */
const fetched = new Map<string, Directions>();

export function Cosines({ cards }: { cards: readonly VectorCard[] }) {
  const task = useTask();
  const [compared, setCompared] = useState<VectorCard[]>([]);
  const [layer, setLayer] = useState("");
  const run = (): void =>
    task.run(async (signal) => {
      const chosen = cards.slice(0, MOST);
      for (const card of chosen) {
        if (fetched.has(card.sha256)) continue;
        const file = await download("/vectors/{name}/content", { path: { name: card.name }, signal });
        fetched.set(card.sha256, readDirections(await file.arrayBuffer()));
      }
      setCompared([...chosen]);
    });
  const layers = useMemo(() => {
    const counts = new Map<number, number>();
    for (const card of compared) for (const one of card.layers) counts.set(one, (counts.get(one) ?? 0) + 1);
    return [...counts].filter(([, count]) => count > 1).map(([one]) => one).sort((a, b) => a - b);
  }, [compared]);
  const at = layers.includes(Number(layer)) && layer !== "" ? Number(layer) : layers.at(-1);
  const shown = compared.filter((card) => at !== undefined && fetched.get(card.sha256)?.has(at));
  const values = useMemo(
    () =>
      shown.map((row) =>
        shown.map((column) => cosine(fetched.get(row.sha256)?.get(at ?? -1), fetched.get(column.sha256)?.get(at ?? -1))),
      ),
    [compared, at],
  );
  return (
    <section class="sheet cosines" aria-labelledby="cosines-title">
      <h2 id="cosines-title">How alike they are</h2>
      <div class="actions">
        <RunButton task={task} onRun={run} label="Compare the stored vectors" />
        {layers.length > 0 && (
          <Select
            label="At layer"
            value={String(at)}
            options={layers.map((one) => ({ value: String(one), label: String(one) }))}
            onChange={setLayer}
          />
        )}
        {cards.length > MOST && <span class="hint">The first {MOST} by name.</span>}
      </div>
      <ErrorNote error={task.error} />
      {compared.length > 0 && layers.length === 0 && <p class="note">No two of them have a layer in common.</p>}
      {shown.length > 1 && (
        <HeatMap
          label={`Cosines of the stored vectors at layer ${at}`}
          rows={shown.map(({ name }) => name)}
          columns={shown.map(({ name }) => name)}
          rowLabel="vector"
          columnLabel="vector"
          values={values}
          scale={divergingScale("Cosine", 1, (value) => fixed(value, 0))}
          format={(value) => fixed(value, 2)}
          exportName={`cosines-layer-${at}`}
        />
      )}
    </section>
  );
}

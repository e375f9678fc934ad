// The request of a sweep from what its form says, and its answer as lines to draw.
import type { Schemas } from "../../lib/api";
import type { JsonObject } from "../../lib/snippets";
import { adviseScale, findVector, makeSteering, makeVector, parseLayers, splitLayers, type SteeringFields } from "../../lib/steering";
import { writeCsv } from "../../lib/tables";
import type { VectorCard } from "../../lib/vectors";

export type Measure = "change" | "logprob" | "prob";

/** What a cell of the map says: log-odds of the first target against the second, and so on. */
export type MapMeasure = "preference" | "kl" | "perplexity";

export type SweepState = SteeringFields & {
  /** Each a context and its targets, as in `Tom felt| happy| sad`. */
  items: string[];
  text: string;
  /** Scales from, to, and how many of them. */
  from: number;
  to: number;
  points: number;
  measure: Measure;
  map: MapMeasure;
  /** The scale and the set of layers that are looked at. */
  chosen: number;
  set: number;
  /** The scale of the cell that was chosen last, with which the model is to speak. */
  generated: number;
};

export interface SweptCase {
  context: string;
  targets: string[];
}

export function readItem(line: string): SweptCase {
  const [context = "", ...targets] = line.split("|");
  return { context, targets: targets.filter((target) => target !== "") };
}

export function writeItem({ context, targets }: SweptCase): string {
  return [context, ...targets].join("|");
}

/** Scales that are evenly apart, and 0 among them where they come past it. */
export function spread(from: number, to: number, points: number): number[] {
  const count = Math.min(256, Math.max(1, Math.round(points)));
  if (count === 1) return [from];
  const scales = Array.from({ length: count }, (_, at) =>
    Number((from + ((to - from) * at) / (count - 1)).toPrecision(4)),
  );
  return from * to < 0 && !scales.includes(0)
    ? [...scales, 0].sort((a, b) => (from < to ? a - b : b - a))
    : scales;
}

/** Layers that `some` is about. */
const SOME = 8;

/** Sets of layers as in `2;3;2,3`; `each`: every layer alone; `some`: every k-th, and the
 * recommended one; undefined: the vector's own. */
function readSets(text: string, card: VectorCard | undefined): number[][] | undefined {
  if (text.trim() === "own") return undefined;
  const best = card?.about.recommendation?.layer;
  if (text.trim() === "each") return card?.layers.map((layer) => [layer]);
  if (text.trim() === "some") {
    const step = Math.ceil((card?.layers.length ?? 0) / SOME);
    return card?.layers.filter((layer, at) => at % step === 0 || layer === best).map((layer) => [layer]);
  }
  if (text.trim() === "") {
    return best === undefined ? undefined : [[best]];
  }
  return text.split(";").map((part) => {
    const layers = parseLayers(part);
    if (layers === null) throw new Error(`Sets of layers “${text}” are not written as in 2;3;2,3.`);
    return layers;
  });
}

/** The request. Throws Error where what was typed makes no sense. */
export function makeSweep(state: SweepState, cards: readonly VectorCard[], model: string | undefined) {
  const cases = state.items.map(readItem).filter(({ context }) => context !== "");
  const bare = cases.find(({ targets }) => targets.length === 0);
  if (bare) {
    throw new Error(`“${bare.context}” has no target: write them after it, with | between two of them.`);
  }
  const texts = state.text.trim() === "" ? [] : [state.text];
  if (cases.length + texts.length === 0) throw new Error("Give a context with targets, a text, or both.");
  const { isEverywhere } = splitLayers(state.layers);
  return {
    model,
    items: cases.length ? cases.map(({ context, targets }) => ({ context, targets })) : undefined,
    texts: texts.length ? texts : undefined,
    steering: makeSteering([makeVector({ ...state, layers: isEverywhere ? state.layers : "own" }, cards, undefined)], state),
    scales: spread(state.from, state.to, state.points),
    layers: isEverywhere ? undefined : readSets(state.layers, findVector(state.vector, cards)),
  } satisfies JsonObject;
}

export type SweepBody = ReturnType<typeof makeSweep>;

/** What was asked and what came back, side by side: the form may have changed since. */
export interface Swept {
  cases: SweptCase[];
  hasText: boolean;
  scales: number[];
  answer: Schemas["SweepAnswer"];
  /** Points by set of layers, in the order of the scales. */
  sets: { name: string; points: Schemas["SweepPoint"][] }[];
  /** The scale, and the set of layers, next to what is recommended. */
  advised?: { chosen: number; set: number };
}

/** What a cell of the map says; null where nothing was asked that says it. */
export function measureCell(point: Schemas["SweepPoint"] | undefined, measure: MapMeasure): number | null {
  if (point === undefined) return null;
  if (measure === "perplexity") return point.texts[0]?.perplexity ?? null;
  const values = point.items.map(({ kl, targets: [first, second] }) => {
    if (measure === "kl") return kl;
    if (first?.logprob == null) return null;
    return second === undefined ? first.change : second.logprob === null ? null : first.logprob - second.logprob;
  });
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

export function pairUp(body: ReturnType<typeof makeSweep>, answer: Schemas["SweepAnswer"], card: VectorCard | undefined): Swept {
  const { scales } = body;
  const sets = (body.layers ?? [null]).map((layers, at) => ({
    name: layers === null ? "the vector's own layers" : `layer ${layers.join(", ")}`,
    points: answer.points.slice(at * scales.length, (at + 1) * scales.length),
  }));
  const start = adviseScale(card);
  const away = scales.map((scale) => Math.abs(scale - (start ?? Infinity)));
  const advised = start === undefined ? undefined : {
    chosen: away.indexOf(Math.min(...away)),
    set: Math.max(0, (body.layers ?? []).findIndex(([layer]) => layer === card?.about.recommendation?.layer)),
  };
  return { cases: body.items ?? [], hasText: body.texts !== undefined, scales, answer, sets, advised };
}

/** Everything that is known, a line for each set of layers, scale and target or text. */
export function toCsv({ cases, answer, sets }: Swept): string {
  const head = ["layers", "scale", "relative_norm", "context", "target", "logprob", "change", "kl", "perplexity"];
  const rows: (string | number | null)[][] = [];
  const add = (layers: string, point: Schemas["SweepPoint"]): void => {
    const place = [layers, point.scale, point.relative_norm];
    point.items.forEach((item, at) =>
      item.targets.forEach((target, index) =>
        rows.push([...place, cases[at]?.context ?? "", cases[at]?.targets[index] ?? "", target.logprob, target.change, item.kl, null]),
      ),
    );
    for (const text of point.texts) rows.push([...place, null, null, null, null, null, text.perplexity]);
  };
  add("unsteered", answer.unsteered);
  for (const { name, points } of sets) for (const point of points) add(name, point);
  return writeCsv(head, rows);
}

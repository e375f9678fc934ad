// A steering object from what a form says, and which scales make sense for it.
import type { Schemas } from "./api";
import type { Json, JsonObject } from "./snippets";
import { findSae, type VectorCard } from "./vectors";

export type Operation = "add" | "ablate" | "project" | "clamp" | "replace" | "rotate";
export type Unit = "raw" | "unit" | "residual_norm";
/** Empty, of a vector alone: those of the steering object. */
export type Positions =
  | ""
  | "all"
  | "prompt"
  | "completion"
  | "predicting"
  | "last_prompt"
  | "slices";

/** The fields of a form about one vector; texts are as they were typed. */
export type VectorFields = {
  vector: string;
  /** As in `2` or `2,5-7`; empty: the one recommended; `own`: every layer that the vector has; `14:all`: every layer, by the direction of that one. */
  layers: string;
  op: Operation;
  unit: Unit;
  /** Bounds of `clamp`; empty: none. */
  low: string;
  high: string;
  /** Act only where this vector reads above or below a number; empty: everywhere. */
  when: string;
  whenLayer: string;
  above: string;
  below: string;
  /** The tokens that this vector changes, and its slices where these say so. */
  where: Positions;
  whereSlices: string;
};

/** Where a steering object acts: all vectors without positions of their own. */
export type PlaceFields = {
  positions: Positions;
  /** As in `0:5,8:10`, of positions `slices`. */
  slices: string;
};

export type SteeringFields = VectorFields & PlaceFields;

export const INITIAL_VECTOR: VectorFields = {
  vector: "",
  layers: "",
  op: "add",
  unit: "raw",
  low: "0",
  high: "",
  when: "",
  whenLayer: "",
  above: "0",
  below: "",
  where: "",
  whereSlices: "0:4",
};

export const INITIAL_STEERING: SteeringFields = { ...INITIAL_VECTOR, positions: "all", slices: "0:4" };

/** Layers of a text as in `2,5-7`; null for one that is none. */
export function parseLayers(text: string): number[] | null {
  const layers: number[] = [];
  for (const part of text.split(",")) {
    const found = /^\s*(\d+)\s*(?:-\s*(\d+)\s*)?$/.exec(part);
    if (found === null) return null;
    const first = Number(found[1]);
    const last = Number(found[2] ?? first);
    if (last < first || last - first > 10_000) return null;
    for (let layer = first; layer <= last; layer++) layers.push(layer);
  }
  return layers;
}

/** Layers as in `2, 5`, or from the first to the last where they follow one another. */
export function nameLayers(layers: readonly number[]): string {
  const isRun = layers.every((layer, at) => layer === (layers[0] ?? 0) + at);
  return isRun && layers.length > 2 ? `${layers[0]}–${layers.at(-1)}` : layers.join(", ");
}

const EVERYWHERE = ":all";

/** Whether one layer's direction is used at all layers, and the text without that. */
export function splitLayers(text: string): { isEverywhere: boolean; own: string } {
  const isEverywhere = text.trimEnd().endsWith(EVERYWHERE);
  return { isEverywhere, own: isEverywhere ? text.trimEnd().slice(0, -EVERYWHERE.length) : text };
}

/** The text of layers that are used there alone, or everywhere. */
export function joinLayers(own: string, isEverywhere: boolean): string {
  return isEverywhere ? `${own}${EVERYWHERE}` : own;
}

/** Where a vector acts: at its own layers, or everywhere with the direction of one. */
function readPlaces(text: string, card: VectorCard | undefined): JsonObject {
  const layers = readLayers(text, card);
  if (!splitLayers(text).isEverywhere) return { layers };
  const [layer] = layers ?? [];
  if (layer === undefined || layers?.length !== 1) throw new Error("Name one layer, whose direction is used at all of them.");
  return { from_layer: layer };
}

/** What a typed text says, or an Error that says how to write it. */
export function readLayers(written: string, card: VectorCard | undefined): number[] | undefined {
  const { own: text } = splitLayers(written);
  if (text.trim() === "own") return undefined;
  if (text.trim() === "") {
    const best = card?.about.recommendation?.layer;
    return best === undefined ? undefined : [best];
  }
  const layers = parseLayers(text);
  if (layers === null) {
    throw new Error(`Layers “${text}” are not written as in 4 or 2,5-7; leave the field empty for the recommended one.`);
  }
  return layers;
}

function readNumber(text: string): number | undefined {
  const value = Number(text);
  return text.trim() === "" || !Number.isFinite(value) ? undefined : value;
}

function readSlices(text: string): number[][] {
  return text.split(",").map((part) => {
    const found = /^\s*(\d+)\s*:\s*(\d+)\s*$/.exec(part);
    if (found === null) throw new Error(`Slices “${text}” are not written as in 0:5,8:10.`);
    return [Number(found[1]), Number(found[2])];
  });
}

/** A vector of a steering object, without what is as by default. Throws Error where a text makes no sense. */
export function makeVector(
  fields: VectorFields,
  cards: readonly VectorCard[],
  scale: number | undefined,
): JsonObject {
  const card = findVector(fields.vector, cards);
  const { op, unit } = fields;
  const takesUnit = op === "add" || op === "project" || op === "replace";
  const vector: JsonObject = {
    ...makeReference(fields.vector, cards),
    ...readPlaces(fields.layers, card),
    op: op === "add" ? undefined : op,
    unit: unit === "raw" || !takesUnit ? undefined : unit,
  };
  if (op === "clamp") vector.params = { min: readNumber(fields.low), max: readNumber(fields.high) };
  else vector.scale = scale;
  if (fields.when !== "") {
    vector.when = {
      probe: { ...makeReference(fields.when, cards), layers: readLayers(fields.whenLayer, findVector(fields.when, cards)) },
      above: readNumber(fields.above),
      below: readNumber(fields.below),
    };
  }
  if (fields.where !== "") vector.positions = makePositions(fields.where, fields.whereSlices);
  return vector;
}

function makePositions(positions: Positions, slices: string): Json {
  return positions === "slices" ? { slices: readSlices(slices) } : positions;
}

/** The steering object of these vectors. Throws Error where slices make no sense. */
export function makeSteering(vectors: JsonObject[], { positions, slices }: PlaceFields): JsonObject {
  return { vectors, positions: positions === "all" ? undefined : makePositions(positions, slices) };
}

/** The vector of this name; where none is named the first that is stored. */
export function findVector(name: string, cards: readonly VectorCard[]): VectorCard | undefined {
  return name === "" ? cards[0] : cards.find((card) => card.name === name);
}

/** How a request names a vector: `name`, or a feature of an autoencoder, as in `res8/123`. Throws Error where none is named. */
export function makeReference(vector: string, cards: readonly VectorCard[]): JsonObject {
  const card = findVector(vector, cards);
  const sae = card === undefined ? findSae(vector) : undefined;
  if (sae === undefined) return { name: card?.name ?? vector };
  const feature = vector.slice(sae.name.length + 1).trim();
  if (feature === "") throw new Error(`Which feature of ${sae.name}? Give its id, or its label.`);
  return { sae: sae.name, feature: /^\d+$/.test(feature) ? Number(feature) : feature };
}

export interface Reach {
  min: number;
  max: number;
  step: number;
  /** Where to begin. */
  start: number;
}

/** Round up to a number that reads well. */
function roundUp(value: number): number {
  const power = 10 ** Math.floor(Math.log10(value));
  const steps = [1, 2, 3, 4, 5, 6, 8, 10];
  return power * (steps.find((step) => step * power >= value * 0.999) ?? 10);
}

function around(end: number, start: number): Reach {
  const step = roundUp(end / 100);
  return { min: -end, max: end, step, start: Number((Math.round(start / step) * step).toPrecision(6)) };
}

/** The scale to begin with; undefined where none is recommended. */
export function adviseScale(card: VectorCard | undefined): number | undefined {
  const scale = card?.about.recommendation?.scale;
  return scale === undefined ? undefined : Number(scale.toPrecision(3));
}

/**
 * The scales that a slider offers.
 *
 * Four times what is recommended shows where a vector begins to break the text; without a
 * recommendation a vector of norm 1 has about as much to do as the stream is long.
 */
export function reachOf(op: Operation, unit: Unit, card: VectorCard | undefined): Reach {
  if (op === "ablate") return { min: 0, max: 2, step: 0.05, start: 1 };
  if (op === "rotate") return { min: -180, max: 180, step: 1, start: 20 };
  if (unit === "residual_norm") return { min: -1.5, max: 1.5, step: 0.02, start: 0.25 };
  const best = card?.about.recommendation;
  const raw = adviseScale(card) ?? 2;
  if (op === "add" && unit === "raw") return around(roundUp(4 * raw), raw);
  const norm = card?.norms[String(best?.layer ?? card.layers[0])] ?? 1;
  const length = op === "replace" && unit === "raw" ? raw : raw * norm;
  return around(roundUp(4 * length), length);
}

export const OPERATIONS: { value: Operation; label: string; does: string }[] = [
  { value: "add", label: "Add", does: "The vector, times the scale, is added." },
  { value: "ablate", label: "Ablate", does: "What the stream has along the vector is taken away; scale 1 takes all of it." },
  { value: "project", label: "Project", does: "What the stream has along the vector is set to the scale." },
  { value: "clamp", label: "Clamp", does: "What the stream has along the vector is kept between two bounds." },
  { value: "replace", label: "Replace", does: "The stream becomes the vector, times the scale." },
  { value: "rotate", label: "Rotate", does: "The stream is turned toward the vector by so many degrees; its length stays." },
];

export const UNITS: { value: Unit; label: string }[] = [
  { value: "raw", label: "the vector as it is" },
  { value: "unit", label: "the vector at norm 1" },
  { value: "residual_norm", label: "shares of the stream's norm" },
];

export const POSITIONS: { value: Positions; label: string }[] = [
  { value: "all", label: "all tokens" },
  { value: "prompt", label: "the prompt" },
  { value: "completion", label: "the completion" },
  { value: "predicting", label: "from the prompt's last token on" },
  { value: "last_prompt", label: "the prompt's last token" },
  { value: "slices", label: "slices …" },
];

export type Receipt = Schemas["SteeringReceipt"];

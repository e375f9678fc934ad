// What the form of `inside` asks, and what is shown of the answers.
import type { Schemas } from "../../lib/api";
import type { JsonObject } from "../../lib/snippets";
import { parseLayers } from "../../lib/steering";
import type { BesideState, Condition } from "../../parts/Beside";

export type InsideState = BesideState & {
  look: "lens" | "patch" | "attribution";
  /** What a lens reads. */
  text: string;
  /** What the colours of a lens say. */
  says: "probability" | "rank" | "entropy";
  clean: string;
  corrupted: string;
  targets: string[];
  metric: NonNullable<Schemas["PatchRequest"]["metric"]>;
  direction: NonNullable<Schemas["PatchRequest"]["direction"]>;
  hook: string;
  /** Layers as in `0,4-8`; sets of them between semicolons where they are patched. Empty: each. */
  at: string;
  /** What the cells of a patch say. */
  cells: "share" | "change";
  method: NonNullable<Schemas["GradientRequest"]["attribution"]>;
  steps: number;
};

/** A lens on one text, under one condition. */
export interface LensSide {
  name: string;
  target: Schemas["LensTarget"];
}

export type Lensed = { look: "lens"; sides: LensSide[] };
export type Patched = {
  look: "patch";
  metric: InsideState["metric"];
  direction: InsideState["direction"];
  hook: string;
  result: Schemas["PatchResult"];
};
export type Attributed = { look: "attribution"; targets: Schemas["TargetGradient"][] };
export type Found = Lensed | Patched | Attributed;

const TOP = 6;

function readSet(text: string): number[] {
  const layers = parseLayers(text);
  if (layers === null) throw new Error(`Layers “${text}” are not written as in 0,4-8; leave the field empty for all.`);
  return layers;
}

/** What a lens is asked, under one condition. Throws Error where layers make no sense. */
export function makeLens(state: InsideState, condition: Condition) {
  return {
    model: condition.model,
    items: [state.text],
    layers: state.at.trim() === "" ? undefined : readSet(state.at),
    columns: ["logprob", "rank", "entropy"],
    top: TOP,
    steering: condition.steering,
  } satisfies JsonObject;
}

/** What is patched. Throws Error where layers make no sense. */
export function makePatch(state: InsideState, model: string) {
  const targets = state.targets.filter((target) => target !== "");
  return {
    model,
    pairs: [{ clean: { context: state.clean, targets }, corrupted: { context: state.corrupted, targets } }],
    hook: state.hook,
    layers: state.at.trim() === "" ? undefined : state.at.split(";").map(readSet),
    metric: state.metric,
    direction: state.direction,
  } satisfies JsonObject;
}

/** What an attribution is asked. */
export function makeAttribution(state: InsideState, model: string) {
  return {
    model,
    items: [{ context: state.clean, targets: state.targets.filter((target) => target !== "") }],
    attribution: state.method,
    steps: state.method === "integrated" ? state.steps : undefined,
  } satisfies JsonObject;
}

/** Jobs that a patch is about, by the model's layers and the characters of a token. */
export function guessRuns(state: InsideState, numLayers: number): number {
  const sets = state.at.trim() === "" ? numLayers : state.at.split(";").length;
  return sets * Math.ceil(state.corrupted.length / 4);
}

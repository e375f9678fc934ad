// What the form of `examples` asks: a capture that keeps the tokens which its probes read highest.
import type { JsonObject } from "../../lib/snippets";
import { findVector, makeReference, nameLayers, readLayers } from "../../lib/steering";
import { findSae, type VectorCard } from "../../lib/vectors";

export type FormState = {
  /** What the capture is called. */
  name: string;
  /** A text a line. */
  texts: string;
  /** As in `mood`, `mood@4,6`, or `res8/123` for a feature. */
  probes: string[];
  read: "cosine" | "projection";
  /** Examples of each. */
  k: number;
  /** Tokens of a text that are read; 0: all. */
  length: number;
};

/** Of few texts examples are seen as soon as they can be; many such shards would make a long index. */
const FEW = { bytes: 2 ** 24, shardRows: 2 ** 13 };

interface Probe {
  vector: string;
  /** As they were typed. */
  layers: string;
}

export function splitProbe(probe: string): Probe {
  // The label of a feature may hold an @.
  const at = findSae(probe) === undefined ? probe.indexOf("@") : -1;
  return at < 0 ? { vector: probe, layers: "" } : { vector: probe.slice(0, at), layers: probe.slice(at + 1) };
}

export function joinProbe({ vector, layers }: Probe): string {
  return layers === "" ? vector : `${vector}@${layers}`;
}

/** The address of the form for one vector or feature. */
export function linkExamples(probe: string): string {
  return `#examples?${new URLSearchParams({ probes: JSON.stringify([probe]) })}`;
}

interface Placed {
  probe: JsonObject;
  layers: readonly number[];
  hook: string;
}

function place(probe: string, read: FormState["read"], cards: readonly VectorCard[]): Placed {
  const { vector, layers: typed } = splitProbe(probe);
  const card = findVector(vector, cards);
  const sae = card === undefined ? findSae(vector) : undefined;
  if (sae !== undefined) {
    return { probe: { ...makeReference(vector, cards), read: "activation" }, layers: [sae.layer], hook: sae.hook };
  }
  if (vector === "" && card === undefined) throw new Error("Choose a vector or a feature.");
  if (card === undefined) throw new Error(`No vector ${vector} is stored for this model: choose another one.`);
  const layers = readLayers(typed, card) ?? card.layers;
  if (typed.trim() === "" && layers.length > 1) {
    throw new Error(`Name the layer that ${card.name} is read at; it has ${nameLayers(card.layers)}, and none is recommended.`);
  }
  return { probe: { name: card.name, layers: [...layers], read }, layers, hook: card.hook };
}

export function readTexts(texts: string): string[] {
  return texts.split(/\r?\n/).filter((line) => line.trim() !== "");
}

/** The capture's request. Throws Error where a probe makes no sense. */
export function makeCapture(
  state: FormState,
  model: string,
  cards: readonly VectorCard[],
  /** null: they were uploaded. */
  texts: string[] | null,
  bytes: number,
  overwrite: true | undefined,
) {
  const placed = state.probes.map((probe) => place(probe, state.read, cards));
  const hooks = [...new Set(placed.map(({ hook }) => hook))];
  if (hooks.length > 1) throw new Error(`These read different activations, ${hooks.join(" and ")}: find their examples one after the other.`);
  return {
    model,
    name: state.name.trim(),
    items: texts ?? undefined,
    layers: [...new Set(placed.flatMap(({ layers }) => layers))].sort((a, b) => a - b),
    hook: hooks[0] === "resid_post" ? undefined : hooks[0],
    max_length: state.length || undefined,
    shard_rows: bytes <= FEW.bytes ? FEW.shardRows : undefined,
    reduce: { top: placed.map(({ probe }) => probe), k: state.k },
    overwrite,
  } satisfies JsonObject;
}

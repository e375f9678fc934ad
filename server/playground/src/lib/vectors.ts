// The stored vectors that fit the model that is asked; views that change them call `refreshVectors`.
import { computed, effect, signal } from "@preact/signals";
import { call, type Schemas } from "./api";
import { currentModel } from "./models";

export type VectorCard = Schemas["VectorCard"];
export type SaeCard = Schemas["SaeCard"];

/** null until they were asked for. */
export const vectors = signal<VectorCard[] | null>(null);

/** The model whose vectors these are. */
export const askedModel = computed(() => currentModel.value?.variant_of ?? currentModel.value?.id);

effect(() => {
  askedModel.value;
  vectors.value = null;
});

/** The stored sparse autoencoders, whose features are vectors. */
export const saes = signal<SaeCard[]>([]);

export async function refreshVectors(): Promise<void> {
  const model = askedModel.value;
  if (model === undefined) return;
  const [stored, coders] = await Promise.all([call("get", "/vectors", undefined, { query: { model } }), call("get", "/saes", undefined)]);
  if (model !== askedModel.value) return;
  saes.value = coders.saes;
  vectors.value = stored.vectors;
}

/** The autoencoder that a name such as `res8/123` is a feature of. */
export function findSae(vector: string): SaeCard | undefined {
  return saes.value.find(({ name }) => vector.startsWith(`${name}/`));
}

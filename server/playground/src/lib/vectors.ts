// The stored vectors that this page's key sees; views that change them call `refreshVectors`.
import { signal } from "@preact/signals";
import { call, type Schemas } from "./api";

export type VectorCard = Schemas["VectorCard"];
export type SaeCard = Schemas["SaeCard"];

/** null until they were asked for. */
export const vectors = signal<VectorCard[] | null>(null);

/** The stored sparse autoencoders, whose features are vectors. */
export const saes = signal<SaeCard[]>([]);

export async function refreshVectors(): Promise<void> {
  const [stored, coders] = await Promise.all([call("get", "/vectors", undefined), call("get", "/saes", undefined)]);
  saes.value = coders.saes;
  vectors.value = stored.vectors;
}

/** The autoencoder that a name such as `res8/123` is a feature of. */
export function findSae(vector: string): SaeCard | undefined {
  return saes.value.find(({ name }) => vector.startsWith(`${name}/`));
}

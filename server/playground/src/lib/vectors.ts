// The stored vectors that this page's key sees; views that change them call `refreshVectors`.
import { signal } from "@preact/signals";
import { call, type Schemas } from "./api";

export type VectorCard = Schemas["VectorCard"];

/** null until they were asked for. */
export const vectors = signal<VectorCard[] | null>(null);

export async function refreshVectors(): Promise<void> {
  vectors.value = (await call("get", "/vectors", undefined)).vectors;
}

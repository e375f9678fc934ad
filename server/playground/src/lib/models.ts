// The server's models, and the one that is asked.
import { computed, effect, signal } from "@preact/signals";
import { call, isAway, ServerProblem, type ModelCard, type Schemas } from "./api";

export type VariantCard = Schemas["VariantCard"];

export const models = signal<ModelCard[]>([]);
/** The stored variants, whose names are models. */
export const variants = signal<VariantCard[]>([]);
export const modelsError = signal<unknown>(null);
/** The id that was chosen or came with the address; empty: the first that is ready. */
export const chosenModel = signal("");

/** The models, then the variants: each is the model that it is a variant of, under its own name. */
export const namedModels = computed<ModelCard[]>(() => [
  ...models.value,
  ...variants.value.flatMap(({ name, model }) =>
    models.value.filter(({ id }) => id === model).map((base) => ({ ...base, id: name, variant_of: base.id })),
  ),
]);

export const currentModel = computed<ModelCard | null>(() => {
  const all = namedModels.value;
  return (
    all.find((model) => model.id === chosenModel.value) ??
    all.find((model) => model.state === "ready") ??
    all[0] ??
    null
  );
});

const SETTLED_MS = 15_000;
const UNSETTLED_MS = 1_000;

export async function refreshModels(): Promise<void> {
  try {
    const answer = await call("get", "/models", undefined);
    models.value = answer.models;
    variants.value = answer.variants ?? [];
    modelsError.value = null;
  } catch (error) {
    modelsError.value = error;
  }
}

/** Whether the server has nothing to say to who has no key. */
export const isLockedOut = computed(
  () => modelsError.value instanceof ServerProblem && modelsError.value.problem.status === 401,
);

// An answer that broke off does not say whether the server is gone.
effect(() => {
  if (isAway.value) void refreshModels();
});

/**
 * Ask for the models now, and from time to time while somebody looks; often while one loads.
 *
 * Who will give no key is asked for none again, until they ask themselves.
 */
export async function watchModels(): Promise<void> {
  if (!document.hidden) await refreshModels();
  if (isLockedOut.value) return;
  const settled = !isAway.value && models.value.length > 0 && models.value.every((m) => m.state === "ready");
  setTimeout(() => void watchModels(), settled ? SETTLED_MS : UNSETTLED_MS);
}

/** Whether a key was refused what changes models: another one may have the scope. */
export const isRefused = signal(false);

/** Have a model answer, answer no more, or give its memory back; the list then says how far it has come. */
export async function changeModel(id: string, change: "load" | "drain" | "unload", signal: AbortSignal): Promise<void> {
  await watchScope(call("post", `/models/{model_id}/${change}`, undefined, { path: { model_id: id }, signal }));
  await refreshModels();
}

/** Have the server read its configuration again; what has changed. */
export async function reloadConfiguration(signal: AbortSignal): Promise<Schemas["ReloadAnswer"]> {
  const answer = await watchScope(call("post", "/admin/reload", undefined, { query: { wait_s: "5" }, signal }));
  await refreshModels();
  return answer;
}

async function watchScope<T>(asked: Promise<T>): Promise<T> {
  try {
    return await asked;
  } catch (error) {
    isRefused.value = error instanceof ServerProblem && error.problem.status === 403;
    throw error;
  }
}

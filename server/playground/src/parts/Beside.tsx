// What a result is compared with: the same under steering, or another model.
import type { ModelCard } from "../lib/api";
import type { JsonObject } from "../lib/snippets";
import { findVector, INITIAL_VECTOR, makeVector, reachOf, type VectorFields } from "../lib/steering";
import type { VectorCard } from "../lib/vectors";
import { VectorAndLayers } from "../views/steering/VectorFields";
import { NumberField, Segments, Select } from "./fields";

export type BesideState = {
  beside: "none" | "model" | "steered";
  other: string;
  vector: string;
  layers: string;
  scale: number;
};

export const INITIAL_BESIDE: BesideState = { beside: "none", other: "", vector: "", layers: "", scale: 1 };

export interface Condition {
  model: string;
  steering?: JsonObject;
  /** As in `steered by mood × 2`. */
  name: string;
}

/** The condition that the form names; null: none, or none yet. Throws Error where layers make no sense. */
export function makeBeside(
  state: BesideState,
  model: string,
  models: readonly ModelCard[],
  cards: readonly VectorCard[] | null,
): Condition | null {
  if (state.beside === "model") {
    const others = models.filter(({ id }) => id !== model);
    const other = others.find(({ id }) => id === state.other) ?? others[0];
    return other ? { model: other.id, name: other.id } : null;
  }
  const card = findVector(state.vector, cards ?? []);
  if (state.beside === "none" || (card === undefined && state.vector === "")) return null;
  const fields: VectorFields = { ...INITIAL_VECTOR, vector: state.vector, layers: state.layers };
  const vector = makeVector(fields, cards ?? [], state.scale);
  return { model, steering: { vectors: [vector] }, name: `steered by ${card?.name ?? state.vector} × ${state.scale}` };
}

interface BesideProps {
  state: BesideState;
  setState: (change: Partial<BesideState>) => void;
  model: ModelCard | null;
  models: readonly ModelCard[];
  cards: readonly VectorCard[] | null;
}

export function BesideFields({ state, setState, model, models, cards }: BesideProps) {
  const others = models.filter((other) => other.id !== model?.id);
  return (
    <>
      <Segments
        label="Beside it"
        value={state.beside}
        options={[
          { value: "none", label: "Nothing" },
          { value: "steered", label: "Steered" },
          { value: "model", label: "Another model" },
        ]}
        onChange={(beside) => setState({ beside })}
      />
      {state.beside === "model" && others.length === 0 && (
        <p class="note">
          This server has one model. Configure a second one to compare two on the same text, such as{" "}
          <code>demo/both.yaml</code> does.
        </p>
      )}
      {state.beside === "model" && others.length > 0 && (
        <Select
          label="Other model"
          value={others.find((other) => other.id === state.other)?.id ?? others[0]?.id ?? ""}
          options={others.map((other) => ({ value: other.id, label: other.id }))}
          onChange={(other) => setState({ other })}
        />
      )}
      {state.beside === "steered" && cards?.length === 0 && <LacksVector />}
      {state.beside === "steered" && cards !== null && cards.length > 0 && (
        <>
          <VectorAndLayers
            fields={{ ...INITIAL_VECTOR, vector: state.vector, layers: state.layers }}
            cards={cards}
            model={model}
            onChange={({ vector, layers }) =>
              setState(
                vector === undefined
                  ? { layers: layers ?? "" }
                  : { vector, scale: reachOf("add", "raw", findVector(vector, cards)).start },
              )
            }
          />
          <NumberField
            label="Scale"
            value={state.scale}
            step="any"
            onChange={(scale) => setState({ scale: scale ?? 0 })}
          />
        </>
      )}
    </>
  );
}

/** Said where a vector is wanted and none is stored. */
export function LacksVector() {
  return (
    <p class="note">
      No vector is stored yet. Train one from pairs of texts under <a href="#vectors">Vectors</a>; it
      takes a few seconds.
    </p>
  );
}

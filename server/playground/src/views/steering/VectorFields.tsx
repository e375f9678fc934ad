// The parts of a form that say what is done to the activations; Steer, Choices and Dose-response have them.
import type { ModelCard } from "../../lib/api";
import {
  findVector,
  joinLayers,
  OPERATIONS,
  nameLayers,
  POSITIONS,
  splitLayers,
  UNITS,
  type Operation,
  type PlaceFields,
  type VectorFields as Fields,
} from "../../lib/steering";
import { findSae, saes, type VectorCard } from "../../lib/vectors";
import { Checkbox, Select, TextField } from "../../parts/fields";

interface VectorFieldsProps {
  fields: Fields;
  onChange: (change: Partial<Fields>) => void;
  cards: readonly VectorCard[];
  model: ModelCard | null;
  /** Operations to leave out: a sweep has no clamp. */
  without?: readonly Operation[];
  /** Layers as sets, for a sweep: `2;3;2,3`. */
  layersHint?: string;
}

/** Which vector, and at which layers. */
export function VectorAndLayers({ fields, onChange, cards, model, layersHint }: VectorFieldsProps) {
  const card = findVector(fields.vector, cards);
  const { isEverywhere, own } = splitLayers(fields.layers);
  return (
    <>
      <div class="row">
        <VectorSelect
          label="Vector"
          value={fields.vector}
          cards={cards}
          hasFeatures
          onChange={(vector) => onChange({ vector })}
        />
        <TextField
          label={isEverywhere ? "Layer" : "Layers"}
          value={own}
          placeholder={describeOwnLayers(fields.vector, card)}
          hint={layersHint ?? `0 to ${(model?.num_layers ?? 1) - 1}, as in 4 or 2,5-7; or own`}
          onChange={(layers) => onChange({ layers: joinLayers(layers, isEverywhere) })}
        />
      </div>
      <Checkbox
        label="Its direction at all layers"
        value={isEverywhere}
        onChange={(next) => onChange({ layers: joinLayers(/^\s*\d+\s*$/.test(own) ? own : "", next) })}
      />
    </>
  );
}

/** What is done along a vector, and under which condition. */
export function OperationFields({ fields, onChange, cards, without = [] }: VectorFieldsProps) {
  const operations = OPERATIONS.filter(({ value }) => !without.includes(value));
  return (
    <>
      <div class="row">
        <Select
          label="Operation"
          value={fields.op}
          options={operations}
          onChange={(op) => onChange({ op })}
        />
        {["add", "project", "replace"].includes(fields.op) && (
          <Select
            label="Scale counts"
            value={fields.unit}
            options={UNITS}
            onChange={(unit) => onChange({ unit })}
          />
        )}
        <VectorSelect
          label="Only where"
          value={fields.when}
          cards={cards}
          none="everywhere"
          hasFeatures
          onChange={(when) => onChange({ when })}
        />
      </div>
      <p class="hint">{OPERATIONS.find(({ value }) => value === fields.op)?.does}</p>
      {fields.when !== "" && (
        <div class="row">
          <TextField
            label="reads at layer"
            value={fields.whenLayer}
            placeholder="recommended"
            hint="Not after the steered layer."
            onChange={(whenLayer) => onChange({ whenLayer })}
          />
          <TextField
            label="above"
            value={fields.above}
            placeholder="no bound"
            onChange={(above) => onChange({ above })}
          />
          <TextField
            label="or below"
            value={fields.below}
            placeholder="no bound"
            onChange={(below) => onChange({ below })}
          />
        </div>
      )}
    </>
  );
}

interface PlaceProps {
  fields: PlaceFields;
  onChange: (change: Partial<PlaceFields>) => void;
  /** A first option without positions, under this name. */
  shared?: string;
}

/** At which tokens. */
export function PositionFields({ fields, onChange, shared }: PlaceProps) {
  return (
    <div class="row">
      <Select
        label="Positions"
        value={fields.positions}
        options={shared === undefined ? POSITIONS : [{ value: "", label: shared }, ...POSITIONS]}
        onChange={(positions) => onChange({ positions })}
      />
      {fields.positions === "slices" && (
        <TextField
          label="Slices"
          value={fields.slices}
          hint="Positions from and to, as in 0:5,8:10."
          onChange={(slices) => onChange({ slices })}
        />
      )}
    </div>
  );
}

interface VectorSelectProps {
  label: string;
  value: string;
  cards: readonly VectorCard[];
  onChange: (name: string) => void;
  /** A first option that chooses none, under this name. */
  none?: string;
  /** Whether features of autoencoders can be chosen. */
  hasFeatures?: boolean;
}

/** A stored vector or a feature of an autoencoder, or one that a link names and that is not stored here. */
export function VectorSelect({ label, value, cards, onChange, none, hasFeatures = false }: VectorSelectProps) {
  const options = cards.map((card) => ({ value: card.name, label: card.other_weights ? `${card.name} (of other weights)` : card.name }));
  if (none !== undefined) options.unshift({ value: "", label: none });
  if (hasFeatures) options.push(...saes.value.map(({ name }) => ({ value: `${name}/`, label: `${name}: a feature` })));
  const sae = hasFeatures && !cards.some(({ name }) => name === value) ? findSae(value) : undefined;
  const named = value === "" && none === undefined ? (cards[0]?.name ?? "") : value;
  const shown = sae === undefined ? named : `${sae.name}/`;
  if (!options.some((option) => option.value === shown)) {
    options.push({ value: shown, label: shown === "" ? "choose one" : `${shown} (not stored here)` });
  }
  return (
    <>
      <Select label={label} value={shown} options={options} onChange={onChange} />
      {sae && (
        <TextField
          label="Feature"
          value={value.slice(sae.name.length + 1)}
          hint={`0 to ${sae.features - 1}${sae.labels > 0 ? ", or its label" : ""}`}
          onChange={(feature) => onChange(`${sae.name}/${feature}`)}
        />
      )}
    </>
  );
}

/** What an empty field of layers means. */
export function describeOwnLayers(vector: string, card: VectorCard | undefined): string {
  const sae = card === undefined ? findSae(vector) : undefined;
  if (sae !== undefined) return String(sae.layer);
  const best = card?.about.recommendation?.layer;
  return best === undefined ? nameLayers(card?.layers ?? []) : `${best} (recommended)`;
}

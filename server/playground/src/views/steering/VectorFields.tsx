// The part of a form that says what is done to the activations; Steer and Dose-response have it.
import type { ModelCard } from "../../lib/api";
import { fixed } from "../../lib/format";
import {
  findVector,
  OPERATIONS,
  POSITIONS,
  UNITS,
  type Operation,
  type SteeringFields,
} from "../../lib/steering";
import type { VectorCard } from "../../lib/vectors";
import { Select, TextField } from "../../parts/fields";

interface VectorFieldsProps {
  fields: SteeringFields;
  onChange: (change: Partial<SteeringFields>) => void;
  cards: readonly VectorCard[];
  model: ModelCard | null;
  /** Operations to leave out: a sweep has no clamp. */
  without?: readonly Operation[];
  /** Layers as sets, for a sweep: `2;3;2,3`. */
  layersHint?: string;
}

export function VectorFields(props: VectorFieldsProps) {
  const { fields, onChange, cards, model, without = [], layersHint } = props;
  const card = findVector(fields.vector, cards);
  const operations = OPERATIONS.filter(({ value }) => !without.includes(value));
  return (
    <>
      <div class="row">
        <VectorSelect
          label="Vector"
          value={fields.vector}
          cards={cards}
          onChange={(vector) => onChange({ vector })}
        />
        <TextField
          label="Layers"
          value={fields.layers}
          placeholder={describeOwnLayers(card)}
          hint={layersHint ?? describeLayers(card, model)}
          onChange={(layers) => onChange({ layers })}
        />
        <Select
          label="Operation"
          value={fields.op}
          options={operations}
          hint={OPERATIONS.find(({ value }) => value === fields.op)?.does}
          onChange={(op) => onChange({ op })}
        />
      </div>
      <div class="row">
        {["add", "project", "replace"].includes(fields.op) && (
          <Select
            label="Scale counts"
            value={fields.unit}
            options={UNITS}
            onChange={(unit) => onChange({ unit })}
          />
        )}
        <Select
          label="Positions"
          value={fields.positions}
          options={POSITIONS}
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
        <VectorSelect
          label="Only where"
          value={fields.when}
          cards={cards}
          none="everywhere"
          onChange={(when) => onChange({ when })}
        />
      </div>
      {fields.when !== "" && <Condition {...props} />}
    </>
  );
}

function Condition({ fields, onChange }: VectorFieldsProps) {
  return (
    <div class="row">
      <TextField
        label="reads at layer"
        value={fields.whenLayer}
        placeholder="recommended"
        hint="Not behind the layer that is steered."
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
  );
}

interface VectorSelectProps {
  label: string;
  value: string;
  cards: readonly VectorCard[];
  onChange: (name: string) => void;
  /** A first option that chooses none, under this name. */
  none?: string;
  hint?: string;
}

/** A stored vector, or one that a link names and that is not stored here. */
export function VectorSelect({ label, value, cards, onChange, none, hint }: VectorSelectProps) {
  const options = cards.map(({ name }) => ({ value: name, label: name }));
  if (none !== undefined) options.unshift({ value: "", label: none });
  const shown = value === "" && none === undefined ? (cards[0]?.name ?? "") : value;
  if (!options.some((option) => option.value === shown)) {
    options.push({ value: shown, label: `${shown} (not stored here)` });
  }
  return <Select label={label} value={shown} options={options} hint={hint} onChange={onChange} />;
}

function describeOwnLayers(card: VectorCard | undefined): string {
  const best = card?.about.recommendation?.layer;
  return best === undefined ? (card?.layers.join(", ") ?? "") : `${best} (recommended)`;
}

function describeLayers(card: VectorCard | undefined, model: ModelCard | null): string {
  const auc = card?.about.recommendation && card.about.quality?.[card.about.recommendation.layer]?.auc;
  const told = typeof auc === "number" ? ` Layer ${card?.about.recommendation?.layer} tells texts apart best: AUC ${fixed(auc, 2)}.` : "";
  return `0 to ${(model?.num_layers ?? 1) - 1}, as in 4 or 2,5-7; own: all of the vector's.${told}`;
}

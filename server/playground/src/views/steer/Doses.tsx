// The vectors of a steering object, each with its layers, its scale, and what is done along it.
import { parseFields, writeFields } from "../../lib/address";
import type { ModelCard } from "../../lib/api";
import { short } from "../../lib/format";
import { findVector, INITIAL_VECTOR, reachOf, type Reach, type VectorFields } from "../../lib/steering";
import type { VectorCard } from "../../lib/vectors";
import { NumberField, Slider, TextField } from "../../parts/fields";
import { Icon } from "../../parts/Icon";
import { OperationFields, PositionFields, VectorAndLayers } from "../steering/VectorFields";

/** A vector and how much of it. */
export type Dose = VectorFields & { scale: number };

export type DosesState = Dose & {
  /** Vectors beside the first, each written as in an address: `vector=calm&scale=2`. */
  more: string[];
  /** Scales of the first vector, a column each, as in `-2, 0, 2`; empty: the slider's alone. */
  scales: string;
  n: number;
};

const INITIAL_DOSE: Dose = { ...INITIAL_VECTOR, scale: 1 };

export function readDose(written: string): Dose {
  return parseFields(INITIAL_DOSE, new Map(new URLSearchParams(written)));
}

function writeDose(dose: Dose): string {
  return writeFields(dose, INITIAL_DOSE).query.toString();
}

/** All vectors of the form, the first one first. */
export function listDoses(state: DosesState): Dose[] {
  return [state, ...state.more.map(readDose)];
}

interface DosesProps {
  state: DosesState;
  setState: (change: Partial<DosesState>) => void;
  cards: readonly VectorCard[];
  model: ModelCard | null;
}

export function Doses({ state, setState, cards, model }: DosesProps) {
  const change = (at: number, next: Partial<Dose>): void => {
    if (at === 0) setState(next);
    else setState({ more: state.more.map((old, index) => (index === at - 1 ? writeDose({ ...readDose(old), ...next }) : old)) });
  };
  const doses = listDoses(state);
  return (
    <div class="doses">
      {doses.map((dose, at) => {
        const alter = (next: Partial<Dose>): void => change(at, { ...next, ...startOver(dose, next, cards) });
        return (
          <fieldset key={at} class="dose">
            <legend class="off-screen">Vector {at + 1}</legend>
            <VectorAndLayers fields={dose} onChange={alter} cards={cards} model={model} />
            <ScaleFields dose={dose} onChange={(next) => change(at, next)} cards={cards} />
            <details class="more" open={isUnusual(dose) || undefined}>
              <summary>Operation, condition{doses.length > 1 && ", positions"}</summary>
              <OperationFields fields={dose} onChange={alter} cards={cards} model={model} />
              {(doses.length > 1 || dose.where !== "") && (
                <PositionFields
                  fields={{ positions: dose.where, slices: dose.whereSlices }}
                  shared="as all vectors"
                  onChange={({ positions, slices }) =>
                    change(at, { where: positions ?? dose.where, whereSlices: slices ?? dose.whereSlices })
                  }
                />
              )}
            </details>
            {at > 0 && (
              <button
                type="button"
                class="quiet"
                onClick={() => setState({ more: state.more.filter((_, index) => index !== at - 1) })}
              >
                <Icon name="close" /> Without this vector
              </button>
            )}
          </fieldset>
        );
      })}
      <div class="row">
        <TextField
          label="Scales, a column each"
          value={state.scales}
          placeholder="the slider's"
          hint={doses.length > 1 ? "Of the first vector, as in -2, 0, 2." : "As in -2, 0, 2."}
          onChange={(scales) => setState({ scales })}
        />
        <NumberField label="Samples" value={state.n} min={1} max={256} onChange={(n) => setState({ n: Math.max(1, n ?? 1) })} />
      </div>
      <button
        type="button"
        class="quiet"
        onClick={() => {
          const card = cards[doses.length % cards.length];
          const scale = reachOf("add", "raw", card).start;
          setState({ more: [...state.more, writeDose({ ...INITIAL_DOSE, vector: card?.name ?? "", scale })] });
        }}
      >
        <Icon name="plus" /> Add a vector
      </button>
    </div>
  );
}

interface ScaleProps {
  dose: Dose;
  onChange: (change: Partial<Dose>) => void;
  cards: readonly VectorCard[];
}

function ScaleFields({ dose, onChange, cards }: ScaleProps) {
  const card = findVector(dose.vector, cards);
  const reach = reachOf(dose.op, dose.unit, card);
  if (dose.op === "clamp") {
    return (
      <div class="row">
        <TextField label="Not below" value={dose.low} placeholder="no bound" onChange={(low) => onChange({ low })} />
        <TextField label="Not above" value={dose.high} placeholder="no bound" onChange={(high) => onChange({ high })} />
      </div>
    );
  }
  const best = card?.about.recommendation;
  const degrees = dose.op === "rotate" ? "°" : "";
  return (
    <div class="steer-scale">
      <Slider
        label={`Scale of ${card?.name ?? dose.vector}`}
        value={dose.scale}
        min={Math.min(reach.min, dose.scale)}
        max={Math.max(reach.max, dose.scale)}
        step={stepTo(dose.scale, reach)}
        ticks={[0]}
        format={(scale) => `${short(scale)}${degrees}`}
        hint={
          best && dose.op === "add" && dose.unit === "raw"
            ? `Recommended: ${short(best.scale)} at layer ${best.layer}, or with a minus.`
            : undefined
        }
        onChange={(scale) => onChange({ scale })}
      />
      <NumberField
        label="Exactly"
        value={dose.scale}
        step="any"
        onChange={(scale) => onChange({ scale: scale ?? 0 })}
      />
    </div>
  );
}

/** The step of a slider on which this scale is: a link may have one between those that are offered. */
function stepTo(scale: number, { min, step }: Reach): number {
  const steps = (scale - min) / step;
  if (Math.abs(steps - Math.round(steps)) < 1e-6) return step;
  return 10 ** -Math.max(...[scale, min].map((value) => String(value).split(".")[1]?.length ?? 0));
}

/** A scale that fits the vector and operation which a change chooses. */
function startOver(dose: Dose, change: Partial<Dose>, cards: readonly VectorCard[]) {
  if (change.op === undefined && change.unit === undefined && change.vector === undefined) return {};
  const next = { ...dose, ...change };
  return { scale: reachOf(next.op, next.unit, findVector(next.vector, cards)).start };
}

function isUnusual({ op, unit, when, where }: Dose): boolean {
  return op !== "add" || unit !== "raw" || when !== "" || where !== "";
}

import { useEffect, useMemo, useRef } from "preact/hooks";
import { call, type Schemas } from "../lib/api";
import { useTask } from "../lib/task";
import { findVector, INITIAL_STEERING, reachOf, type SteeringFields } from "../lib/steering";
import type { VectorCard } from "../lib/vectors";
import { view, type OutcomeProps, type ViewProps } from "../lib/view";
import { CopyAs } from "../parts/CopyAs";
import { ErrorNote, RunButton, RunForm } from "../parts/controls";
import { NumberField, Segments, TextArea, TextField } from "../parts/fields";
import { Icon } from "../parts/Icon";
import { Panes } from "../parts/Panes";
import "./sweep.css";
import { NoVector } from "./steering/NoVector";
import { useNamed, useVectors } from "./steering/useVectors";
import { OperationFields, PositionFields, VectorAndLayers } from "./steering/VectorFields";
import { Curves } from "./sweep/Curves";
import { makeSweep, pairUp, readItem, writeItem, type Swept, type SweepState } from "./sweep/request";

function SweepView({ state, setState, model, isShown, result, onResult, isKept }: ViewProps<SweepState, Swept>) {
  const { cards, task: listing } = useVectors(isShown);
  const task = useTask();
  const named = model?.id;
  const made = useMemo(() => {
    try {
      return { body: makeSweep(state, cards ?? [], named), error: null };
    } catch (error) {
      return { body: null, error };
    }
  }, [state, cards, named]);
  const { body } = made;
  const run = (): void => {
    if (body === null) return;
    task.run(async (signal) => {
      const answer = await call("post", "/sweep", body as never, { signal });
      const title = `${state.vector || (cards?.[0]?.name ?? "")}: ${state.items.join("; ")}`;
      onResult(pairUp(body, answer as Schemas["SweepAnswer"]), { fields: state, title });
    });
  };
  const isReady = isShown && model?.state === "ready" && (cards?.length ?? 0) > 0;
  useNamed(state.vector, cards, (vector) => setState({ vector }));
  const hasRun = useRef(false);
  useEffect(() => {
    if (!isReady || hasRun.current || body === null || isKept) return;
    hasRun.current = true;
    run();
  }, [isReady, body]);

  if (cards === null) return <ErrorNote error={listing.error} />;
  if (cards.length === 0) {
    return <NoVector model={named} onTrained={(vector) => setState({ vector })} />;
  }
  const alter = (change: Partial<SteeringFields>): void => setState({ ...change, ...rescale(state, change, cards) });
  return (
    <Panes
      form={
      <RunForm label="What is steered, and what is scored" onRun={run}>
        <Cases items={state.items} onChange={(items) => setState({ items })} />
        <VectorAndLayers
          fields={state}
          onChange={alter}
          cards={cards}
          model={model}
          layersHint={`Sets of layers: 2;3;2,3 are three. 0 to ${(model?.num_layers ?? 1) - 1}, all, or own.`}
        />
        <div class="row sampling">
          <NumberField label="Scales from" value={state.from} step="any" onChange={(from) => setState({ from: from ?? 0 })} />
          <NumberField label="to" value={state.to} step="any" onChange={(to) => setState({ to: to ?? 0 })} />
          <NumberField label="Points" value={state.points} min={1} max={256} onChange={(points) => setState({ points: points ?? 1 })} />
        </div>
        <details class="more">
          <summary>Operation, positions; a text to follow</summary>
          <OperationFields fields={state} onChange={alter} cards={cards} model={model} without={["clamp"]} />
          <PositionFields fields={state} onChange={setState} />
          <TextArea
            label="Text whose perplexity is followed"
            value={state.text}
            rows={2}
            placeholder="none"
            onChange={(text) => setState({ text })}
          />
        </details>
        <div class="actions">
          <RunButton task={task} onRun={run} label="Sweep" disabled={body === null} />
          <Segments
            label="Curves show"
            value={state.measure}
            options={[
              { value: "change", label: "change" },
              { value: "logprob", label: "log-probability" },
              { value: "prob", label: "probability" },
            ]}
            onChange={(measure) => setState({ measure })}
          />
        </div>
      </RunForm>
      }
      below={body && <CopyAs asked={{ endpoint: "sweep", body }} />}
    >
      <ErrorNote error={made.error ?? task.error ?? listing.error} />
      {result && <Outcome result={result} state={state} setState={setState} />}
    </Panes>
  );
}

function Outcome({ result, state, setState }: OutcomeProps<SweepState, Swept>) {
  return (
    <Curves
      swept={result}
      measure={state.measure}
      vector={state.vector}
      chosen={state.chosen < 0 ? result.scales.length - 1 : state.chosen}
      onChoose={(chosen) => setState({ chosen })}
    />
  );
}

/** Scales that fit the vector and operation which a change chooses. */
function rescale(state: SweepState, change: Partial<SteeringFields>, cards: readonly VectorCard[]) {
  if (change.op === undefined && change.unit === undefined && change.vector === undefined) return {};
  const next = { ...state, ...change };
  const { min, max } = reachOf(next.op, next.unit, findVector(next.vector, cards));
  return { from: min, to: max };
}

interface CasesProps {
  items: string[];
  onChange: (items: string[]) => void;
}

/** Contexts, each with the targets that are scored behind it. */
function Cases({ items, onChange }: CasesProps) {
  const change = (at: number, line: string): void => onChange(items.map((old, index) => (index === at ? line : old)));
  return (
    <fieldset class="cases">
      <legend>Contexts and what is scored behind each</legend>
      {items.map((line, at) => {
        const { context, targets } = readItem(line);
        return (
          <div class="case" key={at}>
            <TextField
              label={`Context ${at + 1}`}
              value={context}
              onChange={(next) => change(at, writeItem({ context: next.replaceAll("|", ""), targets }))}
            />
            <TextField
              label="Targets"
              value={line.split("|").slice(1).join("|")}
              onChange={(next) => change(at, `${context}|${next}`)}
            />
            <button
              type="button"
              class="quiet"
              aria-label={`Remove context ${at + 1}`}
              onClick={() => onChange(items.filter((_, index) => index !== at))}
            >
              <Icon name="close" />
            </button>
          </div>
        );
      })}
      <div class="actions">
        <button type="button" class="quiet" onClick={() => onChange([...items, "| yes| no"])}>
          <Icon name="plus" /> Add a context
        </button>
        <span class="hint">A | stands between targets, which are scored with the spaces they have.</span>
      </div>
    </fieldset>
  );
}

export const sweep = view<SweepState, Swept>({
  id: "sweep",
  title: "Dose–response",
  icon: "sweep",
  lead: "How do its predictions move with the scale of a vector?",
  initial: {
    ...INITIAL_STEERING,
    items: ["One day, Lily was very| happy| sad", "Tom felt| happy| sad"],
    text: "The capital of France is Paris. The third planet from the sun is Earth.",
    from: -4,
    to: 4,
    points: 17,
    measure: "prob",
    chosen: -1,
  },
  component: SweepView,
  outcome: Outcome,
});

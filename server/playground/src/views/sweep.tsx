import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { call, type Schemas } from "../lib/api";
import { short } from "../lib/format";
import type { JsonObject } from "../lib/snippets";
import { attempt, useTask } from "../lib/task";
import { findVector, INITIAL_STEERING, reachOf, type SteeringFields } from "../lib/steering";
import { findSae, saes, type VectorCard } from "../lib/vectors";
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
import { Columns } from "./steer/Columns";
import { useStreams, type Plan, type Steered } from "./steer/stream";
import { makeSweep, pairUp, readItem, writeItem, type Swept, type SweepBody, type SweepState } from "./sweep/request";

/** Points up to which the first sweep runs by itself. */
const MOST_AT_ONCE = 128;

function SweepView({ state, setState, model, isShown, result, onResult, isKept, isStale }: ViewProps<SweepState, Swept>) {
  const { cards, task: listing } = useVectors(isShown);
  const task = useTask();
  const named = model?.id;
  const made = useMemo(() => attempt(() => makeSweep(state, cards ?? [], named)), [state, cards, named]);
  const body = "value" in made ? made.value : null;
  const run = (): void => {
    if (body === null) return;
    task.run(async (signal) => {
      const answer = await call("post", "/sweep", body as never, { signal });
      const vector = state.vector || (cards?.[0]?.name ?? "");
      const title = `${vector}: ${state.items.join("; ")}`;
      const swept = pairUp(body, answer as Schemas["SweepAnswer"], findVector(state.vector, cards ?? []));
      onResult(swept, { fields: { ...state, vector }, title });
    });
  };
  const isReady = isShown && model?.state === "ready" && state.vector !== "" && ((cards?.length ?? 0) > 0 || findSae(state.vector) !== undefined);
  useNamed(state.vector, cards, ({ name: vector }) => setState({ vector, ...rescale(state, { vector }, cards ?? []) }));
  const hasRun = useRef(false);
  useEffect(() => {
    if (!isReady || hasRun.current || body === null || isKept) return;
    if ((body.layers?.length ?? 1) * body.scales.length > MOST_AT_ONCE) return;
    hasRun.current = true;
    run();
  }, [isReady, body]);

  if (cards === null) return <ErrorNote error={listing.error} />;
  if (cards.length === 0 && saes.value.length === 0) {
    return <NoVector model={named} />;
  }
  const alter = (change: Partial<SteeringFields>): void => setState({ ...change, ...rescale(state, change, cards) });
  return (
    <Panes
      isStale={isStale}
      form={
      <RunForm label="What is steered, and what is scored" onRun={run}>
        <Cases items={state.items} onChange={(items) => setState({ items })} />
        <VectorAndLayers
          fields={state}
          onChange={alter}
          cards={cards}
          model={model}
          layersHint={`Sets of them: 2;3;2,3 are three. some, each: about eight, or all, of the vector's, one by one; own: all at once.`}
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
      <ErrorNote error={("error" in made ? made.error : task.error) ?? listing.error} onRetry={run} />
      {result && (
        <Outcome
          result={result}
          state={state}
          setState={(change) => setState(change.set === undefined ? change : { ...change, generated: change.chosen ?? 0 })}
        >
          {body && <Said swept={result} body={body} state={state} />}
        </Outcome>
      )}
    </Panes>
  );
}

type SweptProps = OutcomeProps<SweepState, Swept> & { children?: ComponentChildren };

function Outcome({ result, state, setState, children }: SweptProps) {
  return (
    <Curves
      swept={result}
      measure={state.measure}
      vector={state.vector}
      map={state.map}
      onMap={(map) => setState({ map })}
      {...locate(result, state)}
      onChoose={setState}
    >
      {children}
    </Curves>
  );
}

/** The scale and the set of layers that are looked at: those recommended, until others are chosen. */
function locate({ scales, sets, advised }: Swept, state: SweepState): { chosen: number; set: number } {
  return {
    chosen: state.chosen < 0 ? (advised?.chosen ?? scales.length - 1) : state.chosen,
    set: Math.min(state.set < 0 ? (advised?.set ?? 0) : state.set, sets.length - 1),
  };
}

/** What the model says at the chosen layers and scale: each context continued, steered and not. */
function Said({ swept, body, state }: { swept: Swept; body: SweepBody; state: SweepState }) {
  const [shown, setShown] = useState<Steered | null>(null);
  const { task, send } = useStreams(setShown);
  const { chosen, set } = locate(swept, state);
  const scale = swept.scales[chosen] ?? 0;
  const layers = body.layers?.[set];
  const prompts = swept.cases.length ? swept.cases.map(({ context }) => context) : [state.text.slice(0, 200)];
  const steering = {
    ...body.steering,
    vectors: (body.steering.vectors as JsonObject[]).map((vector) => ({ ...vector, layers: layers ?? vector.layers, scale })),
  };
  const request: JsonObject = { model: body.model, prompts, steering, max_tokens: 40, temperature: 0, baseline: true, stream: true };
  const key = JSON.stringify(request);
  const isWhole = shown !== null && JSON.stringify(shown.asks[0]?.body) === key;
  const plan: Plan = {
    titles: [{ title: "Without steering", note: "" }, { title: "Steered", note: `scale ${short(scale)}${layers ? `, layer ${layers.join(", ")}` : ""}` }],
    prompts,
    n: 1,
    probe: "",
    turns: [],
    system: "",
    ask: () => [{ endpoint: "steer", body: request, column: 1, baseline: 0 }],
  };
  // A cell that is chosen is generated with at once; points that are passed on a curve wait for the button.
  const cell = useRef(`${state.set} ${state.generated}`);
  useEffect(() => {
    const next = `${state.set} ${state.generated}`;
    if (next === cell.current) return;
    cell.current = next;
    send(plan);
  }, [state.set, state.generated]);
  return (
    <section class="said" aria-label="What the model says there">
      <div class="actions">
        <RunButton task={task} onRun={() => send(plan)} label={`Generate at scale ${short(scale)}`} disabled={isWhole} />
        <CopyAs asked={{ endpoint: "steer", body: request }} />
      </div>
      <ErrorNote error={task.error} />
      {shown && <Columns shown={shown} colouring="surprisal" isRunning={task.isRunning} isStale={!isWhole && !task.isRunning} />}
    </section>
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

/** Contexts, each with the targets that are scored after it. */
function Cases({ items, onChange }: CasesProps) {
  const change = (at: number, line: string): void => onChange(items.map((old, index) => (index === at ? line : old)));
  return (
    <fieldset class="cases">
      <legend>Contexts, and the targets scored after each</legend>
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
        <span class="hint">Write | between targets. Their spaces count.</span>
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
    layers: "some",
    items: ["One day, Lily was very| happy| sad", "Tom felt| happy| sad"],
    text: "The capital of France is Paris. The third planet from the sun is Earth.",
    from: -4,
    to: 4,
    points: 9,
    measure: "prob",
    map: "preference",
    chosen: -1,
    set: -1,
    generated: -1,
  },
  asks: ({ measure: _m, map: _p, chosen: _c, set: _s, generated: _g, ...rest }) => rest,
  component: SweepView,
  outcome: Outcome,
});

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { fixed, plural, short } from "../lib/format";
import type { JsonObject } from "../lib/snippets";
import {
  findVector,
  INITIAL_STEERING,
  makeSteering,
  reachOf,
  readLayers,
  type Reach,
  type SteeringFields,
} from "../lib/steering";
import type { VectorCard } from "../lib/vectors";
import { view, type OutcomeProps, type ViewProps } from "../lib/view";
import { CopyAs } from "../parts/CopyAs";
import { ErrorNote, RunButton, RunForm } from "../parts/controls";
import { Examples, type Example } from "../parts/Examples";
import { Panes } from "../parts/Panes";
import { NumberField, Segments, Select, Slider, TextArea, TextField } from "../parts/fields";
import { Receipt } from "../parts/Receipt";
import "./steer.css";
import { Columns, type Colouring } from "./steer/Columns";
import { useStreams, type Caption, type Streams } from "./steer/stream";
import { NoVector } from "./steering/NoVector";
import { useNamed, useVectors } from "./steering/useVectors";
import { VectorFields, VectorSelect } from "./steering/VectorFields";

type State = SteeringFields & {
  mode: "text" | "chat";
  prompt: string;
  system: string;
  scale: number;
  colour: Colouring;
  probe: string;
  probeLayer: string;
  read: "projection" | "cosine" | "probability" | "activation";
  max_tokens: number;
  temperature: number;
  top_p: number;
  top_k: number;
  min_p: number;
  seed: number;
};

const STORY = { mode: "text", prompt: "Once upon a time", seed: 1 } as const;
const PLAIN = { layers: "", op: "add", unit: "raw", positions: "all", when: "" } as const;

const EXAMPLES: Example<State>[] = [
  { label: "A happier story", state: { ...PLAIN, ...STORY, scale: 1 } },
  { label: "A sadder one", state: { ...PLAIN, ...STORY, scale: -2 } },
  { label: "Too much of it", state: { ...PLAIN, ...STORY, scale: 10 } },
  { label: "None of it", state: { ...PLAIN, ...STORY, op: "ablate", scale: 1 } },
  {
    label: "In a chat",
    state: { ...PLAIN, mode: "chat", prompt: "Tell me a story.", scale: -1.5, seed: 2 },
  },
];

/** Milliseconds between two requests while a slider moves: the first one goes at once. */
const PAUSE_MS = 120;

/** The request, or the Error that says what of the form makes no sense. */
function makeBody(state: State, cards: readonly VectorCard[], model: string | undefined) {
  const probed = findVector(state.probe || state.vector, cards);
  const layers = readLayers(state.probeLayer || state.layers, probed);
  const messages = [
    ...(state.system.trim() === "" ? [] : [{ role: "system", content: state.system }]),
    { role: "user", content: state.prompt },
  ];
  return {
    model,
    ...(state.mode === "chat" ? { messages } : { prompts: [state.prompt] }),
    steering: makeSteering(state, cards, state.scale),
    probes:
      state.colour === "probe"
        ? [
            {
              name: probed?.name ?? (state.probe || state.vector),
              layers: layers?.slice(0, 1),
              read: state.read === "projection" ? undefined : state.read,
            },
          ]
        : undefined,
    max_tokens: state.max_tokens,
    temperature: state.temperature,
    top_p: state.top_p === 1 ? undefined : state.top_p,
    top_k: state.top_k === 0 ? undefined : state.top_k,
    min_p: state.min_p === 0 ? undefined : state.min_p,
    seed: state.seed,
    baseline: true,
    stream: true,
  } satisfies JsonObject;
}

function attempt<T>(make: () => T): { value: T } | { error: unknown } {
  try {
    return { value: make() };
  } catch (error) {
    return { error };
  }
}

function SteerView({ state, setState, model, isShown, result: shown, onResult, isKept }: ViewProps<State, Streams>) {
  const { cards, task: listing } = useVectors(isShown);
  const { task, send } = useStreams((now, whole) =>
    onResult(now, whole && { fields: state, title: `${state.vector || (cards?.[0]?.name ?? "")} × ${short(state.scale)}: ${state.prompt}` }),
  );
  const named = model?.id;
  const made = useMemo(
    () => attempt(() => makeBody(state, cards ?? [], named)),
    [state, cards, named],
  );
  const body = "value" in made ? made.value : null;
  const isReady = isShown && !isKept && model?.state === "ready" && (cards?.length ?? 0) > 0;
  const latest = useRef(body);
  latest.current = body;
  const run = (): void => {
    if (latest.current !== null) send(latest.current, describe(state, cards ?? []));
  };
  useRepeated(run, isReady, body, state);
  const isStale = useStaying(
    shown !== null && !task.isRunning && JSON.stringify(shown.body) !== JSON.stringify(body),
  );
  useNamed(state.vector, cards, (vector) => setState({ vector }));

  if (cards === null) return <ErrorNote error={listing.error} />;
  if (cards.length === 0) {
    return <NoVector model={named} onTrained={(vector) => setState({ vector })} />;
  }
  return (
    <Panes
      form={
        <RunForm label="What is steered, and how" onRun={run}>
          <PromptFields state={state} setState={setState} hasChat={model?.has_chat_template ?? true} />
          <ScaleFields state={state} setState={setState} cards={cards} />
          <VectorFields
            fields={state}
            onChange={(change) => setState({ ...change, ...startOver(state, change, cards) })}
            cards={cards}
            model={model}
          />
          <div class="actions">
            <RunButton task={task} onRun={run} label="Generate" disabled={body === null} />
            {shown && <Timing {...shown} />}
          </div>
          <details class="more">
            <summary>Sampling</summary>
            <SamplingFields state={state} setState={setState} />
          </details>
        </RunForm>
      }
      below={body && <CopyAs asked={{ endpoint: "steer", body }} />}
    >
      <ErrorNote error={"error" in made ? made.error : (task.error ?? listing.error)} />
      {shown && (
        <>
          <ColourFields state={state} setState={setState} cards={cards} />
          <Columns
            shown={shown}
            colouring={state.colour}
            isRunning={task.isRunning}
            isStale={isStale}
          />
          {shown.answer && <Receipt receipt={shown.answer.steering} />}
        </>
      )}
    </Panes>
  );
}

function Outcome({ result, state }: OutcomeProps<State, Streams>) {
  return <Columns shown={result} colouring={state.colour} isRunning={false} isStale={false} />;
}

/**
 * Run once all is there, and again when something changes that is no text being typed: at once, then
 * not more often than every PAUSE_MS.
 */
function useRepeated(run: () => void, isReady: boolean, body: object | null, state: State): void {
  const { prompt: _p, system: _s, layers: _l, slices: _c, probeLayer: _r, whenLayer: _w, ...chosen } = state;
  const key = JSON.stringify(chosen);
  const last = useRef({ key: "", at: -Infinity, timer: 0 });
  useEffect(() => {
    if (!isReady || body === null || key === last.current.key) return;
    last.current.key = key;
    clearTimeout(last.current.timer);
    const go = (): void => {
      last.current.at = performance.now();
      run();
    };
    const rest = last.current.at + PAUSE_MS - performance.now();
    if (rest <= 0) go();
    else last.current.timer = window.setTimeout(go, rest);
  }, [isReady, body, key]);
}

/** Whether this stays so for longer than it takes for a change to be sent by itself. */
function useStaying(isSo: boolean): boolean {
  const [stays, setStays] = useState(false);
  useEffect(() => {
    setStays(false);
    if (!isSo) return undefined;
    const timer = setTimeout(() => setStays(true), 3 * PAUSE_MS);
    return () => clearTimeout(timer);
  }, [isSo]);
  return isSo && stays;
}

type Change = { state: State; setState: (change: Partial<State>) => void };

function PromptFields({ state, setState, hasChat }: Change & { hasChat: boolean }) {
  return (
    <div class="steer-prompt">
      <Segments
        label="The prompt is"
        value={state.mode}
        options={[
          { value: "text", label: "a text to continue" },
          { value: "chat", label: "a message in a chat", disabled: !hasChat },
        ]}
        onChange={(mode) => setState({ mode })}
      />
      {state.mode === "chat" && (
        <TextField
          label="System prompt"
          value={state.system}
          placeholder="none"
          onChange={(system) => setState({ system })}
        />
      )}
      <TextArea
        label={state.mode === "chat" ? "Message" : "Text"}
        value={state.prompt}
        rows={2}
        onChange={(prompt) => setState({ prompt })}
      />
      <Examples examples={EXAMPLES} onChoose={setState} />
    </div>
  );
}

function ScaleFields({ state, setState, cards }: Change & { cards: readonly VectorCard[] }) {
  const card = findVector(state.vector, cards);
  const reach = reachOf(state.op, state.unit, card);
  if (state.op === "clamp") {
    return (
      <div class="row">
        <TextField label="Not below" value={state.low} placeholder="no bound" onChange={(low) => setState({ low })} />
        <TextField label="Not above" value={state.high} placeholder="no bound" onChange={(high) => setState({ high })} />
      </div>
    );
  }
  const best = card?.about.recommendation;
  const degrees = state.op === "rotate" ? "°" : "";
  return (
    <div class="steer-scale">
      <Slider
        label={`Scale of ${card?.name ?? state.vector}`}
        value={state.scale}
        min={Math.min(reach.min, state.scale)}
        max={Math.max(reach.max, state.scale)}
        step={stepTo(state.scale, reach)}
        ticks={[0]}
        format={(scale) => `${short(scale)}${degrees}`}
        hint={
          best && state.op === "add" && state.unit === "raw"
            ? `Recommended: ${short(best.scales[0] ?? 0)} to ${short(best.scales.at(-1) ?? 0)} at layer ${best.layer}, or with a minus.`
            : undefined
        }
        onChange={(scale) => setState({ scale })}
      />
      <NumberField
        label="Exactly"
        value={state.scale}
        step="any"
        onChange={(scale) => setState({ scale: scale ?? 0 })}
      />
    </div>
  );
}

/** The step of a slider on which this scale is: a link may have one between those that are offered. */
function stepTo(scale: number, { min, step }: Reach): number {
  const steps = (scale - min) / step;
  if (Math.abs(steps - Math.round(steps)) < 1e-6) return step;
  return Math.min(step, 10 ** -(String(scale).split(".")[1]?.length ?? 0));
}

/** A scale that fits the vector and operation which a change chooses. */
function startOver(state: State, change: Partial<SteeringFields>, cards: readonly VectorCard[]) {
  if (change.op === undefined && change.unit === undefined && change.vector === undefined) return {};
  const next = { ...state, ...change };
  return { scale: reachOf(next.op, next.unit, findVector(next.vector, cards)).start };
}

function SamplingFields({ state, setState }: Change) {
  const fill = (name: keyof State, otherwise: number) => (value: number | null) =>
    setState({ [name]: value ?? otherwise });
  return (
    <div class="row sampling">
      <NumberField label="Tokens at most" value={state.max_tokens} min={1} max={4096} onChange={fill("max_tokens", 64)} />
      <NumberField label="Temperature" value={state.temperature} min={0} max={2} step={0.1} onChange={fill("temperature", 1)} />
      <NumberField label="Top p" value={state.top_p} min={0.01} max={1} step={0.05} onChange={fill("top_p", 1)} />
      <NumberField label="Top k" value={state.top_k} min={0} onChange={fill("top_k", 0)} />
      <NumberField label="Min p" value={state.min_p} min={0} max={1} step={0.01} onChange={fill("min_p", 0)} />
      <NumberField label="Seed of both" value={state.seed} min={0} onChange={fill("seed", 0)} />
    </div>
  );
}

function ColourFields({ state, setState, cards }: Change & { cards: readonly VectorCard[] }) {
  return (
    <div class="row steer-colour">
      <Segments
        label="Colour tokens by"
        value={state.colour}
        options={[
          { value: "probe", label: "a probe" },
          { value: "surprisal", label: "surprisal" },
          { value: "none", label: "nothing" },
        ]}
        onChange={(colour) => setState({ colour })}
      />
      {state.colour === "probe" && (
        <>
          <VectorSelect
            label="Probe"
            value={state.probe}
            cards={cards}
            none="the steering vector"
            onChange={(probe) => setState({ probe })}
          />
          <TextField
            label="read at layer"
            value={state.probeLayer}
            placeholder="the steered one"
            onChange={(probeLayer) => setState({ probeLayer })}
          />
          <Select
            label="as its"
            value={state.read}
            options={["projection", "cosine", "probability", "activation"].map((value) => ({
              value: value as State["read"],
              label: value,
            }))}
            onChange={(read) => setState({ read })}
          />
        </>
      )}
    </div>
  );
}

function describe(state: State, cards: readonly VectorCard[]): Caption {
  const probed = findVector(state.probe || state.vector, cards);
  const degrees = state.op === "rotate" ? "°" : "";
  return {
    prompt: state.mode === "text" ? state.prompt : "",
    scale: state.op === "clamp" ? "clamped" : `scale ${short(state.scale)}${degrees}`,
    probe: `${state.read} on ${probed?.name ?? state.probe}`,
  };
}

function Timing({ firstMs, answer }: Streams) {
  if (firstMs === null) return null;
  return (
    <span class="hint num" data-first-ms={firstMs.toFixed(1)}>
      First steered token after {fixed(firstMs, 0)} ms
      {answer && `; ${plural(answer.usage.generated_tokens ?? 0, "token")} in all`}
    </span>
  );
}

export const steer = view<State, Streams>({
  id: "steer",
  title: "Steer",
  icon: "steer",
  lead: "What does the model say once its activations are changed?",
  initial: {
    ...INITIAL_STEERING,
    mode: "text",
    prompt: "Once upon a time",
    system: "",
    scale: 1,
    colour: "probe",
    probe: "",
    probeLayer: "",
    read: "projection",
    max_tokens: 80,
    temperature: 0.8,
    top_p: 1,
    top_k: 0,
    min_p: 0,
    seed: 1,
  },
  component: SteerView,
  outcome: Outcome,
});

import { useEffect, useMemo, useRef } from "preact/hooks";
import { EXAMPLE_NAME } from "../lib/example";
import { fixed, plural, short } from "../lib/format";
import type { JsonObject } from "../lib/snippets";
import { findVector, INITIAL_STEERING, makeReference, makeSteering, makeVector, reachOf, readLayers, type PlaceFields } from "../lib/steering";
import { attempt, useStaying } from "../lib/task";
import { findSae, saes, type VectorCard } from "../lib/vectors";
import { view, type OutcomeProps, type ViewProps } from "../lib/view";
import { CopyAs } from "../parts/CopyAs";
import { ErrorNote, RunButton, RunForm } from "../parts/controls";
import { Examples, type Example } from "../parts/Examples";
import { NumberField, Segments, Select, TextArea, TextField } from "../parts/fields";
import { Icon } from "../parts/Icon";
import { Lines } from "../parts/Lines";
import { Panes } from "../parts/Panes";
import { Receipt } from "../parts/Receipt";
import "./steer.css";
import { Columns, type Colouring } from "./steer/Columns";
import { Doses, listDoses, readDose, type DosesState } from "./steer/Doses";
import { KeepVariant } from "./steer/KeepVariant";
import { useStreams, type Ask, type Plan, type Steered, type Turn } from "./steer/stream";
import { NoVector } from "./steering/NoVector";
import { useNamed, useVectors } from "./steering/useVectors";
import { PositionFields, VectorSelect } from "./steering/VectorFields";

type State = DosesState & PlaceFields & {
  mode: "text" | "chat";
  prompt: string;
  /** Texts beside the first. */
  prompts: string[];
  /** What was said in the chat before. */
  turns: string[];
  system: string;
  /** Ids to continue in place of the prompt, and their text. */
  branch: number[];
  branchText: string;
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

const STORY = { mode: "text", prompt: "Once upon a time there was a little girl named Lily.", prompts: [] as string[], seed: 1 } as const;
const PLAIN = {
  layers: "", op: "add", unit: "raw", positions: "all", when: "", where: "", more: [] as string[],
  scales: "", n: 1, branch: [] as number[], branchText: "", turns: [] as string[],
} as const;

/** Examples with a vector, whose recommended scale is a slider's start. */
function makeExamples(card: VectorCard | undefined): Example<State>[] {
  const one = reachOf("add", "raw", card).start;
  const isMood = card?.name.startsWith(EXAMPLE_NAME);
  const times = (factor: number): number => Number((factor * one).toPrecision(3));
  return [
    { label: isMood ? "A happier story" : "A story with it", state: { ...PLAIN, ...STORY, scale: one } },
    { label: isMood ? "A sadder one" : "Against it", state: { ...PLAIN, ...STORY, scale: -one } },
    { label: "Too much of it", state: { ...PLAIN, ...STORY, scale: times(6) } },
    { label: "None of it", state: { ...PLAIN, ...STORY, op: "ablate", scale: 1 } },
    { label: "A row of scales", state: { ...PLAIN, ...STORY, scale: one, scales: [-2, -1, 1, 2].map(times).join(", ") } },
    {
      label: "In a chat",
      state: { ...PLAIN, mode: "chat", prompt: "Tell me a story.", scale: -one, seed: 2 },
    },
  ];
}

/** Milliseconds between two requests while a slider moves: the first one goes at once. */
const PAUSE_MS = 120;

/** Texts from which on a change waits for the button: a slider would ask for all of them again and again. */
const MANY = 6;

function readScales(state: State): number[] {
  if (state.op === "clamp" || state.scales.trim() === "") return [state.scale];
  return state.scales.split(/[,;\s]+/).filter(Boolean).map((word) => {
    const scale = Number(word);
    if (!Number.isFinite(scale)) throw new Error(`Scales “${state.scales}” are not written as in -2, 0, 2.`);
    return scale;
  });
}

/** What the form asks for; null where nothing is to be continued; Error where a text makes no sense. */
function makePlan(state: State, cards: readonly VectorCard[], model: string | undefined): Plan | null {
  const isChat = state.mode === "chat" && state.branch.length === 0;
  const prompts = [state.prompt, ...state.prompts].filter((text) => text !== "");
  if (state.branch.length === 0 && prompts.length === 0) return null;
  if (isChat && state.prompt === "") return null;
  const probed = findVector(state.probe || state.vector, cards);
  const layers = readLayers(state.probeLayer || state.layers, probed);
  const scales = readScales(state);
  const steerings = scales.map((scale) =>
    makeSteering(
      listDoses(state).map((dose, at) => makeVector(dose, cards, at === 0 ? scale : dose.scale)),
      state,
    ),
  );
  const common: JsonObject = {
    model,
    probes:
      state.colour === "probe"
        ? [
            {
              ...makeReference(state.probe || state.vector, cards),
              layers: layers?.slice(0, 1),
              read: state.read === "projection" ? undefined : state.read,
            },
          ]
        : undefined,
    max_tokens: state.max_tokens,
    n: state.n === 1 ? undefined : state.n,
    temperature: state.temperature,
    top_p: state.top_p === 1 ? undefined : state.top_p,
    top_k: state.top_k === 0 ? undefined : state.top_k,
    min_p: state.min_p === 0 ? undefined : state.min_p,
    seed: state.seed,
    stream: true,
  };
  const given = state.branch.length > 0 ? { prompt_ids: [state.branch] } : { prompts };
  const ask = (threads: readonly Turn[][] | null): Ask[] => {
    const continued = (column: number): JsonObject => (threads === null ? given : { messages: [...(threads[column] ?? [])] });
    // Unsteered and steered texts that continue the same come in one request.
    const isShared = threads === null || JSON.stringify(threads[0]) === JSON.stringify(threads[1]);
    const asks = steerings.map((steering, at): Ask => ({
      endpoint: "steer",
      body: { ...common, ...continued(at + 1), steering, baseline: (isShared && at === 0) || undefined },
      column: at + 1,
      baseline: isShared && at === 0 ? 0 : undefined,
    }));
    if (!isShared) asks.push({ endpoint: "generate", body: { ...common, ...continued(0) }, column: 0 });
    return asks;
  };
  const degrees = state.op === "rotate" ? "°" : "";
  const note = (scale: number): string => (state.op === "clamp" ? "clamped" : `scale ${short(scale)}${degrees}`);
  return {
    titles: [{ title: "Without steering", note: "" }, ...scales.map((scale) => ({ title: "Steered", note: note(scale) }))]
      .map((one) => (scales.length > 1 && one.note ? { title: "Scale", note: one.note.replace("scale ", "") } : one)),
    prompts: isChat ? [] : state.branch.length > 0 ? [state.branchText] : prompts,
    n: state.n,
    probe: `${state.read} on ${probed?.name ?? (state.probe || state.vector)}`,
    turns: isChat ? [...state.turns, state.prompt] : [],
    system: state.system.trim(),
    ask,
  };
}

function SteerView({ state, setState, model, isShown, result: shown, onResult, isKept }: ViewProps<State, Steered>) {
  const { cards, task: listing } = useVectors(isShown);
  const { task, send } = useStreams((now, isWhole) => {
    const title = `${listDoses(state).map((dose) => `${dose.vector || (cards?.[0]?.name ?? "")} × ${short(dose.scale)}`).join(" + ")}: ${state.branchText || state.prompt}`;
    onResult(now, isWhole ? { fields: state, title } : undefined);
  });
  const named = model?.id;
  const made = useMemo(() => attempt(() => makePlan(state, cards ?? [], named)), [state, cards, named]);
  const plan = "value" in made ? made.value : null;
  // In a longer chat what is asked has the replies in it, which are there once it has been held.
  const isLong = plan !== null && plan.turns.length > 1;
  const asks = isLong || plan === null ? null : plan.ask(plan.turns.length ? begin(plan) : null);
  const latest = useRef(plan);
  latest.current = plan;
  const run = (): void => {
    if (latest.current !== null) send(latest.current);
  };
  const count = plan === null ? 0 : Math.max(1, plan.prompts.length) * plan.n * plan.titles.length;
  const isReady = isShown && !isKept && model?.state === "ready" && state.vector !== "" && ((cards?.length ?? 0) > 0 || findSae(state.vector) !== undefined);
  useRepeated(run, isReady && count <= MANY, plan, state);
  const isStale = useStaying(
    shown !== null && !task.isRunning && (isLong ? plan.ask(shown.threads) : (asks ?? [])).some(
      (one, at) => JSON.stringify(one.body) !== JSON.stringify(shown.asks[at]?.body),
    ),
  );
  useNamed(state.vector, cards, (card) => {
    const isDose = state.op === "add" && state.unit === "raw" && state.scale === 1;
    setState({ vector: card.name, ...(isDose && { scale: reachOf("add", "raw", card).start }) });
  });

  if (cards === null) return <ErrorNote error={listing.error} />;
  if (cards.length === 0 && saes.value.length === 0) {
    return <NoVector model={named} />;
  }
  const isAnswered = shown !== null && !isStale && !task.isRunning && shown.threads !== null;
  return (
    <Panes
      form={
        <RunForm label="What is steered, and how" onRun={run}>
          <PromptFields
            state={state}
            setState={setState}
            examples={makeExamples(findVector(state.vector, cards))}
            hasChat={model?.has_chat_template ?? true}
            isAnswered={isAnswered}
          />
          <Doses state={state} setState={setState} cards={cards} model={model} />
          <div class="actions">
            <RunButton task={task} onRun={run} label="Generate" disabled={plan === null} />
            {shown && <Timing {...shown} />}
          </div>
          <details class="more" open={state.positions !== "all" || undefined}>
            <summary>Positions and sampling</summary>
            <PositionFields fields={state} onChange={setState} />
            <SamplingFields state={state} setState={setState} />
          </details>
          {plan !== null && named !== undefined && <KeepVariant model={named} steering={plan.ask(null)[0]?.body.steering} />}
        </RunForm>
      }
      below={
        (asks ?? (isStale ? null : shown?.asks))?.map(({ endpoint, body, column }) => (
          <CopyAs
            key={column}
            label={plan && plan.titles.length > 2 ? `Copy ${plan.titles[column]?.title.toLowerCase()} ${plan.titles[column]?.note} as` : endpoint === "generate" ? "Copy the unsteered turn as" : "Copy as"}
            asked={{ endpoint, body }}
          />
        )) ?? <p class="hint">A turn's request has the replies before it: generate first, to copy it.</p>
      }
    >
      <ErrorNote error={"error" in made ? made.error : (task.error ?? listing.error)} onRetry={run} />
      {shown && (
        <>
          <ColourFields state={state} setState={setState} cards={cards} />
          <Columns
            shown={shown}
            colouring={state.colour}
            isRunning={task.isRunning}
            isStale={isStale}
            onBranch={(branch, branchText) => setState({ branch, branchText })}
          />
          <Receipts shown={shown} />
        </>
      )}
    </Panes>
  );
}

/** The chat as every column begins it. */
function begin({ titles, turns, system }: Plan): Turn[][] {
  const first: Turn[] = [{ role: "user", content: turns[0] ?? "" }];
  return titles.map(() => (system === "" ? first : [{ role: "system", content: system }, ...first]));
}

function Receipts({ shown }: { shown: Steered }) {
  return (
    <>
      {shown.answers.map(
        (answer, column) =>
          answer && "steering" in answer && answer.steering && (
            <Receipt
              key={column}
              title={shown.titles.length > 2 ? `What scale ${shown.titles[column]?.note} did` : undefined}
              receipt={answer.steering}
            />
          ),
      )}
    </>
  );
}

function Outcome({ result, state }: OutcomeProps<State, Steered>) {
  return <Columns shown={result} colouring={state.colour} />;
}

/**
 * Run once all is there, and again when something other than a typed text changes: at once, then
 * not more often than every PAUSE_MS.
 */
function useRepeated(run: () => void, isReady: boolean, body: object | null, state: State): void {
  const {
    prompt: _p, prompts: _ps, turns: _t, system: _s, scales: _sc, layers: _l, slices: _c, probeLayer: _r,
    whenLayer: _w, whereSlices: _x, more, branchText: _b, ...chosen
  } = state;
  const others = more.map((written) => {
    const { layers: _ml, whenLayer: _mw, whereSlices: _mx, ...dose } = readDose(written);
    return dose;
  });
  const key = JSON.stringify([chosen, others]);
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

type Change = { state: State; setState: (change: Partial<State>) => void };

type PromptProps = Change & { examples: Example<State>[]; hasChat: boolean; isAnswered: boolean };

function PromptFields({ state, setState, examples, hasChat, isAnswered }: PromptProps) {
  if (state.branch.length > 0) {
    return (
      <div class="note">
        Continues “…{state.branchText.slice(-90)}”, {plural(state.branch.length, "token")}: the
        prompt ends there, and positions are counted with it as the prompt.{" "}
        <button type="button" class="quiet" onClick={() => setState({ branch: [], branchText: "" })}>
          <Icon name="close" /> Back to the prompt
        </button>
      </div>
    );
  }
  const isChat = state.mode === "chat";
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
      {isChat && (
        <>
          <TextField
            label="System prompt"
            value={state.system}
            placeholder="none"
            onChange={(system) => setState({ system })}
          />
          {state.turns.map((turn, at) => (
            <p key={at} class="turn is-user">
              {turn}
              <button
                type="button"
                class="quiet"
                aria-label={`Back to message ${at + 1}`}
                onClick={() => setState({ prompt: turn, turns: state.turns.slice(0, at) })}
              >
                <Icon name="pen" />
              </button>
            </p>
          ))}
        </>
      )}
      <TextArea
        label={isChat ? "Message" : "Text"}
        value={state.prompt}
        rows={2}
        maxRows={6}
        onChange={(prompt) => setState({ prompt })}
      />
      {isChat && isAnswered && (
        <button
          type="button"
          class="quiet"
          onClick={() => setState({ turns: [...state.turns, state.prompt], prompt: "" })}
        >
          <Icon name="plus" /> Answer to both
        </button>
      )}
      {!isChat && (
        <Lines label="Text" lines={state.prompts} first={2} min={0} onChange={(prompts) => setState({ prompts })} />
      )}
      <Examples examples={examples} onChoose={setState} />
    </div>
  );
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
            none="the vector"
            hasFeatures
            onChange={(probe) => setState({ probe })}
          />
          <TextField
            label="read at layer"
            value={state.probeLayer}
            placeholder="the steered"
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

function Timing({ firstMs, answers }: Steered) {
  if (firstMs === null) return null;
  const generated = answers.reduce((sum, answer) => sum + (answer?.usage.generated_tokens ?? 0), 0);
  return (
    <span class="hint num" data-first-ms={firstMs.toFixed(1)}>
      First steered token after {fixed(firstMs, 0)} ms
      {generated > 0 && `; ${plural(generated, "token")} in all`}
    </span>
  );
}

export const steer = view<State, Steered>({
  id: "steer",
  title: "Steer",
  icon: "steer",
  lead: "What does the model say once its activations are changed?",
  initial: {
    ...INITIAL_STEERING,
    scale: 1,
    more: [],
    mode: "text",
    prompt: "Once upon a time",
    prompts: [],
    turns: [],
    system: "",
    scales: "",
    n: 1,
    branch: [],
    branchText: "",
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

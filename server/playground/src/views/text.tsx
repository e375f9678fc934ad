import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import type { Schemas } from "../lib/api";
import { count, fixed, number, plural, signed, tick } from "../lib/format";
import { makeReading, readText, toRequest, type Alternatives, type Query, type Read, type Reading } from "../lib/reading";
import { divergingScale, findReach, linearScale, logScale, type Scale } from "../lib/scales";
import type { JsonObject } from "../lib/snippets";
import { findVector, makeReference } from "../lib/steering";
import { attempt, useAutoRun, useTask } from "../lib/task";
import { askedModel, findSae, refreshVectors, saes, vectors } from "../lib/vectors";
import { view, type OutcomeProps, type ViewProps } from "../lib/view";
import { ErrorNote, RunButton, RunForm } from "../parts/controls";
import { CopyAs } from "../parts/CopyAs";
import { Examples, type Example } from "../parts/Examples";
import { BesideFields, INITIAL_BESIDE, LacksVector, makeBeside, type BesideState } from "../parts/Beside";
import { Segments, TextArea } from "../parts/fields";
import SAMPLE from "../sample.txt?raw";
import { VectorSelect } from "./steering/VectorFields";
import { INITIAL_WINDOWS, Windows, WindowsOutcome, type Progress, type WindowState } from "./text/Windows";
import { LayerMap } from "../parts/LayerMap";
import { Legend } from "../parts/Legend";
import { Panes } from "../parts/Panes";
import { Stats } from "../parts/Stats";
import { TokenCard } from "../parts/TokenCard";
import { TokenText } from "../parts/TokenText";

type Colour = "surprisal" | "rank" | "entropy" | "probe";

type State = BesideState & WindowState & {
  /** Each token, or windows of a long text. */
  read: "tokens" | "windows";
  colour: Colour;
  probe: string;
  /** Where a vector is read: at its best layer, at each that it has, or at one, as in `12`. */
  at: string;
  /** What is read at one layer; at each it is the cosine. */
  by: "projection" | "cosine";
};

/** Characters up to which a text is read again at every change; a longer one waits for the button. */
const LIVE = 6000;
const EXAMPLES: Example<State>[] = [
  {
    label: "A wrong fact",
    state: {
      text:
        "The capital of France is Paris. The capital of Italy is Rome. The capital of Germany is " +
        "Oslo. The capital of Spain is Madrid.\n\nOnce upon a time there was a little girl named " +
        "Lily. One day, she went to the park. She smiled and laughed, and the chemical symbol for " +
        "gold is Au.",
    },
  },
  {
    label: "A turn of mood",
    state: {
      text:
        "Tom was a little boy. One morning, he walked to the lake. The sun was shining and the " +
        "sky was bright. He smiled and laughed. He was lonely and afraid. He danced and sang with " +
        "his friends.",
    },
  },
  {
    label: "Repetition",
    state: { text: "blue kite seven, blue kite seven, blue kite seven, blue kite seven." },
  },
  { label: "A long story", state: { text: SAMPLE, read: "windows" } },
  { label: "Other scripts", state: { text: "Bonjour! ¡Hola! Γεια σου! Привет! こんにちは!" } },
];

const INITIAL: State = {
  ...INITIAL_BESIDE,
  ...INITIAL_WINDOWS,
  read: "tokens",
  text: EXAMPLES[0]?.state.text ?? "",
  colour: "surprisal",
  probe: "",
  at: "best",
  by: "projection",
};

/** A text as it was read, and as it was beside that. */
interface Sides {
  main: Read;
  other: Read | null;
  otherName: string;
}

function TextView(props: ViewProps<State, Sides | Progress>) {
  const { state, setState, result } = props;
  const head = (
    <Segments
      label="Read"
      value={state.read}
      options={[
        { value: "tokens", label: "each token" },
        { value: "windows", label: "windows of a long text" },
      ]}
      onChange={(read) => setState({ read })}
    />
  );
  const examples = <Examples examples={EXAMPLES} onChoose={(chosen) => setState({ read: "tokens", ...chosen })} />;
  // What was read the other way is not shown.
  const [sides, windows] = result === null ? [null, null] : "windows" in result ? [null, result] : [result, null];
  return state.read === "windows" ? (
    <Windows {...props} result={windows} head={head} examples={examples} />
  ) : (
    <Tokens {...props} result={sides} head={head} examples={examples} />
  );
}

type TokensProps = ViewProps<State, Sides> & { head: ComponentChildren; examples: ComponentChildren };

function Tokens({ state, setState, model, models, isShown, result, onResult, isKept, isStale, head, examples }: TokensProps) {
  const task = useTask();
  const stored = vectors.value;
  const usesVectors = state.colour === "probe" || state.beside === "steered";
  useEffect(() => {
    // A server that has none to give is asked without them.
    if (usesVectors && isShown) refreshVectors().catch(() => (vectors.value ??= []));
  }, [usesVectors, isShown, askedModel.value]);

  const coders = saes.value;
  const made = useMemo(
    () =>
      attempt(() =>
        model ? { query: toQuery(state, model.id, stored), beside: makeBeside(state, model.id, models, stored) } : null,
      ),
    [state, model?.id, models, stored, coders],
  );
  const { query = null, beside = null } = ("value" in made ? made.value : null) ?? {};
  const other = query && beside && {
    query: { ...query, model: beside.model, steering: beside.steering as Query["steering"] },
    name: beside.name,
  };
  const asked = JSON.stringify([query, other]);
  const isReady = model?.state === "ready" && (stored !== null || !usesVectors);
  const canRun = query !== null && isReady && state.text !== "";
  const run = (): void => {
    if (query === null || !canRun) return;
    task.run(async (signal) => {
      const [main, second] = await Promise.all([
        readText(query, signal),
        other ? readText(other.query, signal) : null,
      ]);
      const title = state.text.slice(0, 80);
      onResult({ main, other: second, otherName: other?.name ?? "" }, { fields: state, title });
    });
  };
  useAutoRun(canRun && !isKept && state.text.length <= LIVE ? asked : null, run);

  return (
    <Panes
      isStale={isStale}
      form={
      <RunForm label="Text to score" onRun={run}>
        {head}
        <TextArea
          label="Text"
          value={state.text}
          onChange={(text) => setState({ text })}
          rows={4}
        />
        {examples}
        <div class="row">
          <Segments
            label="Colour"
            value={state.colour}
            options={[
              { value: "surprisal", label: "Surprisal" },
              { value: "rank", label: "Rank" },
              { value: "entropy", label: "Entropy" },
              { value: "probe", label: "Probe" },
            ]}
            onChange={(colour) => setState({ colour })}
          />
          {state.colour === "probe" && stored !== null && stored.length + coders.length > 0 && (
            <VectorSelect
              label="Probe"
              value={state.probe}
              cards={stored}
              hasFeatures
              onChange={(probe) => setState({ probe })}
            />
          )}
          {state.colour === "probe" && findVector(state.probe, stored ?? []) && (
            <Segments
              label="Read at"
              value={state.at}
              options={[
                { value: "best", label: "its best layer" },
                { value: "each", label: "every layer" },
                ...(isLayer(state.at) ? [{ value: state.at, label: `layer ${state.at}` }] : []),
              ]}
              onChange={(at) => setState({ at })}
            />
          )}
          {state.colour === "probe" && state.at !== "each" && findVector(state.probe, stored ?? []) && (
            <Segments
              label="Read by"
              value={state.by}
              options={[
                { value: "projection", label: "projection" },
                { value: "cosine", label: "cosine" },
              ]}
              onChange={(by) => setState({ by })}
            />
          )}
        </div>
        {state.colour === "probe" && stored?.length === 0 && coders.length === 0 && <LacksVector />}
        <BesideFields state={state} setState={setState} model={model} models={models} cards={stored} />
        <div class="actions">
          <RunButton task={task} onRun={run} label="Score" disabled={!canRun} />
          <span class="hint" role="status">
            {result && describeWork(result.main.answer)}
          </span>
        </div>
      </RunForm>
      }
      below={
        <>
      {query && <CopyAs asked={{ endpoint: "perplexity", body: toBody(query) }} />}
      {other && (
        <CopyAs
          label="Copy what is beside it as"
          asked={{ endpoint: "perplexity", body: toBody(other.query) }}
        />
      )}
        </>
      }
    >
      <ErrorNote error={"error" in made ? made.error : task.error} onRetry={run} />
      {result && <TokensOutcome result={result} state={state} />}
    </Panes>
  );
}

function Outcome({ result, state, setState }: OutcomeProps<State, Sides | Progress>) {
  if ("windows" in result) return <WindowsOutcome result={result} state={state} setState={setState} />;
  return <TokensOutcome result={result} state={state} />;
}

function TokensOutcome({ result, state }: { result: Sides; state: State }) {
  const [active, setActive] = useState<number | null>(null);
  const main = useMemo(() => makeReading(result.main), [result.main]);
  const other = useMemo(() => result.other && makeReading(result.other), [result.other]);
  useEffect(() => {
    // What else was likely is there before somebody asks.
    if (main.ids.length <= 600) void main.findAlternatives(main.ids.length - 1).catch(() => null);
  }, [main]);
  const sides = { main, other, otherName: result.otherName };
  return <Result sides={sides} colour={state.colour} active={active} onActive={setActive} />;
}

function toBody(query: Query): JsonObject {
  return JSON.parse(JSON.stringify(toRequest(query))) as JsonObject;
}

type Stored = readonly Schemas["VectorCard"][] | null;

const isLayer = (at: string): boolean => /^\d+$/.test(at);

/** What is asked of a text. Throws Error where an autoencoder's feature is not named. */
function toQuery(state: State, model: string, stored: Stored): Query {
  const query: Query = { model, text: state.text };
  if (state.colour !== "probe") return query;
  const probe = findVector(state.probe, stored ?? []);
  if (probe === undefined) {
    return findSae(state.probe) ? { ...query, probe: { ...makeReference(state.probe, []), read: "activation" } } : query;
  }
  const best = probe.about.recommendation?.layer ?? probe.layers.at(-1);
  const layer = isLayer(state.at) ? Number(state.at) : best;
  if (layer === undefined) return query;
  const isEach = state.at === "each";
  return {
    ...query,
    probe: { name: probe.name, layers: isEach ? probe.layers : [layer], read: isEach ? "cosine" : state.by },
    bestLayer: layer,
  };
}

function describeWork(answer: Schemas["PerplexityAnswer"]): string {
  const { queue_ms: queued, engine_ms: worked } = answer.timing;
  const scored = plural(answer.usage.scored_tokens, "token");
  if (answer.usage.cached_results) return `${scored}, from the result cache`;
  return `${scored}, scored in ${Math.round(queued + worked)} ms`;
}

function columnOf(reading: Reading, colour: Colour): (number | null)[] {
  switch (colour) {
    case "rank":
      return reading.ranks;
    case "entropy":
      return reading.entropies;
    case "probe":
      return reading.readings ?? [];
    case "surprisal":
      return reading.logprobs.map((value) => (value === null ? null : -value));
  }
}

function scaleOf(colour: Colour, columns: (number | null)[][], probe: string): Scale {
  const values = columns.flat();
  const top = values.reduce<number>((most, value) => Math.max(most, Math.abs(value ?? 0)), 0);
  switch (colour) {
    case "rank":
      return logScale("Rank among all tokens", top, count);
    case "entropy":
      return linearScale("Entropy of the prediction, nats", Math.max(1, Math.ceil(top)), tick);
    case "probe": {
      const { reach, isClipped } = findReach(values);
      return { ...divergingScale(probe, reach, tick), isClipped };
    }
    case "surprisal": {
      // One surprise of 20 nats would leave all others pale.
      const end = Math.min(10, Math.max(4, Math.ceil(top)));
      return { ...linearScale("Surprisal, nats", end, tick), isClipped: top > end };
    }
  }
}

interface ResultProps {
  sides: { main: Reading; other: Reading | null; otherName: string };
  colour: Colour;
  active: number | null;
  onActive: (index: number | null) => void;
}

function Result({ sides, colour, active, onActive }: ResultProps) {
  const { main, other, otherName } = sides;
  const [values, otherValues] = useMemo(
    () => [columnOf(main, colour), other && columnOf(other, colour)],
    [main, other, colour],
  );
  const scale = useMemo(
    () => scaleOf(colour, otherValues ? [values, otherValues] : [values], main.probe),
    [values, otherValues, colour, main],
  );
  const describe = useDescription(main);
  const describeOther = useDescription(other);
  if (other === null || otherValues === null) {
    return (
      <section class="result" aria-label="Result">
        <Sums reading={main} />
        <div class="sheet">
          <TokenText
            label="Tokens of the text"
            tokens={main.tokens}
            values={values}
            scale={scale}
            describe={describe}
          />
        </div>
        {colour === "probe" && main.layers.length > 1 && <Layers reading={main} />}
      </section>
    );
  }
  return (
    <section class="result" aria-label="Result">
      <Legend scale={scale} />
      <div class="beside">
        <div class="sheet">
          <h2>{main.answer.model}</h2>
          <TokenText
            label={`Tokens as ${main.answer.model} reads them`}
            tokens={main.tokens}
            values={values}
            scale={scale}
            describe={describe}
            onActive={onActive}
            marked={active}
            noLegend
          />
          <Sums reading={main} />
        </div>
        <div class="sheet">
          <h2>{otherName}</h2>
          <TokenText
            label={`Tokens, ${otherName}`}
            tokens={other.tokens}
            values={otherValues}
            scale={scale}
            describe={describeOther}
            onActive={onActive}
            marked={active}
            noLegend
          />
          <Sums reading={other} />
        </div>
      </div>
      {colour === "probe" && main.layers.length > 1 && <Layers reading={main} />}
      {colour === "probe" && other.layers.length > 1 && <Layers reading={other} title={otherName} />}
      <Difference sides={sides} active={active} onActive={onActive} />
    </section>
  );
}

/** What the probe reads at every layer and token. */
function Layers({ reading, title }: { reading: Reading; title?: string }) {
  const { layers, tokens, answer } = reading;
  const shown = useMemo(() => [...layers].sort((a, b) => a.layer - b.layer), [layers]);
  const values = useMemo(() => shown.map(({ readings }) => readings), [shown]);
  const names = useMemo(() => shown.map(({ layer }) => String(layer)), [shown]);
  const scale = useMemo(() => {
    const { reach, isClipped } = findReach(values.flat());
    return { ...divergingScale("Cosine with the probe", reach, tick), isClipped };
  }, [values]);
  return (
    <LayerMap
      title={`Layers and tokens, ${title ?? answer.model}`}
      label="What the probe reads, by layer and token"
      layers={names}
      tokens={tokens}
      values={values}
      scale={scale}
      format={number}
      exportName="layers-and-tokens"
    />
  );
}

function Difference({ sides: { main, other, otherName }, active, onActive }: Omit<ResultProps, "colour">) {
  const isSame = other !== null && main.ids.join() === other.ids.join();
  const values = useMemo(
    () =>
      main.logprobs.map((value, index) => {
        const second = other?.logprobs[index];
        return value === null || second === null || second === undefined ? null : value - second;
      }),
    [main, other],
  );
  const scale = useMemo(() => {
    const { reach, isClipped } = findReach(values);
    const label = `Surprisal, ${otherName} less ${main.answer.model}, nats`;
    const format = (value: number): string => (value > 0 ? `+${tick(value)}` : tick(value));
    return { ...divergingScale(label, Math.max(0.05, reach), format), isClipped };
  }, [values, otherName, main]);
  if (other === null) return null;
  if (!isSame) {
    return (
      <p class="note">
        The two models cut this text into different tokens, so there is no difference per token;
        bits per byte compare across tokenizers.
      </p>
    );
  }
  return (
    <div class="sheet">
      <h2>Difference</h2>
      <TokenText
        label="Difference per token"
        tokens={main.tokens}
        values={values}
        scale={scale}
        onActive={onActive}
        marked={active}
        describe={(index) => (
          <TokenCard
            token={main.tokens[index] ?? ""}
            id={main.ids[index]}
            rows={[
              [main.answer.model, `${fixed(-(main.logprobs[index] ?? Number.NaN), 3)} nats`],
              [otherName, `${fixed(-(other.logprobs[index] ?? Number.NaN), 3)} nats`],
              ["Difference", `${signed(values[index], 3)} nats`],
            ]}
          />
        )}
      />
    </div>
  );
}

/** The card of a token; what else was likely is looked up once somebody looks. */
function useDescription(reading: Reading | null): (index: number) => preact.ComponentChildren {
  return useMemo(() => {
    if (reading === null) return () => null;
    return (index) => <TextCard reading={reading} index={index} />;
  }, [reading]);
}

function TextCard({ reading, index }: { reading: Reading; index: number }) {
  const [found, setFound] = useState<{ index: number; top: Alternatives | null } | null>(null);
  useEffect(() => {
    let isWanted = true;
    const timer = setTimeout(() => {
      reading.findAlternatives(index).then(
        (top) => isWanted && setFound({ index, top }),
        () => isWanted && setFound({ index, top: null }),
      );
    }, 30);
    return () => {
      isWanted = false;
      clearTimeout(timer);
    };
  }, [reading, index]);
  const logprob = reading.logprobs[index] ?? null;
  const top = found?.index === index ? found.top : null;
  const isPending = found?.index !== index && logprob !== null;
  const token = reading.tokens[index] ?? "";
  const readings = reading.readings?.[index];
  const next = reading.tokens.findIndex((one, at) => at > index && one !== "");
  const parts = (next < 0 ? reading.tokens.length : next) - index;
  return (
    <TokenCard
      token={token}
      id={reading.ids[index]}
      logprob={logprob}
      rank={reading.ranks[index]}
      rows={[
        ...(token !== "" && parts > 1 ? [["Character", `first of ${parts} tokens`] as const] : []),
        ...(logprob === null ? [["First token", "not scored"] as const] : []),
        ["Entropy", `${fixed(reading.entropies[index], 3)} nats`],
        ...(reading.readings ? [["Probe", fixed(readings, 3)] as const] : []),
      ]}
      alternatives={
        isPending
          ? null
          : top?.tokens.map((alternative, at) => ({
              token: alternative,
              logprob: top.logprobs[at] ?? null,
              isTaken: at + 1 === reading.ranks[index],
            }))
      }
    />
  );
}

function Sums({ reading: { total } }: { reading: Reading }) {
  return (
    <Stats
      label="Sums"
      stats={[
        { label: "Perplexity", value: number(total.perplexity), note: `${total.num_scored} tokens` },
        { label: "Bits per byte", value: number(total.bits_per_byte), note: `${total.num_bytes} bytes` },
        { label: "Log-probability", value: fixed(total.sum_logprob, 2), note: "nats, summed" },
      ]}
    />
  );
}

export const text = view<State, Sides | Progress>({
  id: "text",
  title: "Text",
  icon: "text",
  lead: "How well does the model read a text?",
  initial: INITIAL,
  asks: ({ colour, probe, at, by, ...rest }) => [rest, colour === "probe" && [probe, at, by]],
  component: TextView,
  outcome: Outcome,
});

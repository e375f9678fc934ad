import { useEffect, useMemo, useState } from "preact/hooks";
import type { Schemas } from "../lib/api";
import { count, fixed, number, plural, signed, tick } from "../lib/format";
import { makeReading, readText, toRequest, type Alternatives, type Query, type Read, type Reading } from "../lib/reading";
import { divergingScale, findReach, linearScale, logScale, type Scale } from "../lib/scales";
import type { JsonObject } from "../lib/snippets";
import { reachOf } from "../lib/steering";
import { useAutoRun, useTask } from "../lib/task";
import { refreshVectors, vectors } from "../lib/vectors";
import { view, type OutcomeProps, type ViewProps } from "../lib/view";
import { ErrorNote, RunButton, RunForm } from "../parts/controls";
import { CopyAs } from "../parts/CopyAs";
import { Examples, type Example } from "../parts/Examples";
import { NumberField, Segments, Select, TextArea } from "../parts/fields";
import { Legend } from "../parts/Legend";
import { Panes } from "../parts/Panes";
import { Stats } from "../parts/Stats";
import { TokenCard } from "../parts/TokenCard";
import { TokenText } from "../parts/TokenText";

type Colour = "surprisal" | "rank" | "entropy" | "probe";
type Beside = "none" | "model" | "steered";

type State = {
  text: string;
  colour: Colour;
  probe: string;
  beside: Beside;
  other: string;
  vector: string;
  scale: number;
  layer: number;
};

/** Characters up to which a text is read again at every change; a longer one waits for the button. */
const LIVE = 6000;
/** No layer: those of the vector itself. */
const OWN = -1;
/** No layer: the one that training recommends, else those of the vector itself. */
const RECOMMENDED = -2;

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
  { label: "Other scripts", state: { text: "Bonjour! ¡Hola! Γεια σου! Привет! こんにちは!" } },
];

const INITIAL: State = {
  text: EXAMPLES[0]?.state.text ?? "",
  colour: "surprisal",
  probe: "",
  beside: "none",
  other: "",
  vector: "",
  scale: 1,
  layer: RECOMMENDED,
};

/** A text as it was read, and as it was beside that. */
interface Sides {
  main: Read;
  other: Read | null;
  otherName: string;
}

function TextView({ state, setState, model, models, isShown, result, onResult, isKept }: ViewProps<State, Sides>) {
  const task = useTask();
  const stored = vectors.value;
  const usesVectors = state.colour === "probe" || state.beside === "steered";
  useEffect(() => {
    // A server that has none to give is asked without them.
    if (usesVectors && isShown) refreshVectors().catch(() => (vectors.value ??= []));
  }, [usesVectors, isShown]);

  const query = model && toQuery(state, model.id, stored);
  const other = query && toOther(state, query, models, stored);
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
      form={
      <RunForm label="Text to score" onRun={run}>
        <TextArea
          label="Text"
          value={state.text}
          onChange={(text) => setState({ text })}
          rows={4}
        />
        <Examples examples={EXAMPLES} onChoose={setState} />
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
        </div>
        <Choices state={state} setState={setState} model={model} models={models} />
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
      <ErrorNote error={task.error} />
      {result && <Outcome result={result} state={state} setState={setState} />}
    </Panes>
  );
}

function Outcome({ result, state }: OutcomeProps<State, Sides>) {
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

function pick(name: string, stored: Stored): Schemas["VectorCard"] | undefined {
  return stored?.find((card) => card.name === name) ?? stored?.[0];
}

function toQuery(state: State, model: string, stored: Stored): Query {
  const probe = state.colour === "probe" ? pick(state.probe, stored) : undefined;
  const layer = probe?.about.recommendation?.layer ?? probe?.layers.at(-1);
  return {
    model,
    text: state.text,
    probe:
      probe && layer !== undefined
        ? { name: probe.name, layers: [layer], read: "projection" }
        : undefined,
  };
}

/** What is read beside it; null: nothing, or nothing yet. */
function toOther(
  state: State,
  query: Query,
  models: ViewProps<State>["models"],
  stored: Stored,
): { query: Query; name: string } | null {
  if (state.beside === "model") {
    const others = models.filter((model) => model.id !== query.model);
    const other = others.find((model) => model.id === state.other) ?? others[0];
    return other ? { query: { ...query, model: other.id }, name: other.id } : null;
  }
  const card = state.beside === "steered" ? pick(state.vector, stored) : undefined;
  if (card === undefined) return null;
  const layer = state.layer === RECOMMENDED ? (card.about.recommendation?.layer ?? OWN) : state.layer;
  const layers = layer === OWN ? undefined : [layer];
  const steering = { vectors: [{ name: card.name, scale: state.scale, layers }] };
  return { query: { ...query, steering }, name: `steered by ${card.name} × ${state.scale}` };
}

function describeWork(answer: Schemas["PerplexityAnswer"]): string {
  const { queue_ms: queued, engine_ms: worked } = answer.timing;
  const scored = plural(answer.usage.scored_tokens, "token");
  if (answer.usage.cached_results) return `${scored}, from the result cache`;
  return `${scored}, scored in ${Math.round(queued + worked)} ms`;
}

/** What the chosen colours and comparison need: a probe, a vector and its scale, a model. */
function Choices(props: Pick<ViewProps<State>, "state" | "setState" | "model" | "models">) {
  const { state, setState, model, models } = props;
  const stored = vectors.value;
  const options = (stored ?? []).map((card) => ({ value: card.name, label: card.name }));
  const others = models.filter((other) => other.id !== model?.id);
  const lacksVector =
    stored?.length === 0 && (state.colour === "probe" || state.beside === "steered");
  if (lacksVector) {
    return (
      <p class="note">
        No vector is stored yet. Train one from pairs of texts under{" "}
        <a href="#vectors">Vectors</a>; it takes a few seconds.
      </p>
    );
  }
  if (state.beside === "model" && others.length === 0) {
    return (
      <p class="note">
        This server has one model. Configure a second one to compare two on the same text, such as{" "}
        <code>demo/both.yaml</code> does.
      </p>
    );
  }
  const chosen = pick(state.vector, stored);
  const layers = chosen?.layers ?? [];
  const best = chosen?.about.recommendation;
  const isAnywhere = layers.length === 1 && model?.num_layers;
  return (
    <div class="row">
      {state.colour === "probe" && stored !== null && (
        <Select
          label="Probe"
          value={pick(state.probe, stored)?.name ?? ""}
          options={options}
          onChange={(probe) => setState({ probe })}
        />
      )}
      {state.beside === "steered" && stored !== null && (
        <>
          <Select
            label="Vector"
            value={pick(state.vector, stored)?.name ?? ""}
            options={options}
            onChange={(vector) =>
              setState({
                vector,
                layer: RECOMMENDED,
                scale: reachOf("add", "raw", pick(vector, stored)).start,
              })
            }
          />
          <NumberField
            label="Scale"
            value={state.scale}
            step="any"
            onChange={(scale) => setState({ scale: scale ?? 0 })}
          />
          <Select
            label="Layer"
            value={String(state.layer === RECOMMENDED && !best ? OWN : state.layer)}
            options={[
              ...(best ? [{ value: String(RECOMMENDED), label: `${best.layer} (recommended)` }] : []),
              { value: String(OWN), label: layers.length > 1 ? "All of its own" : "Its own" },
              ...(isAnywhere ? Array.from({ length: isAnywhere }, (_, n) => n) : layers).map(
                (layer) => ({ value: String(layer), label: String(layer) }),
              ),
            ]}
            onChange={(layer) => setState({ layer: Number(layer) })}
          />
        </>
      )}
      {state.beside === "model" && (
        <Select
          label="Other model"
          value={others.find((other) => other.id === state.other)?.id ?? others[0]?.id ?? ""}
          options={others.map((other) => ({ value: other.id, label: other.id }))}
          onChange={(chosen) => setState({ other: chosen })}
        />
      )}
    </div>
  );
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
      return { ...divergingScale(`Projection on ${probe}`, reach, tick), isClipped };
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
      <Difference sides={sides} active={active} onActive={onActive} />
    </section>
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
  return (
    <TokenCard
      token={token}
      id={reading.ids[index]}
      logprob={logprob}
      rank={reading.ranks[index]}
      rows={[
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

export const text = view<State, Sides>({
  id: "text",
  title: "Text",
  icon: "text",
  lead: "How surprising is each token of a text?",
  initial: INITIAL,
  component: TextView,
  outcome: Outcome,
});

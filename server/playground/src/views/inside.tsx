import { useEffect, useMemo } from "preact/hooks";
import { call, type Schemas } from "../lib/api";
import type { JsonObject } from "../lib/snippets";
import { attempt, useAutoRun, useTask } from "../lib/task";
import { askedModel, refreshVectors, vectors } from "../lib/vectors";
import { view, type OutcomeProps, type ViewProps } from "../lib/view";
import { BesideFields, INITIAL_BESIDE, makeBeside } from "../parts/Beside";
import { ErrorNote, RunButton, RunForm } from "../parts/controls";
import { CopyAs } from "../parts/CopyAs";
import { Examples, type Example } from "../parts/Examples";
import { NumberField, Segments, Select, TextArea, TextField } from "../parts/fields";
import { Lines } from "../parts/Lines";
import { Panes } from "../parts/Panes";
import { Attributions } from "./inside/Attribution";
import { LensMaps } from "./inside/LensMap";
import { PatchMap } from "./inside/PatchMap";
import {
  guessRuns,
  makeAttribution,
  makeLens,
  makePatch,
  type Found,
  type InsideState,
} from "./inside/request";

const EXAMPLES: Example<InsideState>[] = [
  {
    label: "Where a capital is known",
    state: {
      look: "patch",
      clean: "The capital of France is",
      corrupted: "The capital of Spain is",
      targets: [" Paris", " Madrid"],
      metric: "difference",
    },
  },
  {
    label: "Which tokens speak for it",
    state: { look: "attribution", clean: "Tom was sad and lonely. He", targets: [" cried.", " smiled."] },
  },
  {
    label: "Where a name is decided",
    state: { look: "lens", text: "The capital of France is Paris. The capital of Italy is Rome." },
  },
];

const INITIAL: InsideState = {
  ...INITIAL_BESIDE,
  look: "lens",
  text: "The capital of France is Paris. The capital of Italy is Rome.",
  says: "probability",
  clean: "The capital of France is",
  corrupted: "The capital of Spain is",
  targets: [" Paris", " Madrid"],
  metric: "difference",
  direction: "denoise",
  hook: "resid_post",
  at: "",
  cells: "share",
  method: "integrated",
  steps: 50,
};

/** Characters up to which a text is read by itself, and runs up to which patches are. */
const LIVE = { characters: 1000, runs: 256 };

const RUNS = { lens: "Read", patch: "Patch", attribution: "Attribute" };

type Props = ViewProps<InsideState, Found>;

function InsideView({ state, setState, model, models, isShown, result, onResult, isKept, isStale }: Props) {
  const task = useTask();
  const stored = vectors.value;
  const isSteered = state.look === "lens" && state.beside === "steered";
  useEffect(() => {
    if (isSteered && isShown) refreshVectors().catch(() => (vectors.value ??= []));
  }, [isSteered, isShown, askedModel.value]);
  const made = useMemo(
    () =>
      attempt(() => {
        if (model === null) return null;
        const name = model.id;
        if (state.look === "patch") return [{ endpoint: "patch" as const, name, body: makePatch(state, name) }];
        if (state.look === "attribution") return [{ endpoint: "gradient" as const, name, body: makeAttribution(state, name) }];
        const own = { model: name, name };
        const other = makeBeside(state, model.id, models, stored);
        return [own, ...(other ? [other] : [])].map((condition) => ({
          endpoint: "lens" as const,
          name: condition.name,
          body: makeLens(state, condition),
        }));
      }),
    [state, model?.id, models, stored],
  );
  const asks = "value" in made ? made.value : null;
  const isFilled = state.look === "lens" ? state.text !== "" : state.targets.some((target) => target !== "");
  const lacking = state.look === "attribution" ? model?.lacks?.gradient : undefined;
  const canRun = asks !== null && isFilled && lacking === undefined && model?.state === "ready" && (stored !== null || !isSteered);
  const run = (): void => {
    if (!canRun) return;
    task.run(async (signal) => {
      const [first] = asks;
      if (first?.endpoint === "patch") {
        const { metric = "logprob", direction = "denoise", hook, results } = (await call("post", "/patch", first.body, { signal }));
        const found: Found = { look: "patch", metric, direction, hook, result: results[0] as Schemas["PatchResult"] };
        onResult(found, { fields: state, title: `Patching: ${state.clean} | ${state.corrupted}` });
        return;
      }
      if (first?.endpoint === "gradient") {
        const answer = await call("post", "/gradient", first.body, { signal });
        const targets = answer.results[0]?.targets ?? [];
        onResult({ look: "attribution", targets }, { fields: state, title: `Attribution: ${state.clean} | ${state.targets.join(" | ")}` });
        return;
      }
      const sides = await Promise.all(
        asks.map(async ({ name, body }) => {
          const answer = await call("post", "/lens", body as Schemas["LensRequest"], { signal });
          return { name, target: answer.results[0]?.targets?.[0] as Schemas["LensTarget"] };
        }),
      );
      onResult({ look: "lens", sides }, { fields: state, title: `Logit lens: ${state.text.slice(0, 80)}` });
    });
  };
  const isSmall =
    state.look === "lens"
      ? state.text.length <= LIVE.characters
      : state.look === "patch"
        ? guessRuns(state, model?.num_layers ?? 1) <= LIVE.runs
        : state.clean.length <= LIVE.characters;
  useAutoRun(canRun && isShown && isSmall && !isKept ? JSON.stringify(asks) : null, run);
  return (
    <Panes
      isStale={isStale}
      form={
        <RunForm label="What is looked at" onRun={run}>
          <Segments
            label="Look by"
            value={state.look}
            options={[
              { value: "lens", label: "logit lens" },
              { value: "patch", label: "patching" },
              { value: "attribution", label: "attribution" },
            ]}
            onChange={(look) => setState({ look })}
          />
          {lacking !== undefined && (
            <p class="note">
              {model?.id} gives no attribution: {lacking}.
            </p>
          )}
          {state.look === "lens" ? (
            <TextArea label="Text" value={state.text} onChange={(text) => setState({ text })} rows={3} />
          ) : (
            <PairFields state={state} setState={setState} isPair={state.look === "patch"} />
          )}
          <Examples
            examples={EXAMPLES.filter((one) => one.state.look !== "attribution" || !model?.lacks?.gradient)}
            onChoose={setState}
          />
          {state.look !== "attribution" && (
            <TextField
              label="Layers"
              value={state.at}
              placeholder={model?.num_layers ? `all ${model.num_layers}, each alone` : "all"}
              hint={state.look === "patch" ? "Sets that are patched together, as in 0-2;3;4." : "As in 0,4-8."}
              onChange={(at) => setState({ at })}
            />
          )}
          {state.look === "lens" && (
            <>
              <Segments
                label="Colour"
                value={state.says}
                options={[
                  { value: "probability", label: "Probability" },
                  { value: "rank", label: "Rank" },
                  { value: "entropy", label: "Entropy" },
                ]}
                onChange={(says) => setState({ says })}
              />
              <BesideFields state={state} setState={setState} model={model} models={models} cards={stored} />
            </>
          )}
          <div class="actions">
            <RunButton task={task} onRun={run} label={RUNS[state.look]} disabled={!canRun} />
            {state.look === "patch" && (
              <Segments
                label="Cells say"
                value={state.cells}
                options={[
                  { value: "share", label: "share" },
                  { value: "change", label: "change" },
                ]}
                onChange={(cells) => setState({ cells })}
              />
            )}
          </div>
        </RunForm>
      }
      below={asks?.map(({ endpoint, body }, at) => (
        <CopyAs
          key={at}
          label={at === 0 ? "Copy as" : "Copy what is beside it as"}
          asked={{ endpoint, body: JSON.parse(JSON.stringify(body)) as JsonObject }}
        />
      ))}
    >
      <ErrorNote error={"error" in made ? made.error : task.error} onRetry={run} />
      {result?.look === state.look && <Outcome result={result} state={state} />}
    </Panes>
  );
}

interface FieldsProps {
  state: InsideState;
  setState: (change: Partial<InsideState>) => void;
}

function PairFields({ state, setState, isPair }: FieldsProps & { isPair: boolean }) {
  return (
    <>
      <TextArea
        label={isPair ? "Clean context" : "Context"}
        value={state.clean}
        rows={2}
        onChange={(clean) => setState({ clean })}
      />
      {isPair && (
        <TextArea
          label="Corrupted context"
          value={state.corrupted}
          rows={2}
          hint="With as many tokens as the clean one."
          onChange={(corrupted) => setState({ corrupted })}
        />
      )}
      <Lines label="Target" lines={state.targets} fresh=" " onChange={(targets) => setState({ targets })} />
      {isPair ? <PatchFields state={state} setState={setState} /> : <AttributionFields state={state} setState={setState} />}
    </>
  );
}

function AttributionFields({ state, setState }: FieldsProps) {
  return (
    <div class="row">
      <Select
        label="Method"
        value={state.method}
        options={[
          { value: "integrated", label: "integrated gradients" },
          { value: "gradient_x_input", label: "gradient × input" },
        ]}
        onChange={(method) => setState({ method })}
      />
      {state.method === "integrated" && (
        <NumberField
          label="Steps"
          value={state.steps}
          min={1}
          max={1000}
          onChange={(steps) => setState({ steps: steps ?? 1 })}
        />
      )}
    </div>
  );
}

function PatchFields({ state, setState }: FieldsProps) {
  return (
    <div class="row">
      <Select
        label="Metric"
        value={state.metric}
        options={[
          { value: "difference", label: "first less second" },
          { value: "logprob", label: "first target" },
          { value: "kl", label: "KL from clean" },
        ]}
        onChange={(metric) => setState({ metric })}
      />
      <Select
        label="Patched"
        value={state.direction}
        options={[
          { value: "denoise", label: "clean in corrupted" },
          { value: "noise", label: "corrupted in clean" },
        ]}
        onChange={(direction) => setState({ direction })}
      />
      <TextField label="Activations of" value={state.hook} onChange={(hook) => setState({ hook })} />
    </div>
  );
}

function Outcome({ result, state }: Pick<OutcomeProps<InsideState, Found>, "result" | "state">) {
  if (result.look === "lens") return <LensMaps sides={result.sides} says={state.says} />;
  if (result.look === "attribution") return <Attributions targets={result.targets} />;
  return <PatchMap found={result} cells={state.cells} />;
}

export const inside = view<InsideState, Found>({
  id: "inside",
  title: "Inside",
  icon: "inside",
  lead: "Which layers and tokens carry a prediction?",
  initial: INITIAL,
  asks: ({ look, text, clean, corrupted, targets, metric, direction, hook, at, method, steps, says: _s, cells: _c, ...beside }) => [
    look,
    look === "lens"
      ? [text, at, beside]
      : look === "patch"
        ? [clean, corrupted, targets, metric, direction, hook, at]
        : [clean, targets, method, steps],
  ],
  component: InsideView,
  outcome: Outcome,
});

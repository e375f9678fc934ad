import "./choices.css";
import { useEffect, useMemo, useState } from "preact/hooks";
import { call, type Schemas } from "../lib/api";
import { fixed, interval, percent, plural, signed, tick } from "../lib/format";
import { linearScale, type Scale } from "../lib/scales";
import type { JsonObject } from "../lib/snippets";
import { readCases, type Case } from "../lib/tables";
import { attempt, useAutoRun, useTask } from "../lib/task";
import { askedModel, refreshVectors, vectors } from "../lib/vectors";
import { view, type OutcomeProps, type ViewProps } from "../lib/view";
import { BesideFields, INITIAL_BESIDE, makeBeside, type BesideState, type Condition } from "../parts/Beside";
import { ErrorNote, RunButton, RunForm } from "../parts/controls";
import { CopyAs } from "../parts/CopyAs";
import { Examples, type Example } from "../parts/Examples";
import { Drop, FileButton, Segments, Select, TextArea, TextField } from "../parts/fields";
import { Icon } from "../parts/Icon";
import { Legend } from "../parts/Legend";
import { Lines } from "../parts/Lines";
import { Panes } from "../parts/Panes";
import { Stats } from "../parts/Stats";
import { Table, type TableColumn } from "../parts/Table";
import { Score } from "./choices/Score";

type Space = "as_given" | "both";
type Boundary = "joint" | "separate";

type State = BesideState & {
  /** One context, or a table of them. */
  mode: "one" | "table";
  context: string;
  targets: string[];
  /** The table as CSV or JSON lines. */
  table: string;
  space: Space;
  boundary: Boundary;
  shares: Norm;
  /** The context of the probabilities that PMI subtracts. */
  neutral: string;
};

const EXAMPLES: Example<State>[] = [
  {
    label: "A mood",
    state: {
      context: "Tom was a little boy. One day, he went to the park. He",
      targets: [
        " was very happy.",
        " was very sad.",
        " smiled at the sunshine.",
        " cried in the rain.",
        " danced on the moon.",
      ],
    },
  },
  {
    label: "A capital",
    state: {
      context: "The capital of France is",
      targets: [" Paris", " London", " Berlin", " Rome"],
    },
  },
  {
    label: "With and without a space",
    state: {
      context: "The chemical symbol for gold is",
      targets: ["Au", "Ag", "Fe"],
      space: "both",
    },
  },
  {
    label: "A merged boundary",
    state: { context: "The capital of Fr", targets: ["ance is Paris.", "ogs is empty."] },
  },
];

const TABLE = `context,target 1,target 2,answer
"The capital of France is", Paris, London,0
"The capital of Italy is", Rome, Oslo,0
"The capital of Spain is", Madrid, Berlin,0
"The chemical symbol for gold is", Ag, Au,1
`;

const INITIAL: State = {
  ...INITIAL_BESIDE,
  mode: "one",
  table: TABLE,
  shares: "sum",
  neutral: "",
  context: EXAMPLES[0]?.state.context ?? "",
  targets: EXAMPLES[0]?.state.targets ?? [],
  space: "as_given",
  boundary: "joint",
};

const TOP = 6;

/** Items that one request has: a table is sent in several. */
const BATCH = 128;

/** What one model, steered or not, says of every case. */
interface Side {
  name: string;
  items: Schemas["ItemScore"][];
  /** The same targets after the neutral context, where PMI was asked for. */
  neutral: Schemas["ItemScore"][] | null;
}

interface Shown {
  cases: Case[];
  sides: Side[];
  /** The tokens of the only context; empty for a table. */
  context: string[];
}

function toRequest(state: State, cases: readonly Case[], condition: Condition): Schemas["LogprobRequest"] {
  const after = (context: (one: Case) => string) =>
    cases.map((one) => ({ context: context(one), targets: one.targets }));
  return {
    model: condition.model,
    items: [...after((one) => one.context), ...(state.shares === "pmi" ? after(() => state.neutral) : [])],
    boundary: state.boundary,
    space: state.space,
    top: state.mode === "one" ? TOP : undefined,
    steering: condition.steering as Schemas["Steering"] | undefined,
  };
}

function ChoicesView(props: ViewProps<State, Shown>) {
  const { state, setState, model, models, isShown, result, onResult, isKept, isStale } = props;
  const task = useTask();
  const [done, setDone] = useState(0);
  const stored = vectors.value;
  useEffect(() => {
    if (state.beside === "steered" && isShown) refreshVectors().catch(() => (vectors.value ??= []));
  }, [state.beside, isShown, askedModel.value]);
  const made = useMemo(
    () =>
      attempt(() => {
        if (model === null) return null;
        const targets = state.targets.filter((target) => target !== "");
        const cases = state.mode === "table" ? readCases(state.table) : [{ context: state.context, targets, answer: null }];
        const conditions: Condition[] = [{ model: model.id, name: model.id }];
        const beside = makeBeside(state, model.id, models, stored);
        if (beside !== null) conditions.push(beside);
        return { cases, conditions };
      }),
    [state, model?.id, models, stored],
  );
  const asked = "value" in made ? made.value : null;
  const isReady = model?.state === "ready" && (state.beside !== "steered" || stored !== null);
  const canRun = asked !== null && isReady && asked.cases.some(({ targets }) => targets.length > 0);
  const run = (): void => {
    if (asked === null || !canRun) return;
    const { cases, conditions } = asked;
    task.run(async (signal) => {
      setDone(0);
      const cut =
        state.mode === "one"
          ? call("post", "/tokenize", { model: conditions[0]?.model, texts: [state.context] }, { signal })
          : null;
      // Where scoring fails first, nobody awaits this one.
      cut?.catch(() => undefined);
      const sides: Side[] = [];
      for (const condition of conditions) {
        const side: Side = { name: condition.name, items: [], neutral: state.shares === "pmi" ? [] : null };
        for (let from = 0; from < cases.length; from += BATCH) {
          const some = cases.slice(from, from + BATCH);
          const answer = await call("post", "/logprob", toRequest(state, some, condition), { signal });
          side.items.push(...answer.results.slice(0, some.length));
          side.neutral?.push(...answer.results.slice(some.length));
          setDone((old) => old + some.length);
        }
        sides.push(side);
      }
      const [first] = cases;
      const title =
        state.mode === "table"
          ? `${plural(cases.length, "question")}: ${first?.context}`
          : `${state.context.slice(-60)} | ${state.targets.join(" | ")}`;
      const context = (await cut)?.results[0]?.tokens ?? [];
      onResult({ cases, sides, context }, { fields: state, title });
    });
  };
  const key = JSON.stringify([asked, state.space, state.boundary, state.shares === "pmi" && state.neutral]);
  useAutoRun(canRun && !isKept && asked.cases.length <= BATCH ? key : null, run);
  const take = (files: FileList | null | undefined): void => {
    const file = files?.[0];
    if (file) task.run(async () => setState({ table: await file.text(), mode: "table" }));
  };
  return (
    <Panes
      isStale={isStale}
      form={
        <RunForm label="Contexts and targets" onRun={run}>
          <Segments
            label="Score"
            value={state.mode}
            options={[
              { value: "one", label: "one context" },
              { value: "table", label: "a table of them" },
            ]}
            onChange={(mode) => setState({ mode })}
          />
          {state.mode === "one" ? (
            <>
              <TextArea
                label="Context"
                value={state.context}
                onChange={(context) => setState({ context })}
                rows={2}
                maxRows={7}
              />
              <Lines label="Target" lines={state.targets} fresh=" " onChange={(targets) => setState({ targets })} />
              <Examples
                examples={EXAMPLES}
                onChoose={(chosen) => setState({ space: "as_given", boundary: "joint", ...chosen })}
              />
            </>
          ) : (
            <Drop onTake={take}>
              <TextArea
                label="CSV or JSON lines, pasted or dropped here as a file"
                value={state.table}
                onChange={(table) => setState({ table })}
                rows={6}
                maxRows={9}
                hint="CSV: columns context and perhaps answer; every other one is a target. JSON lines: context, targets, answer. An answer is a target, or its number from 0 on. Spaces before targets count."
              />
              <FileButton label="Choose a file" accept=".csv,.tsv,.jsonl,.json,.txt" onTake={take} />
            </Drop>
          )}
          <BesideFields state={state} setState={setState} model={model} models={models} cards={stored} />
          <div class="row">
            <Select
              label="Shares by"
              value={state.shares}
              options={NORMS}
              onChange={(shares) => setState({ shares })}
            />
            {state.shares === "pmi" && (
              <TextField
                label="Neutral context"
                value={state.neutral}
                placeholder="nothing"
                onChange={(neutral) => setState({ neutral })}
              />
            )}
          </div>
          <details class="more">
            <summary>Spaces and boundaries</summary>
            <Segments
              label="Leading space"
              value={state.space}
              options={[
                { value: "as_given", label: "As given" },
                { value: "both", label: "With and without" },
              ]}
              onChange={(space) => setState({ space })}
            />
            <Segments
              label="Context and target are cut into tokens"
              value={state.boundary}
              options={[
                { value: "joint", label: "Together" },
                { value: "separate", label: "Each alone" },
              ]}
              onChange={(boundary) => setState({ boundary })}
            />
          </details>
          <div class="actions">
            <RunButton task={task} onRun={run} label="Compare" disabled={!canRun} />
            {task.isRunning && state.mode === "table" && asked && (
              <span class="hint num" role="status">
                {done} of {asked.cases.length * asked.conditions.length} scored
              </span>
            )}
          </div>
        </RunForm>
      }
      below={asked?.conditions.map((condition, at) => (
        <CopyAs
          key={at}
          label={at === 0 ? "Copy as" : "Copy what is beside it as"}
          asked={{ endpoint: "logprob", body: JSON.parse(JSON.stringify(toRequest(state, asked.cases, condition))) as JsonObject }}
        />
      ))}
    >
      <ErrorNote error={"error" in made ? made.error : task.error} onRetry={run} />
      {result && <Outcome result={result} state={state} />}
    </Panes>
  );
}

type Norm = "sum" | "tokens" | "bytes" | "pmi";

const NORMS: { value: Norm; label: string }[] = [
  { value: "sum", label: "log-probability" },
  { value: "tokens", label: "its mean a token" },
  { value: "bytes", label: "its mean a byte" },
  { value: "pmi", label: "PMI: less that after a neutral context" },
];

/** What targets are compared by; null where one cannot be. */
function valuesOf(side: Side, at: number, norm: Norm): (number | null)[] {
  const own = (target: Schemas["ScoredTarget"] | undefined): number | null =>
    target?.logprob_any_space ?? target?.logprob ?? null;
  return (side.items[at]?.targets ?? []).map((target, index) => {
    const value = own(target);
    if (value === null) return null;
    if (norm === "tokens") return value / target.num_tokens;
    if (norm === "bytes") return value / target.num_bytes;
    const neutral = norm === "pmi" ? own(side.neutral?.[at]?.targets?.[index]) : 0;
    return neutral === null ? null : value - neutral;
  });
}

/** Shares of the targets: the server's own for sums, else softmax of what they are compared by. */
function sharesOf(side: Side, at: number, norm: Norm): (number | null)[] {
  if (norm === "sum") return side.items[at]?.choice_probs ?? [];
  const values = valuesOf(side, at, norm);
  const top = Math.max(...values.map((value) => value ?? -Infinity));
  const weights = values.map((value) => (value === null ? null : Math.exp(value - top)));
  const total = weights.reduce<number>((sum, weight) => sum + (weight ?? 0), 0);
  return weights.map((weight) => (weight === null ? null : weight / total));
}

function bestOf(shares: readonly (number | null)[]): number {
  return shares.reduce<number>((best, share, at) => ((share ?? -1) > (shares[best] ?? -1) ? at : best), 0);
}

function Outcome({ result, state }: Pick<OutcomeProps<State, Shown>, "result" | "state">) {
  const [at, setAt] = useState(0);
  // PMI is there once it was asked for.
  const norm = state.shares === "pmi" && result.sides.some(({ neutral }) => neutral === null) ? "sum" : state.shares;
  const chosen = Math.min(at, result.cases.length - 1);
  return (
    <section class="result" aria-label="Result">
      {result.cases.length > 1 && <Questions result={result} norm={norm} chosen={chosen} onChoose={setAt} />}
      <Question result={result} at={chosen} norm={norm} />
    </section>
  );
}

interface Line {
  at: number;
  one: Case;
  shares: (number | null)[][];
  best: number[];
}

interface QuestionsProps {
  result: Shown;
  norm: Norm;
  chosen: number;
  onChoose: (at: number) => void;
}

/** Every question of a table, a line each; and how many are answered right. */
function Questions({ result, norm, chosen, onChoose }: QuestionsProps) {
  const { cases, sides } = result;
  const lines = useMemo(
    () =>
      cases.map((one, at): Line => {
        const shares = sides.map((side) => sharesOf(side, at, norm));
        return { at, one, shares, best: shares.map(bestOf) };
      }),
    [result, norm],
  );
  const columns = useMemo(() => {
    const all: TableColumn<Line>[] = [
      { name: "#", value: ({ at }) => at + 1 },
      { name: "Context", value: ({ one }) => one.context, isText: true },
    ];
    if (cases.some(({ answer }) => answer !== null)) {
      all.push({ name: "Answer", value: ({ one }) => one.targets[one.answer ?? -1]?.trim(), isText: true });
    }
    sides.forEach(({ name }, side) => {
      const mark = ({ one, best }: Line): string => (one.answer === null ? "" : one.answer === best[side] ? " ✓" : " ✗");
      all.push(
        { name: `Best of ${name}`, value: (line) => `${line.one.targets[line.best[side] ?? 0]?.trim()}${mark(line)}`, isText: true },
        {
          name: `Share, ${name}`,
          value: ({ shares, best }) => shares[side]?.[best[side] ?? 0],
          show: ({ shares, best }) => percent(shares[side]?.[best[side] ?? 0]),
          isDescending: true,
        },
      );
    });
    if (sides.length > 1) {
      const moved = ({ shares, best }: Line): number | null => {
        const [before, after] = [0, 1].map((side) => shares[side]?.[best[0] ?? 0] ?? null);
        return before == null || after == null ? null : after - before;
      };
      all.push({ name: "Its share moves by", value: moved, show: (line) => signed(100 * (moved(line) ?? Number.NaN), 1), isDescending: true });
    }
    return all;
  }, [result, norm]);
  const known = lines.filter(({ one }) => one.answer !== null);
  const stats = sides.flatMap(({ name }, side) => {
    const right = known.filter(({ one, best }) => one.answer === best[side]).length;
    const share = right / known.length;
    return known.length === 0
      ? []
      : [{ label: `Right, ${name}`, value: percent(share), note: `${right} of ${known.length}; 95 %: ${interval(right, known.length)}` }];
  });
  if (sides.length > 1) {
    const same = lines.filter(({ best }) => best[0] === best[1]).length;
    stats.push({ label: "Same choice", value: percent(same / lines.length), note: `${same} of ${lines.length}` });
  }
  return (
    <>
      {stats.length > 0 && <Stats label="In all" stats={stats} />}
      <Table
        label="Questions"
        rows={lines}
        columns={columns}
        onChoose={({ at }) => onChoose(at)}
        isChosen={({ at }) => at === chosen}
        exportName="choices"
      />
    </>
  );
}

/** One question: its targets with their shares, as each side has them. */
function Question({ result, at, norm }: { result: Shown; at: number; norm: Norm }) {
  const { sides, cases } = result;
  const item = sides[0]?.items[at];
  const scale = useMemo(() => {
    const all = item?.targets?.flatMap((target) => target.logprobs ?? []) ?? [];
    const top = all.reduce<number>((most, value) => Math.max(most, -(value ?? 0)), 0);
    const end = Math.min(10, Math.max(4, Math.ceil(top)));
    return { ...linearScale("Surprisal, nats", end, tick), isClipped: top > end };
  }, [item]);
  const shares = sides.map((side) => sharesOf(side, at, norm));
  const one = cases[at];
  if (item === undefined || one === undefined) return null;
  return (
    <div class="sheet">
      <div class="choices-head">
        <h2>{cases.length > 1 ? one.context : "Shares of these targets"}</h2>
        <Legend scale={scale} />
      </div>
      <ol class="choices">
        {(item.targets ?? []).map((target, index) => (
          <Choice
            key={index}
            target={target}
            shares={shares.map((all, side) => ({
              name: sides[side]?.name ?? "",
              share: all[index] ?? null,
              isBest: bestOf(all) === index,
              logprob: sides[side]?.items[at]?.targets?.[index]?.logprob ?? null,
            }))}
            isRight={one.answer === index}
            text={one.context}
            context={result.context}
            scale={scale}
          />
        ))}
      </ol>
    </div>
  );
}

interface ChoiceProps {
  target: Schemas["ScoredTarget"];
  /** By side: its part of the probability of all targets together. */
  shares: { name: string; share: number | null; isBest: boolean; logprob: number | null }[];
  /** Whether the table says that this is the answer. */
  isRight: boolean;
  text: string;
  context: string[];
  scale: Scale;
}

function Choice({ target, shares, isRight, text, context, scale }: ChoiceProps) {
  const variants = target.variants;
  const shown = { text, context };
  return (
    <li class={`choice ${shares[0]?.isBest ? "is-strong" : ""}`}>
      {shares.map(({ name, share, isBest, logprob }, at) => (
        <div key={at} class={`choice-side ${isBest ? "is-strong" : ""}`}>
          {shares.length > 1 && <span class="hint">{name}</span>}
          <div class="bar-track" aria-hidden="true">
            <span class="bar-fill" style={{ width: `${100 * (share ?? 0)}%` }} />
          </div>
          <span class="choice-share num">
            <span class="off-screen">Share: </span>
            {percent(share)}
          </span>
          {at > 0 && <span class="hint num choice-sum">{fixed(logprob, 3)} nats</span>}
        </div>
      ))}
      {isRight && (
        <p class="hint">
          <Icon name="check" /> the answer
        </p>
      )}
      <div class="choice-scores">
        {variants ? (
          <>
            <Score name="With a space" target={variants.with_space} {...{ shown, scale }} />
            <Score name="Without one" target={variants.without_space} {...{ shown, scale }} />
            <p class="hint num">
              Either way {fixed(target.logprob_any_space, 3)} nats, probability{" "}
              {percent(Math.exp(target.logprob_any_space ?? -Infinity))}
            </p>
          </>
        ) : (
          <Score target={target} shown={shown} scale={scale} />
        )}
      </div>
    </li>
  );
}

export const choices = view<State, Shown>({
  id: "choices",
  title: "Choices",
  icon: "choices",
  lead: "Which of these continues the context best?",
  initial: INITIAL,
  asks: ({ mode, context, targets, table, shares, neutral, ...rest }) => [
    rest,
    mode === "one" ? [context, targets] : table,
    shares === "pmi" && neutral,
  ],
  component: ChoicesView,
  outcome: Outcome,
});

import "./choices.css";
import { useMemo } from "preact/hooks";
import { call, type Schemas } from "../lib/api";
import { fixed, number, percent, plural, tick } from "../lib/format";
import { linearScale, type Scale } from "../lib/scales";
import type { JsonObject } from "../lib/snippets";
import { useAutoRun, useTask } from "../lib/task";
import { view, type OutcomeProps, type ViewProps } from "../lib/view";
import { ErrorNote, RunButton, RunForm } from "../parts/controls";
import { CopyAs } from "../parts/CopyAs";
import { Examples, type Example } from "../parts/Examples";
import { Segments, TextArea } from "../parts/fields";
import { Legend } from "../parts/Legend";
import { Lines } from "../parts/Lines";
import { Panes } from "../parts/Panes";
import { TokenCard } from "../parts/TokenCard";
import { TokenText } from "../parts/TokenText";

type Space = "as_given" | "both";
type Boundary = "joint" | "separate";

type State = {
  context: string;
  targets: string[];
  space: Space;
  boundary: Boundary;
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
    state: { context: "The capital of Fr", targets: ["ance is Paris.", "og"] },
  },
];

const INITIAL: State = {
  context: EXAMPLES[0]?.state.context ?? "",
  targets: EXAMPLES[0]?.state.targets ?? [],
  space: "as_given",
  boundary: "joint",
};

const TOP = 6;

interface Shown {
  answer: Schemas["LogprobAnswer"];
  /** The context, and its own tokens. */
  text: string;
  context: string[];
}

function toRequest(state: State, model: string): Schemas["LogprobRequest"] {
  return {
    model,
    items: [{ context: state.context, targets: state.targets.filter((target) => target !== "") }],
    boundary: state.boundary,
    space: state.space,
    top: TOP,
  };
}

function ChoicesView({ state, setState, model, result, onResult, isKept }: ViewProps<State, Shown>) {
  const task = useTask();
  const request = model && toRequest(state, model.id);
  const canRun = model?.state === "ready" && state.targets.some((target) => target !== "");
  const run = (): void => {
    if (request === null || !canRun) return;
    task.run(async (signal) => {
      const [answer, cut] = await Promise.all([
        call("post", "/logprob", request, { signal }),
        call("post", "/tokenize", { model: request.model, texts: [state.context] }, { signal }),
      ]);
      const title = `${state.context.slice(-60)} | ${state.targets.join(" | ")}`;
      onResult({ answer, text: state.context, context: cut.results[0]?.tokens ?? [] }, { fields: state, title });
    });
  };
  useAutoRun(canRun && !isKept ? JSON.stringify(request) : null, run);
  return (
    <Panes
      form={
      <RunForm label="Context and targets" onRun={run}>
        <TextArea
          label="Context"
          value={state.context}
          onChange={(context) => setState({ context })}
          rows={2}
        />
        <Lines label="Target" lines={state.targets} fresh=" " onChange={(targets) => setState({ targets })} />
        <Examples
          examples={EXAMPLES}
          onChoose={(chosen) => setState({ space: "as_given", boundary: "joint", ...chosen })}
        />
        <div class="row">
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
        </div>
        <div class="actions">
          <RunButton task={task} onRun={run} label="Compare" disabled={!canRun} />
        </div>
      </RunForm>
      }
      below={
        request && (
          <CopyAs
            asked={{ endpoint: "logprob", body: JSON.parse(JSON.stringify(request)) as JsonObject }}
          />
        )
      }
    >
      <ErrorNote error={task.error} />
      {result && <Outcome result={result} />}
    </Panes>
  );
}

function Outcome({ result: shown }: Pick<OutcomeProps<State, Shown>, "result">) {
  const { answer } = shown;
  const item = answer.results[0];
  const scale = useMemo(() => {
    const all = item?.targets.flatMap((target) => target.logprobs ?? []) ?? [];
    const top = all.reduce<number>((most, value) => Math.max(most, -(value ?? 0)), 0);
    const end = Math.min(10, Math.max(4, Math.ceil(top)));
    return { ...linearScale("Surprisal, nats", end, tick), isClipped: top > end };
  }, [item]);
  if (item === undefined) return null;
  return (
    <section class="result sheet" aria-label="Result">
      <div class="choices-head">
        <h2>Shares of these targets</h2>
        <Legend scale={scale} />
      </div>
      <ol class="choices">
        {item.targets.map((target, at) => (
          <Choice
            key={at}
            target={target}
            share={item.choice_probs[at] ?? null}
            isBest={at === item.best}
            shown={shown}
            scale={scale}
          />
        ))}
      </ol>
    </section>
  );
}

interface ChoiceProps {
  target: Schemas["ScoredTarget"];
  /** Its part of the probability of all targets together. */
  share: number | null;
  isBest: boolean;
  shown: Shown;
  scale: Scale;
}

function Choice({ target, share, isBest, shown, scale }: ChoiceProps) {
  const variants = target.variants;
  return (
    <li class={`choice ${isBest ? "is-strong" : ""}`}>
      <div class="bar-track" aria-hidden="true">
        <span class="bar-fill" style={{ width: `${100 * (share ?? 0)}%` }} />
      </div>
      <span class="choice-share num">
        <span class="off-screen">Share: </span>
        {percent(share)}
      </span>
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

interface ScoreProps {
  name?: string;
  target: Schemas["TargetScore"];
  shown: Shown;
  scale: Scale;
}

/** Tokens of the context that are shown in front of the boundary; characters, where they merge. */
const SHOWN_TOKENS = 4;
const SHOWN_CHARACTERS = 28;

/** What stands in front of the first scored token: the context's last tokens, or the joint text. */
function readPrefix(target: Schemas["TargetScore"], { text, context }: Shown, start: number): string[] {
  if (target.boundary === "exact" && start === 0) {
    const last = context.slice(-SHOWN_TOKENS);
    return last.length < context.length ? ["…", ...last] : last;
  }
  const joint = (text + target.target).slice(0, text.length + start);
  const last = joint.slice(-SHOWN_CHARACTERS);
  return last.length < joint.length ? ["…", last] : [last];
}

function Score({ name, target, shown, scale }: ScoreProps) {
  const tokens = target.tokens ?? [];
  const surprisals = useMemo(
    () => (target.logprobs ?? []).map((value) => (value === null ? null : -value)),
    [target],
  );
  const isMerged = target.boundary === "merged";
  const start = target.offsets?.[0]?.[0] ?? 0;
  return (
    <div class="score">
      {name && <h3>{name}</h3>}
      <div class="joint">
        <span class="joint-context">
          {readPrefix(target, shown, start).map((token, at) => (
            <span key={at}>{token}</span>
          ))}
        </span>
        <span class={`boundary ${isMerged ? "is-merged" : ""}`} aria-hidden="true" />
        <TokenText
          label={`Tokens of ${target.target}`}
          tokens={tokens}
          values={surprisals}
          scale={scale}
          noLegend
          describe={(index) => (
            <TokenCard
              token={tokens[index] ?? ""}
              id={target.token_ids?.[index]}
              logprob={target.logprobs?.[index]}
              rank={target.ranks?.[index]}
              alternatives={target.top?.tokens[index]?.map((token, at) => ({
                token,
                logprob: target.top?.logprobs[index]?.[at] ?? null,
                isTaken: target.top?.token_ids[index]?.[at] === target.token_ids?.[index],
              }))}
            />
          )}
        />
      </div>
      <p class="hint num">
        {fixed(target.logprob, 3)} nats · probability {percent(target.prob)} ·{" "}
        {plural(target.num_tokens, "token")} · perplexity {number(target.perplexity)}
        {target.is_greedy && " · what greedy decoding says"}
        {(target.truncated_tokens ?? 0) > 0 && ` · ${target.truncated_tokens} tokens of context dropped`}
      </p>
      {isMerged && (
        <p class="note">
          Merged boundary: context and target together are cut into other tokens than the context
          alone
          {start > 0 && (
            <>
              , and the target's first {plural(start, "character")} went to the context's side
            </>
          )}
          {start < 0 && (
            <>, and the context's last {plural(-start, "character")} went to the target's</>
          )}
          . Cut each alone to keep them apart.
        </p>
      )}
    </div>
  );
}

export const choices = view<State, Shown>({
  id: "choices",
  title: "Choices",
  icon: "choices",
  lead: "Which of these continues the context best?",
  initial: INITIAL,
  component: ChoicesView,
  outcome: Outcome,
});

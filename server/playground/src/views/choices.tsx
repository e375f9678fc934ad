import "./choices.css";
import { useMemo, useState } from "preact/hooks";
import { call, type Schemas } from "../lib/api";
import { fixed, number, percent, plural } from "../lib/format";
import { linearScale } from "../lib/scales";
import type { JsonObject } from "../lib/snippets";
import { useAutoRun, useTask } from "../lib/task";
import { view, type ViewProps } from "../lib/view";
import { ErrorNote, RunButton, RunForm } from "../parts/controls";
import { CopyAs } from "../parts/CopyAs";
import { Examples, type Example } from "../parts/Examples";
import { Field, Segments, TextArea } from "../parts/fields";
import { Icon } from "../parts/Icon";
import { Legend } from "../parts/Legend";
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
    label: "A capital",
    state: {
      context: "The capital of France is",
      targets: [" Paris", " London", " Berlin", " Rome"],
    },
  },
  {
    label: "A mood",
    state: {
      context: "Once upon a time there was a little boy named Tom. The rain was falling. He felt",
      targets: [" happy and glad.", " sad and lonely."],
    },
  },
  {
    label: "With and without a space",
    state: {
      context: "The chemical symbol of gold is",
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
  /** The context's own tokens. */
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

function ChoicesView({ state, setState, model }: ViewProps<State>) {
  const task = useTask();
  const [shown, setShown] = useState<Shown | null>(null);
  const request = model && toRequest(state, model.id);
  const canRun = model?.state === "ready" && state.targets.some((target) => target !== "");
  const run = (): void => {
    if (request === null || !canRun) return;
    task.run(async (signal) => {
      const [answer, cut] = await Promise.all([
        call("post", "/logprob", request, { signal }),
        call("post", "/tokenize", { model: request.model, texts: [state.context] }, { signal }),
      ]);
      setShown({ answer, context: cut.results[0]?.tokens ?? [] });
    });
  };
  useAutoRun(canRun ? JSON.stringify(request) : null, run);
  return (
    <>
      <RunForm label="Context and targets" onRun={run}>
        <TextArea
          label="Context"
          value={state.context}
          onChange={(context) => setState({ context })}
          rows={2}
        />
        <Targets targets={state.targets} onChange={(targets) => setState({ targets })} />
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
      <ErrorNote error={task.error} />
      {shown && <Result shown={shown} />}
      {request && (
        <CopyAs
          asked={{ endpoint: "logprob", body: JSON.parse(JSON.stringify(request)) as JsonObject }}
        />
      )}
    </>
  );
}

interface TargetsProps {
  targets: string[];
  onChange: (targets: string[]) => void;
}

/** The targets, a line each; pasted lines become targets of their own. */
function Targets({ targets, onChange }: TargetsProps) {
  const replace = (at: number, ...next: string[]): void =>
    onChange([...targets.slice(0, at), ...next, ...targets.slice(at + 1)]);
  return (
    <fieldset class="targets">
      <legend>Targets</legend>
      <ul>
        {targets.map((target, at) => (
          <li key={at}>
            <Field label={`Target ${at + 1}`}>
              {(ids) => (
                <span class="target-input">
                  {target.startsWith(" ") && (
                    <span class="target-space" aria-hidden="true" title="It begins with a space">
                      ␣
                    </span>
                  )}
                  <input
                    {...ids}
                    type="text"
                    spellcheck={false}
                    autocomplete="off"
                    value={target}
                    onInput={(event) => replace(at, event.currentTarget.value)}
                    onPaste={(event) => {
                      const lines = event.clipboardData?.getData("text/plain").split(/\r?\n/) ?? [];
                      if (lines.length < 2) return;
                      event.preventDefault();
                      replace(at, ...lines.filter((line) => line !== ""));
                    }}
                  />
                </span>
              )}
            </Field>
            <button
              type="button"
              class="icon-button"
              aria-label={`Remove target ${at + 1}`}
              disabled={targets.length === 1}
              onClick={() => replace(at)}
            >
              <Icon name="close" />
            </button>
          </li>
        ))}
        <li>
          <button type="button" class="quiet" onClick={() => onChange([...targets, " "])}>
            <Icon name="plus" /> Add a target
          </button>
        </li>
      </ul>
    </fieldset>
  );
}

function Result({ shown: { answer, context } }: { shown: Shown }) {
  const item = answer.results[0];
  const scale = useMemo(() => {
    const all = item?.targets.flatMap((target) => target.logprobs ?? []) ?? [];
    const top = Math.max(4, ...all.map((value) => Math.ceil(-(value ?? 0))));
    return linearScale("Surprisal, nats", Math.min(10, top), (value) =>
      value === 10 && top > 10 ? "10+" : String(value),
    );
  }, [item]);
  if (item === undefined) return null;
  return (
    <section class="result" aria-label="Result">
      <Legend scale={scale} />
      <ol class="choices">
        {item.targets.map((target, at) => (
          <Choice
            key={at}
            target={target}
            share={item.choice_probs[at] ?? null}
            isBest={at === item.best}
            context={context}
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
  context: string[];
  scale: ReturnType<typeof linearScale>;
}

function Choice({ target, share, isBest, context, scale }: ChoiceProps) {
  const variants = target.variants;
  return (
    <li class={`choice sheet ${isBest ? "is-strong" : ""}`}>
      <div class="choice-head">
        <h2>{target.target.trim() || "(white space)"}</h2>
        <span class="choice-share num">{percent(share)}</span>
      </div>
      <div class="bar-track" aria-hidden="true">
        <span class="bar-fill" style={{ width: `${100 * (share ?? 0)}%` }} />
      </div>
      {variants ? (
        <>
          <Score name="With a space" target={variants.with_space} context={context} scale={scale} />
          <Score name="Without" target={variants.without_space} context={context} scale={scale} />
          <p class="hint num">
            Either way: {fixed(target.logprob_any_space, 3)} nats,{" "}
            {percent(Math.exp(target.logprob_any_space ?? -Infinity))}
          </p>
        </>
      ) : (
        <Score target={target} context={context} scale={scale} />
      )}
    </li>
  );
}

interface ScoreProps {
  name?: string;
  target: Schemas["TargetScore"];
  context: string[];
  scale: ReturnType<typeof linearScale>;
}

/** Tokens of the context that are shown in front of the boundary. */
const SHOWN_CONTEXT = 6;

function Score({ name, target, context, scale }: ScoreProps) {
  const isMerged = target.boundary === "merged";
  const tokens = target.tokens ?? [];
  const surprisals = useMemo(
    () => (target.logprobs ?? []).map((value) => (value === null ? null : -value)),
    [target],
  );
  return (
    <div class="score">
      {name && <h3>{name}</h3>}
      <div class="joint">
        <span class="joint-context" aria-label="End of the context">
          {context.length > SHOWN_CONTEXT && "…"}
          {context.slice(-SHOWN_CONTEXT).map((token, at) => (
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
          Merged boundary: context and target together are cut elsewhere than the context alone, so
          a token of the target holds the context's end, too.
        </p>
      )}
    </div>
  );
}

export const choices = view<State>({
  id: "choices",
  title: "Choices",
  icon: "choices",
  lead: "Which of these continues the context best?",
  initial: INITIAL,
  component: ChoicesView,
});

// The tokens of a target after the end of its context, and its sums.
import { useMemo } from "preact/hooks";
import type { Schemas } from "../../lib/api";
import { fixed, number, percent, plural } from "../../lib/format";
import type { Scale } from "../../lib/scales";
import { TokenCard } from "../../parts/TokenCard";
import { TokenText } from "../../parts/TokenText";

interface ScoreProps {
  name?: string;
  target: Schemas["TargetScore"];
  /** The context, and its own tokens where they are known. */
  shown: { text: string; context: string[] };
  scale: Scale;
}

/** Tokens of the context that are shown before the boundary; characters, where they merge. */
const SHOWN_TOKENS = 4;
const SHOWN_CHARACTERS = 28;

/** What is before the first scored token: the context's last tokens, or the joint text. */
function readPrefix(target: Schemas["TargetScore"], { text, context }: ScoreProps["shown"], start: number): string[] {
  if (target.boundary === "exact" && start === 0 && context.length > 0) {
    const last = context.slice(-SHOWN_TOKENS);
    return last.length < context.length ? ["…", ...last] : last;
  }
  const joint = (text + target.target).slice(0, text.length + start);
  const last = joint.slice(-SHOWN_CHARACTERS);
  return last.length < joint.length ? ["…", last] : [last];
}

export function Score({ name, target, shown, scale }: ScoreProps) {
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
              alternatives={target.top?.tokens?.[index]?.map((token, at) => ({
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

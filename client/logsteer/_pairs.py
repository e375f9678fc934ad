"""Every prompt with every target: items that ask for it, records that tell the answer."""

import math
from collections.abc import Sequence
from typing import Any

from logsteer.errors import AnswerError
from logsteer.schemas import ItemScore, LogprobAnswer
from logsteer.schemas.common import TableViews
from logsteer.schemas.logprob import BoundaryFinding, ScoredTarget, TargetScore


class LogProb(dict[str, Any]):
    """The score of one target after one prompt: a dictionary whose keys are attributes, too.

    `r["log_prob"]` and `r.log_prob` are the same; json and pandas take it as the dictionary that it
    is, and a script may add keys. Log-probabilities are in nats, summed over the target's tokens.
    """

    prompt: str
    """The prompt as given."""
    target: str
    """The target as given."""
    sequence: str
    """The text that was scored: `target`, or the same with or without one leading space."""
    log_prob: float | None
    """log p(sequence | prompt); None where it is not finite."""
    prob: float | None
    """exp(log_prob)."""
    perplexity: float | None
    """exp(-log_prob): of the whole sequence, infinite where float64 cannot hold it."""
    token_perplexity: float | None
    """exp(-log_prob / num_tokens), which `perplexity` is everywhere else."""
    num_tokens: int
    """Tokens of the sequence."""
    boundary: BoundaryFinding
    """`merged` where the prompt's end and the sequence share a token, `no_context` where nothing
    precedes the sequence, not even BOS: its first token is not scored.
    """
    log_prob_any_space: float | None
    """With `space="best"`, log p of the target with or without a leading space; else None."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"a record has no {name}, only {', '.join(self)}")
        return self[name]


class LogProbs(list[LogProb], TableViews):
    """The records of `get_log_prob`: the list that it is, which notebooks show as a table."""


def pair_items(prompts: Sequence[str], targets: Sequence[str]) -> list[dict[str, object]]:
    """Return one item per prompt, each with every target."""
    return [{"context": prompt, "targets": list(targets)} for prompt in prompts]


def pair_scores(answer: LogprobAnswer, num_prompts: int, num_targets: int) -> list[ItemScore]:
    """Return the results of an answer; AnswerError where it has not one score per pair."""
    sizes = [len(result.targets) for result in answer.results]
    if sizes != [num_targets] * num_prompts:
        raise AnswerError(
            f"asked for {num_prompts} x {num_targets} scores, got {sizes} per context: "
            "a fault of the server",
            request_id=answer.id,
        )
    return answer.results


def pair_records(prompts: Sequence[str], targets: Sequence[str], answer: LogprobAnswer) -> LogProbs:
    """Return a record of each pair, prompt by prompt: all targets of the first, then of the second.

    A target with variants has two: with one leading space, then without.
    Raises AnswerError where the answer has not one score per pair.
    """
    results = pair_scores(answer, len(prompts), len(targets))
    return LogProbs(
        LogProb(
            prompt=prompt,
            target=target,
            sequence=sequence,
            log_prob=score.logprob,
            prob=score.prob,
            num_tokens=score.num_tokens,
            perplexity=_exponential(score.logprob),
            token_perplexity=score.perplexity,
            boundary=score.boundary,
            log_prob_any_space=getattr(score, "logprob_any_space", None),
        )
        for prompt, result in zip(prompts, results, strict=True)
        for target, found in zip(targets, result.targets, strict=True)
        for sequence, score in _variants(target, found)
    )


def _variants(target: str, score: ScoredTarget) -> list[tuple[str, TargetScore]]:
    """Return the texts that were scored for a target, each with its score."""
    if score.variants is None:
        return [(score.sequence or target, score)]
    both = (score.variants.with_space, score.variants.without_space)
    return [(variant.target, variant) for variant in both]


def _exponential(log_prob: float | None) -> float | None:
    """Return exp(-log_prob), infinite where it overflows; None for None."""
    if log_prob is None:
        return None
    try:
        return math.exp(-log_prob)
    except OverflowError:
        return math.inf

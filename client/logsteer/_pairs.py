"""Every prompt with every target: items that ask for it, records that tell the answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from logsteer.errors import AnswerError
from logsteer.schemas import ItemScore, LogprobAnswer


@dataclass(frozen=True, slots=True)
class LogProb:
    """The score of one target after one prompt.

    `log_prob` is in nats, summed over the target's tokens; `perplexity` is
    exp(-log_prob / num_tokens). Each of the three numbers is None where it is not finite.
    """

    prompt: str
    target: str
    sequence: str
    log_prob: float | None
    prob: float | None
    perplexity: float | None
    num_tokens: int


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


def pair_records(
    prompts: Sequence[str], targets: Sequence[str], answer: LogprobAnswer
) -> list[LogProb]:
    """Return one record per pair, prompt by prompt: all targets of the first, then of the second.

    Raises AnswerError where the answer has not one score per pair.
    """
    results = pair_scores(answer, len(prompts), len(targets))
    return [
        LogProb(
            prompt=prompt,
            target=target,
            sequence=prompt + target,
            log_prob=score.logprob,
            prob=score.prob,
            perplexity=score.perplexity,
            num_tokens=score.num_tokens,
        )
        for prompt, result in zip(prompts, results, strict=True)
        for target, score in zip(targets, result.targets, strict=True)
    ]

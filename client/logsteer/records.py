"""Records that the client makes from answers."""

from dataclasses import dataclass


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

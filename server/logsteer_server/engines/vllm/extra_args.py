"""Arguments of a request for vLLM's workers, in `SamplingParams.extra_args`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from logsteer_server.contract.jobs import GenerateJob, Job, ScoreJob
from logsteer_server.engines.readings import ReadRequest
from logsteer_server.numerics.rows import RowSpec

SCORE = "logsteer_score"
"""The rows to score, and the values to compute from each: a `RowRequest`."""
STEER = "logsteer_steer"
"""Slots with the positions that each steers, and the prompt's length."""
PLAN_NAMESPACE = "logsteer_plan"
"""The first token whose keys and values depend on the plan, and the plan's name in block hashes."""
READ = "logsteer_read"
"""The slot of the request's probes, and a `ReadRequest`."""
CAPTURE = "logsteer_capture"
"""The activations to capture, and the rows to store them in: a `CaptureWish`."""
DRAW = "logsteer_draw"
"""How to sample: a `RowSpec` with the policy and the values to compute for each token; a seed; for
a policy with adjustments, the prompt; the most tokens to generate."""


@dataclass(frozen=True, slots=True, eq=False)
class RowRequest:
    """The scoring of one request: the targets of its rows, and the values to compute.

    `alternatives`: further tokens to score in each row [R, K]. `prompt`: the tokens before the
    targets, for a policy with adjustments. The other fields are those of a `ScoreJob`.
    """

    targets: np.ndarray
    alternatives: np.ndarray
    shares_row: bool
    first_row: int
    spec: RowSpec
    prompt: np.ndarray
    export: str | None
    reference: str | None
    exchange: str
    step_tokens: int | None

    def find_rows(self, begin: int, end: int, prompt_len: int) -> tuple[int, np.ndarray]:
        """Return the rows in positions [begin, end): the index of the first, and all positions.

        The 3 targets of a prompt of 8 tokens have rows 0, 1, 2 at positions 5, 6, 7. So [4, 7) has
        the rows at 5 and 6, from index 0; [7, 8) has the row at 7, index 2. Targets that share a
        row have their R rows all at position 7.
        """
        if self.shares_row:
            count = len(self.targets) if end == prompt_len else 0
            return 0, np.full(count, prompt_len - 1)
        first_row = prompt_len - len(self.targets)
        first = max(begin, first_row)
        return first - first_row, np.arange(first, max(first, end))


def describe_rows(job: ScoreJob, spec: RowSpec) -> dict[str, Any]:
    """Return the extra arguments of a score request."""
    count = len(job.targets)
    return {
        SCORE: RowRequest(
            job.targets,
            np.zeros((count, 0), np.int32) if job.alternatives is None else job.alternatives,
            job.shares_row,
            job.first_row,
            spec,
            job.tokens[: job.prompt_len if spec.policy.adjustments else 0],
            job.export,
            job.reference,
            job.exchange,
            job.step_tokens,
        )
    }


def describe_draw(job: GenerateJob, spec: RowSpec) -> dict[str, Any]:
    """Return the extra arguments of a request that generates; `spec` is its `spec_of_draw`."""
    prompt = job.tokens.tobytes() if spec.policy.adjustments else b""
    return {DRAW: (spec, job.seed % 2**64, prompt, job.max_tokens)}


def describe_steering(job: Job, slots: Sequence[int]) -> dict[str, Any]:
    """Return the extra arguments of a job with a plan, given the slot of each of its parts.

    Errors: AssertionError without a plan.
    """
    assert job.plan is not None
    plan, args = job.plan, dict[str, Any]()
    if plan.sites:
        positions = [part.positions for part in plan.parts]
        args[STEER] = (tuple(zip(slots, positions, strict=True)), job.prompt_len)
        args[PLAN_NAMESPACE] = job.plan_namespace
    if plan.probes:
        args[READ] = (slots[0], ReadRequest.of(plan, job.prompt_len))
    return args


def find_first_needed(extra_args: dict[str, Any]) -> int | None:
    """Return the position of the first token to score or capture, or None.

    Tokens before it may come from the prefix cache.
    """
    needed = [extra_args[SCORE].first_row] if SCORE in extra_args else []
    if CAPTURE in extra_args:
        needed.append(int(extra_args[CAPTURE].places[0]))
    return min(needed, default=None)

"""Arguments of a request for vLLM's workers, in `SamplingParams.extra_args`."""

from collections.abc import Sequence
from typing import Any

from logsteer_server.contract.jobs import GenerateJob, Job, ScoreJob
from logsteer_server.engines.readings import ReadRequest
from logsteer_server.numerics.rows import RowSpec

SCORE = "logsteer_score"
"""The rows to score, and the values to compute from each: `describe_rows`."""
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


def describe_rows(job: ScoreJob, spec: RowSpec) -> dict[str, Any]:
    """Return the extra arguments of a score request."""
    return {
        SCORE: {
            "targets": job.targets.tobytes(),
            "alternatives": b"" if job.alternatives is None else job.alternatives.tobytes(),
            "shares_row": job.shares_row,
            "first_row": job.first_row,
            "spec": spec,
            "prompt": job.tokens[: job.prompt_len].tobytes() if spec.policy.adjustments else b"",
            "export": job.export,
            "reference": job.reference,
            "exchange": job.exchange,
            "step_tokens": job.step_tokens,
        }
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
    needed = [extra_args[SCORE]["first_row"]] if SCORE in extra_args else []
    if CAPTURE in extra_args:
        needed.append(int(extra_args[CAPTURE].places[0]))
    return min(needed, default=None)

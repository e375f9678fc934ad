"""What a request tells vLLM's workers, in `SamplingParams.extra_args`."""

from collections.abc import Sequence
from typing import Any

from logsteer_server.contract.jobs import GenerateJob, Job, ScoreJob
from logsteer_server.engines.readings import ReadRequest
from logsteer_server.numerics.rows import RowSpec

SCORE = "logsteer_score"
"""Which rows a request wants, and what is read from them."""
STEER = "logsteer_steer"
"""How a request is steered: slots, each with its positions; the length of its prompt."""
PLAN_NAMESPACE = "logsteer_plan"
"""From where on a request's keys and values are those of its plan, and what names that plan."""
READ = "logsteer_read"
"""What a request's probes read: slot, `ReadRequest`."""
CAPTURE = "logsteer_capture"
"""Which activations of a request are captured, and in which rows: a `CaptureWish`."""
DRAW = "logsteer_draw"
"""What a request's tokens are drawn by: a `RowSpec`, with what is read with them; a seed; for a
policy with adjustments the prompt, and how many tokens may follow it."""


def describe_rows(job: ScoreJob, spec: RowSpec) -> dict[str, Any]:
    """Return the extra arguments of a request that is scored."""
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
    """Return the extra arguments of a request that is steered or read, each part by its slot.

    Errors: AssertionError without a plan.
    """
    assert job.plan is not None
    plan, found = job.plan, dict[str, Any]()
    if plan.sites:
        where = [part.positions for part in plan.parts]
        found[STEER] = (tuple(zip(slots, where, strict=True)), job.prompt_len)
        found[PLAN_NAMESPACE] = job.plan_namespace
    if plan.probes:
        found[READ] = (slots[0], ReadRequest.of(plan, job.prompt_len))
    return found


def find_first_needed(extra_args: dict[str, Any]) -> int | None:
    """Return the first token that has to be computed, so that the prefix cache may have those
    before it: that of the first row, or the first one captured. None where all may come from there.
    """
    needed = [extra_args[SCORE]["first_row"]] if SCORE in extra_args else []
    if CAPTURE in extra_args:
        needed.append(int(extra_args[CAPTURE].places[0]))
    return min(needed, default=None)

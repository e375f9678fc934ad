"""Steered jobs, and the proof of what was done to them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from logsteer.errors import api_error
from logsteer_server.engines.base import (
    GenerateJob,
    GenerateOutput,
    GradientJob,
    GradientOutput,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.steering.resolve import ResolvedSteering

J = TypeVar("J", ScoreJob, GenerateJob, GradientJob)
AnyJob = ScoreJob | GenerateJob | GradientJob


def steer_jobs(jobs: Sequence[J], steering: ResolvedSteering | None) -> list[J]:
    """The jobs under a steering object, or as they are under none.

    Errors: APIError `invalid_request` where no token of any job would be steered.
    """
    if steering is None:
        return list(jobs)
    check_reach(steering, jobs)
    return [replace(job, plan=steering.plan) for job in jobs]


def check_reach(steering: ResolvedSteering, jobs: Sequence[AnyJob]) -> None:
    """Errors: APIError `invalid_request` where no token of any job would be steered."""
    where = steering.plan.positions
    reached = any(where.count(_count_read(job), job.prompt_len) for job in jobs)
    if jobs and not reached:
        raise api_error(
            "invalid_request",
            f"steering reaches no token: positions {where.kind} selects none of the tokens that "
            "the model reads here (the last token is only predicted). Choose other positions.",
            param="steering.positions",
        )


def _count_read(job: AnyJob) -> int:
    """Tokens that the model reads: the last one that is generated is not among them."""
    return len(job.tokens) + (job.max_tokens - 1 if isinstance(job, GenerateJob) else 0)


def write_receipt(
    steering: ResolvedSteering,
    outputs: Sequence[ScoreOutput | GenerateOutput | GradientOutput],
) -> dict[str, Any]:
    """The fields of `SteeringReceipt` for the (last) outputs of a request's steered jobs.

    Errors: APIError `internal` where vectors were to be added and no activation changed.
    """
    found = [output.trace for output in outputs if output.trace is not None]
    layers: dict[str, dict[str, Any]] = {}
    for site in steering.plan.sites:
        measured = [trace.sites.get(site.name, (0, 0.0)) for trace in found]
        tokens = sum(count for count, _ in measured)
        total = sum(count * mean for count, mean in measured)
        layers[site.name] = {"tokens": tokens, "relative_norm": total / tokens if tokens else None}
    steered = sum(trace.tokens for trace in found)
    adds = any(site.offset is not None and site.offset.any() for site in steering.plan.sites)
    changed = any(layer["tokens"] for layer in layers.values())
    if adds and not changed and not any(output.cached_tokens for output in outputs):
        detail = "The engine did not apply the steering; report this model and engine as a bug."
        raise api_error("internal", detail)
    return {"tokens_steered": steered, "layers": layers, "vectors": steering.vectors}

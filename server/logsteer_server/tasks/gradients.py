"""`/gradient`: a request's targets as gradient jobs, and the jobs' outputs as results."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import GradientRequest, GradientVariable, LogprobRequest
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import GradientJob, GradientOutput
from logsteer_server.contract.parameters import Direction
from logsteer_server.contract.plan import Positions
from logsteer_server.tasks.targets import PlannedTarget, plan_targets
from logsteer_server.text.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """A job for each target, and the indices of each item's."""

    request: GradientRequest
    planned: list[PlannedTarget]
    items: list[list[int]]
    jobs: list[GradientJob]


def plan_gradients(
    request: GradientRequest,
    along: Direction | None,
    codec: TextCodec,
    info: EngineInfo,
    max_numbers: int,
) -> GradientPlan:
    """The jobs of a request; `along` is the direction that it derives along.

    Errors: those of `plan_targets`, and APIError `payload_too_large` where the gradients would be
    more than `max_numbers`, `invalid_request` where they would be none.
    """
    body = LogprobRequest(
        items=request.items,
        bos=request.bos,
        on_overflow=request.on_overflow,
        boundary=request.boundary,
        columns=["logprob"],
    )
    found = plan_targets(body, codec, info)
    jobs = [_make_job(target, request.wrt, along) for target in found.planned]
    if along is None:
        jobs = _bound_width(jobs, max_numbers)
    return GradientPlan(request, found.planned, [item.targets for item in found.items], jobs)


def _make_job(target: PlannedTarget, wrt: GradientVariable, along: Direction | None) -> GradientJob:
    sequence = [*target.cut.context_ids, *target.cut.target_ids][target.truncated :]
    tokens = np.array(sequence[:-1], dtype=np.int32)
    targets = np.array(target.cut.target_ids, dtype=np.int32)
    if along is not None:
        return GradientJob(tokens, targets, along=along)
    where = (
        Positions(wrt.positions)
        if isinstance(wrt.positions, str)
        else Positions("slices", tuple(wrt.positions.slices))
    )
    return GradientJob(
        tokens, targets, tuple((layer, wrt.hook) for layer in wrt.layers or []), where
    )


def _bound_width(jobs: Sequence[GradientJob], max_numbers: int) -> list[GradientJob]:
    """The jobs with the width that each activation may have, for all of them to fit."""
    rows = sum(len(_positions(job)) * len(job.sites) for job in jobs)
    if not rows:
        raise api_error(
            "invalid_request",
            f"wrt.positions {jobs[0].positions.kind} selects none of the tokens that the model "
            "reads here (the last token is only predicted). Choose other positions.",
            param="wrt.positions",
        )
    width = max_numbers // rows
    if not width:
        detail = (
            f"The gradients would have {rows} rows, and at most {max_numbers} numbers are given: "
            "name fewer layers, positions or targets, or raise max_gradient_numbers."
        )
        raise api_error("payload_too_large", detail, param="wrt")
    return [
        GradientJob(job.tokens, job.targets, job.sites, job.positions, max_width=width)
        for job in jobs
    ]


def _positions(job: GradientJob) -> list[int]:
    mask_T = job.positions.mask(0, len(job.tokens), job.prompt_len)
    found: list[int] = np.flatnonzero(mask_T).tolist()
    return found


def assemble_gradients(
    plan: GradientPlan, outputs: Sequence[GradientOutput]
) -> list[dict[str, Any]]:
    """The `results` of the answer, in the shape of `ItemGradients`, with numpy arrays."""
    return [
        {"targets": [_describe(plan.planned[i], plan.jobs[i], outputs[i]) for i in targets]}
        for targets in plan.items
    ]


def _describe(target: PlannedTarget, job: GradientJob, output: GradientOutput) -> dict[str, Any]:
    total = float(output.logprobs.sum(dtype=np.float64))
    found: dict[str, Any] = {
        "target": target.text,
        "token_ids": target.cut.target_ids,
        "logprobs": output.logprobs,
        "logprob": total if math.isfinite(total) else None,
        "num_context": job.prompt_len,
        "boundary": target.cut.finding,
        "truncated_tokens": target.truncated,
    }
    numbers = [output.logprobs, *output.gradients]
    if output.directional is not None:
        numbers.append(output.directional)
        slope = float(output.directional.sum(dtype=np.float64))
        found["directional"] = slope if math.isfinite(slope) else None
        found["directional_per_token"] = output.directional
    else:
        by_layer = dict(zip((str(layer) for layer, _ in job.sites), output.gradients, strict=True))
        found["positions"] = _positions(job)
        found["gradients"] = by_layer
        found["norms"] = {
            layer: np.linalg.norm(rows.astype(np.float64), axis=-1)
            for layer, rows in by_layer.items()
        }
    finite = all(np.isfinite(array).all() for array in numbers)
    return found | {"flags": [] if finite else ["non_finite"]}

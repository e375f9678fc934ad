"""`/gradient`: derivatives of targets' log-probabilities, by activation or along a direction."""

import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logsteer.errors import api_error
from logsteer.schemas import GradientRequest
from logsteer_server.contract.gradients import GradientJob, GradientOutput, InputPoint
from logsteer_server.contract.jobs import Ids
from logsteer_server.contract.plan import Direction, Positions
from logsteer_server.interventions.interventions import Interventions
from logsteer_server.interventions.references import (
    ResolvedOverride,
    check_feature,
    resolve_direction,
)
from logsteer_server.interventions.steering import place_positions
from logsteer_server.settings import Settings
from logsteer_server.tasks.planning import ItemProblems, Planner
from logsteer_server.tasks.run import Batch, BodyTask, Collector
from logsteer_server.tasks.targets import (
    PlannedTarget,
    TargetPlan,
    check_items,
    describe_rows,
    find_longest,
    plan_targets,
)
from logsteer_server.text.tokenizer import TextCodec

MAX_NUMBERS = 2**22
"""Most numbers in the gradients of one request: some 50 MB of JSON. For more, send other layers or
targets in another request."""


def plan_gradients(
    targets: TargetPlan,
    sites: tuple[tuple[int, str], ...],
    positions: Positions,
    along: Direction | None,
    width: int,
    max_numbers: int,
) -> list[GradientJob]:
    """Plan a job for each target: along a direction, or for the activations at the sites, which
    have `width` numbers a token.

    Errors: APIError `payload_too_large` for gradients of more than `max_numbers`, `invalid_request`
    for none.
    """
    if along is not None:
        return [GradientJob(*each, along=along) for each in _lay_out(targets)]
    jobs = [GradientJob(*each, sites, positions) for each in _lay_out(targets)]
    _check_size(jobs, width, max_numbers)
    return jobs


@dataclass(frozen=True, slots=True)
class AttributionPath:
    """Points on the line from a baseline to the input, which is last, and their weights.

    A token's attribution is the weighted sum of its gradients times e - e'. With a `baseline`, the
    first point is the baseline itself, with weight 0.
    """

    points: tuple[InputPoint, ...]
    weights_S: npt.NDArray[np.float64]

    @classmethod
    def choose(cls, request: GradientRequest) -> "AttributionPath | None":
        """Return the requested path; None without an attribution.

        It uses Gauss-Legendre quadrature, like captum's default.
        """
        if request.attribution is None:
            return None
        if request.attribution == "gradient_x_input":
            return cls((InputPoint(1.0),), np.ones(1))
        nodes_S, weights_S = np.polynomial.legendre.leggauss(request.steps)
        alphas = (0.0, *((nodes_S + 1) / 2).tolist(), 1.0)
        points = tuple(InputPoint(alpha, request.baseline) for alpha in alphas)
        return cls(points, np.array([0.0, *(weights_S / 2), 0.0]))

    def plan(self, targets: TargetPlan, max_numbers: int) -> list[GradientJob]:
        """Plan the jobs of each target, one per point.

        Errors: APIError `payload_too_large` if they would read more than `max_numbers` tokens.
        """
        laid = list(_lay_out(targets))
        num_tokens, steps = sum(len(tokens) for tokens, _ in laid), len(self.points)
        if num_tokens * steps > max_numbers:
            detail = (
                f"{steps} points of {num_tokens} tokens are {steps * num_tokens} to read, at most "
                f"{max_numbers} are allowed: send fewer targets, or ask for fewer steps."
            )
            raise api_error("payload_too_large", detail, param="steps")
        return [GradientJob(*each, input_point=point) for each in laid for point in self.points]

    def describe(
        self, job: GradientJob, outputs: Sequence[GradientOutput], codec: TextCodec
    ) -> dict[str, Any]:
        """Return an answer's fields of a target's attribution."""
        found_ST = np.array([output.attributions for output in outputs], np.float64)
        attributions_T = self.weights_S @ found_ST
        ids: list[int] = job.tokens.tolist()
        found: dict[str, Any] = {
            "input_ids": ids,
            "input_tokens": list(map(codec.piece, ids)),
            "attributions": attributions_T,
        }
        if len(outputs) == 1:
            return found
        start, end = (float(outputs[i].logprobs.sum(dtype=np.float64)) for i in (0, -1))
        delta = float(attributions_T.sum()) - (end - start)
        numbers = {"baseline_logprob": start, "convergence_delta": delta}
        return found | {name: n if math.isfinite(n) else None for name, n in numbers.items()}


def _lay_out(plan: TargetPlan) -> Iterator[tuple[Ids, Ids]]:
    """Yield, for each target, the tokens read and the tokens predicted."""
    for target in plan.planned:
        yield plan.jobs[target.job].tokens, np.array(target.token_ids, dtype=np.int32)


def _check_size(jobs: Sequence[GradientJob], width: int, max_numbers: int) -> None:
    """Check that there are gradients, and that all fit. Errors: APIError."""
    rows = sum(len(_positions(job)) * len(job.sites) for job in jobs)
    if not rows:
        raise api_error(
            "invalid_request",
            f"wrt.positions {jobs[0].positions.kind} selects none of the tokens that the model "
            "reads here (the last token is only predicted). Choose other positions.",
            param="wrt.positions",
        )
    if rows * width > max_numbers:
        detail = (
            f"The gradients would have {rows} rows of {width} numbers, {max_numbers} numbers are "
            "allowed in all: name fewer layers, positions or targets, or ask for parts of them."
        )
        raise api_error("payload_too_large", detail, param="wrt")


def _positions(job: GradientJob) -> list[int]:
    mask_T = job.positions.mask(0, len(job.tokens), job.prompt_len)
    found: list[int] = np.flatnonzero(mask_T).tolist()
    return found


def _describe(target: PlannedTarget, job: GradientJob, output: GradientOutput) -> dict[str, Any]:
    total = float(output.logprobs.sum(dtype=np.float64))
    found: dict[str, Any] = {
        "target": target.text,
        "token_ids": target.token_ids,
        "logprobs": output.logprobs,
        "logprob": total if math.isfinite(total) else None,
        "num_context": job.prompt_len,
        "boundary": target.finding,
        "truncated_tokens": target.truncated,
    }
    numbers = [output.logprobs, *output.gradients]
    if output.attributions is not None:
        numbers.append(output.attributions)
    elif output.directional is not None:
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


class GradientTask(BodyTask[GradientRequest]):
    """Derivatives of every target's log-probability, by activations or along an override."""

    kind = "gradient"

    _along: ResolvedOverride | None
    _path: AttributionPath | None

    def check_limits(self, settings: Settings) -> None:
        """Bound items and targets. Errors: APIError `payload_too_large`."""
        check_items(self._body.items, settings)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Differentiate all targets in one batch."""
        planner.cover_text(find_longest(self._body.items))
        problems = ItemProblems("items", self._body.on_error)
        targets, jobs = await planner.run(self._plan, planner, problems)
        collector = Collector()
        if jobs:
            yield Batch(jobs, collector.take)
        described = self._describe(targets, jobs, collector.outputs)
        results = [{"targets": [described[i] for i in item.targets]} for item in targets.items]
        self.results = problems.fill(results, self.request_id)

    def _describe(
        self, targets: TargetPlan, jobs: Sequence[GradientJob], outputs: Sequence[GradientOutput]
    ) -> list[dict[str, Any]]:
        """Return the fields of every target, which has as many jobs as the path has points."""
        steps = len(self._path.points) if self._path else 1
        described = []
        for number, target in enumerate(targets.planned):
            own = slice(number * steps, (number + 1) * steps)
            job, output = jobs[own][-1], outputs[own][-1]
            found = _describe(target, job, output)
            if self._path is not None:
                found |= self._path.describe(job, outputs[own], self.codec)
            described.append(found)
        return described

    def _plan(
        self, planner: Planner, problems: ItemProblems
    ) -> tuple[TargetPlan, Sequence[GradientJob]]:
        body, wrt, info = self._body, self._body.wrt, self.info
        self._path = AttributionPath.choose(body)
        check_feature("gradient", info, None)
        self.interventions = Interventions.resolve(body, self._stores, info, self.codec)
        self._along = resolve_direction(wrt.override if wrt else None, self._stores.overrides)
        targets = plan_targets(
            body.items, self.codec, info, body, describe_rows(), planner.cover, problems
        )
        if not targets.planned:
            return targets, ()
        if wrt is None:
            assert self._path is not None, "a request has wrt or attribution"
            plain = self._path.plan(targets, MAX_NUMBERS)
            return targets, self.interventions.apply(plain)
        sites = tuple((layer, wrt.hook) for layer in wrt.layers or [])
        direction = self._along.override.direction if self._along else None
        positions = place_positions(wrt.positions)
        width = info.hook_widths.get(wrt.hook, info.hidden_size)
        plain = plan_gradients(targets, sites, positions, direction, width, MAX_NUMBERS)
        return targets, self.interventions.apply(plain)

    def report(self) -> dict[str, Any]:
        """Return the derivatives of each item's targets, and the direction where there is one."""
        return {"results": self.results, "along": self._along.used if self._along else None}

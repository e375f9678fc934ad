"""`/sweep`: one steering object at several scales and layers, scored all at once.

Every scale of every set of layers is a plan of its own, and the engine has them in one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import LogprobRequest, Steering, SweepRequest
from logsteer.schemas.perplexity import WindowOptions
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import ScoreJob, ScoreOutput
from logsteer_server.interventions.changes import Changes, Stores
from logsteer_server.interventions.steering import resolve_steering
from logsteer_server.models.resident import Resident, WorkClock, collect
from logsteer_server.tasks.comparison import export_rows
from logsteer_server.tasks.targets import LogprobPlan, plan_targets
from logsteer_server.tasks.texts import TextWindow, cut_texts
from logsteer_server.text.sums import exp_mean, sum_usage
from logsteer_server.text.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class Setting:
    """One scale with one set of layers; no steering at scale 0, and for the unsteered point."""

    layers: list[int] | None
    scale: float
    changes: Changes


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What is scored at every setting: targets, next tokens after contexts, windows of texts."""

    settings: list[Setting]
    targets: LogprobPlan | None
    next_jobs: list[ScoreJob]
    windows: list[TextWindow]
    num_texts: int

    @property
    def jobs(self) -> list[ScoreJob]:
        """The jobs of one setting, without its steering."""
        targets = self.targets.jobs if self.targets else []
        return [*targets, *self.next_jobs, *(window.job for window in self.windows)]


def plan_sweep(
    request: SweepRequest, stores: Stores, codec: TextCodec, info: EngineInfo
) -> SweepPlan:
    """The settings of a sweep, the unsteered one first, and what is scored at each.

    Errors: those of `plan_targets`, `cut_texts`, `Changes.resolve` and `check_reach`.
    """
    unsteered = Changes.resolve(request, stores, info)
    settings = [Setting(None, 0.0, unsteered)]
    layer_sets: list[list[int] | None] = [*request.layers] if request.layers else [None]
    for layers in layer_sets:
        for scale in request.scales:
            changes = unsteered
            if scale:
                scaled = _scale(request.steering, scale, layers)
                steering = resolve_steering(scaled, stores.vectors, info)
                changes = replace(unsteered, steering=steering)
            settings.append(Setting(layers, scale, changes))
    targets = None
    next_jobs = []
    if request.items:
        body = LogprobRequest(
            items=request.items,
            boundary=request.boundary,
            bos=request.bos,
            columns=["logprob"],
            per_token=False,
        )
        targets = plan_targets(body, codec, info)
        firsts = [targets.planned[item.targets[0]].cut for item in targets.items]
        next_jobs = [
            ScoreJob(np.array(cut.context_ids, np.int32), np.array(cut.target_ids[:1], np.int32))
            for cut in firsts
        ]
    windows, _ = cut_texts(request.texts, WindowOptions(bos=request.bos), codec, info)
    plan = SweepPlan(settings, targets, next_jobs, windows, len(request.texts))
    steered = next((s for s in settings if s.changes.steering), settings[0])
    steered.changes.check_reach(plan.jobs)
    return plan


def _scale(steering: Steering, scale: float, layers: list[int] | None) -> Steering:
    """The steering object with all its scales multiplied, at these layers where any are given."""
    vectors = []
    for vector in steering.vectors:
        changes: dict[str, Any] = {"scale": vector.scale * scale}
        if layers is not None:
            changes["layers"] = layers
        vectors.append(vector.model_copy(update=changes))
    return steering.model_copy(update={"vectors": vectors})


class Sweep:
    """The scoring of one sweep.

    Errors: APIError `payload_too_large` where the unsteered distributions, which lie on disk while
    others are compared with them, would take more than `max_bytes`.
    """

    def __init__(
        self, resident: Resident, plan: SweepPlan, max_bytes: int, directory: Path | None
    ) -> None:
        _, info = resident.require()
        needed = 4 * info.vocab_size * len(plan.next_jobs)
        if needed > max_bytes:
            detail = (
                f"The unsteered next-token distributions of {len(plan.next_jobs)} items take "
                f"{needed} bytes, at most {max_bytes} are kept: split the request, or raise "
                "max_reference_bytes."
            )
            raise api_error("payload_too_large", detail, param="items")
        self._resident = resident
        self._plan = plan
        self._directory = directory
        self._outputs: list[ScoreOutput] = []
        self.clock = WorkClock()

    @property
    def changes(self) -> Changes:
        """What the unsteered point is under."""
        return self._plan.settings[0].changes

    async def run(self) -> list[dict[str, Any]]:
        """Every setting as a `SweepPoint`, the unsteered one first."""
        next_jobs = self._plan.next_jobs
        unsteered = self.changes.apply(next_jobs)
        async with export_rows(self._resident, unsteered, self._directory) as files:
            compared = {
                id(job): replace(job, reference=file, columns=("logprob", "kl"))
                for job, file in zip(next_jobs, files, strict=True)
            }
            jobs = [
                setting.changes.change(compared.get(id(job), job))
                for setting in self._plan.settings
                for job in self._plan.jobs
            ]
            self._outputs = await collect(self._resident.score(jobs, self.clock))
        return self._assemble(self._outputs)

    def _assemble(self, outputs: Sequence[ScoreOutput]) -> list[dict[str, Any]]:
        size = len(self._plan.jobs)
        unsteered = self._sum_targets(outputs[:size])
        return [
            self._write_point(setting, outputs[n * size : (n + 1) * size], unsteered)
            for n, setting in enumerate(self._plan.settings)
        ]

    def _sum_targets(self, outputs: Sequence[ScoreOutput]) -> list[float]:
        planned = self._plan.targets.planned if self._plan.targets else []
        picked = [target.pick(outputs).columns["logprob"] for target in planned]
        return [float(column.astype(np.float64).sum()) for column in picked]

    def _write_point(
        self, setting: Setting, outputs: Sequence[ScoreOutput], unsteered: Sequence[float]
    ) -> dict[str, Any]:
        own = self._sum_targets(outputs)
        first_next = len(self._plan.targets.jobs) if self._plan.targets else 0
        first_window = first_next + len(self._plan.next_jobs)
        items = []
        for n, item in enumerate(self._plan.targets.items if self._plan.targets else []):
            targets = [{"logprob": own[t], "change": own[t] - unsteered[t]} for t in item.targets]
            kl = float(outputs[first_next + n].columns["kl"][0])
            items.append({"targets": targets, "kl": kl})
        return {
            "layers": setting.layers,
            "scale": setting.scale,
            "items": items,
            "texts": self._sum_texts(outputs[first_window:]),
            "relative_norm": _average_norm(outputs),
        }

    def _sum_texts(self, outputs: Sequence[ScoreOutput]) -> list[dict[str, Any]]:
        sums, counts = [0.0] * self._plan.num_texts, [0] * self._plan.num_texts
        for window, output in zip(self._plan.windows, outputs, strict=True):
            sums[window.text] += float(output.columns["logprob"].astype(np.float64).sum())
            counts[window.text] += window.num_scored
        return [
            {"perplexity": exp_mean(-total, count), "sum_logprob": total, "num_scored": count}
            for total, count in zip(sums, counts, strict=True)
        ]

    def count_usage(self) -> dict[str, int]:
        """The fields of `Usage`, once it has run."""
        jobs = self._plan.jobs * len(self._plan.settings)
        return sum_usage(jobs, self._outputs) | {"cached_results": self.clock.cached_results}


def _average_norm(outputs: Sequence[ScoreOutput]) -> float | None:
    """The mean of |change| / |activation| over all steered tokens and sites, None for none."""
    found = [site for output in outputs if output.trace for site in output.trace.sites.values()]
    tokens = sum(count for count, _ in found)
    return sum(count * mean for count, mean in found) / tokens if tokens else None

"""`/sweep`: score one steering object at several scales and layers.

Each scale with each set of layers is a plan; the engine runs all of them in one batch.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from logsteer.schemas import LogprobItem, Steering, SweepRequest
from logsteer.schemas.perplexity import WindowOptions, exp_mean
from logsteer_server.contract.batches import ScoreOutputs
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import ScoreJob, ScoreOutput
from logsteer_server.interventions.interventions import Interventions, Stores
from logsteer_server.interventions.steering import MAX_PARTS, Decode, resolve_steering
from logsteer_server.settings import Settings
from logsteer_server.tasks.comparison import (
    compare_jobs,
    export_jobs,
    reserve_references,
)
from logsteer_server.tasks.logprob import sum_targets
from logsteer_server.tasks.perplexity import TextWindow, cut_texts
from logsteer_server.tasks.planning import Cover, Planner
from logsteer_server.tasks.run import Batch, BodyTask, Collector, check_count
from logsteer_server.tasks.targets import (
    MAX_TARGETS,
    TargetPlan,
    TargetsRequest,
    describe_rows,
    find_longest,
    plan_targets,
)
from logsteer_server.text.tokenizer import TextCodec
from logsteer_server.text.windows import fit_windows


@dataclass(frozen=True, slots=True)
class SweepSetting:
    """One scale with one set of layers; no steering at scale 0, and for the unsteered point."""

    layers: list[int] | None
    scale: float
    interventions: Interventions


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The scores of every setting: targets, next tokens after contexts, windows of texts."""

    targets: TargetPlan | None
    next_jobs: list[ScoreJob]
    windows: list[TextWindow]
    num_texts: int

    @property
    def jobs(self) -> list[ScoreJob]:
        """The jobs of one setting, without its steering."""
        targets = self.targets.jobs if self.targets else []
        return [*targets, *self.next_jobs, *(window.job for window in self.windows)]


def plan_settings(
    steering: Steering,
    scales: Sequence[float],
    layer_sets: Sequence[list[int]] | None,
    unsteered: Interventions,
    stores: Stores,
    info: EngineInfo,
    decode: Decode | None = None,
) -> Iterator[SweepSetting]:
    """Plan the settings of a sweep, the unsteered one first. Errors: as `resolve_steering`."""
    yield SweepSetting(None, 0.0, unsteered)
    sets: list[list[int] | None] = [*layer_sets] if layer_sets else [None]
    for layers in sets:
        for scale in scales:
            interventions = unsteered
            if scale:
                scaled = _scale(steering, scale, layers)
                resolved = resolve_steering(scaled, stores.vectors, info, decode)
                interventions = replace(unsteered, steering=resolved)
            yield SweepSetting(layers, scale, interventions)


def plan_sweep(
    items: Sequence[LogprobItem],
    texts: Sequence[str],
    windowing: WindowOptions,
    codec: TextCodec,
    info: EngineInfo,
    options: TargetsRequest,
    read: ScoreJob,
    cover: Cover,
) -> SweepPlan:
    """Plan the jobs of each setting; `windowing` fits the model.

    Errors: those of `plan_targets` and `cut_texts`.
    """
    targets = None
    next_jobs = []
    if items:
        targets = plan_targets(items, codec, info, options, read, cover)
        firsts = [targets.planned[item.targets[0]] for item in targets.items]
        next_jobs = [
            replace(
                read,
                tokens=targets.context(first),
                targets=np.array(first.token_ids[:1], np.int32),
            )
            for first in firsts
        ]
    windows, _ = cut_texts(texts, windowing, read, codec, info, cover)
    return SweepPlan(targets, next_jobs, windows, len(texts))


def _scale(steering: Steering, scale: float, layers: list[int] | None) -> Steering:
    """Return the steering object with its scales multiplied, and at these layers unless None.

    A recommended scale counts as 1: `scales` are then the vector's own.
    """
    vectors = []
    for vector in steering.vectors:
        changed: dict[str, Any] = {"scale": vector.choose_scale(None) * scale}
        if layers is not None:
            changed["layers"] = layers
        vectors.append(vector.model_copy(update=changed))
    return steering.model_copy(update={"vectors": vectors})


class SweepTask(BodyTask[SweepRequest]):
    """How targets and texts change with the scale of a steering object, and with its layers."""

    kind = "sweep"
    applied_fields = ("override", "adapter")

    _settings: list[SweepSetting]
    _points: list[dict[str, Any]]

    def check_limits(self, settings: Settings) -> None:
        """Bound the scores of all points together. Errors: APIError `payload_too_large`."""
        body = self._body
        points = 1 + len(body.scales) * len(body.layers or [None])
        count = points * (len(body.items) + len(body.texts))
        check_count("scales x layers x (items and texts)", count, settings.max_items)
        targets = sum(len(item.targets or item.target_ids or ()) for item in body.items)
        check_count("scales x layers x targets", points * targets, MAX_TARGETS)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Export the unsteered next-token distributions to files, then score every setting.

        Errors: APIError `payload_too_large` if the files would be too large.
        """
        body, info = self._body, self.info
        planner.cover_text(max(find_longest(body.items), *map(len, body.texts), 0))
        planner.hold_activations(self._count_numbers())
        plan = await planner.capacity.call_long(self._plan, planner)
        rows = sum(job.num_scored for job in plan.jobs)
        planner.expect_rows(rows * len(self._settings), 1)
        unsteered = await planner.run(self.interventions.apply, plan.next_jobs)
        async with reserve_references(unsteered, info.vocab_size, planner, self._scratch) as files:
            if unsteered:
                yield Batch(export_jobs(unsteered, files), purpose="reference")
            compared = compare_jobs(plan.next_jobs, files)
            each = replace(plan, next_jobs=compared).jobs
            changed = (own.interventions.change(job) for own in self._settings for job in each)
            jobs = await planner.capacity.call_long(list, changed)
            collector = Collector()
            yield Batch(jobs, collector.take, cache=self._body.cache)
        self._points = await planner.capacity.call_long(
            _assemble, self._settings, plan, collector.outputs
        )

    def _count_numbers(self) -> int:
        """Return the most numbers of all settings' vectors; each setting has its own copies."""
        body, info = self._body, self.info
        layers = sum(map(len, body.layers)) if body.layers else info.num_layers
        vectors = body.steering.vectors
        parts = MAX_PARTS if any(one.positions for one in vectors) else 1
        return len(body.scales) * layers * parts * len(vectors) * info.hidden_size

    def _plan(self, planner: Planner) -> SweepPlan:
        body, codec, info = self._body, self.codec, self.info
        self.interventions = Interventions.resolve(body, self._stores, info, codec)
        settings = plan_settings(
            body.steering,
            body.scales,
            body.layers,
            self.interventions,
            self._stores,
            info,
            codec.decode,
        )
        self._settings = []
        for setting in settings:
            planner.cover(0)
            self._settings.append(setting)
        read = describe_rows((), precision=body.precision)
        windowing = fit_windows(WindowOptions(bos=body.bos), info.context_length)
        if body.texts:
            self.windowing = windowing
        plan = plan_sweep(body.items, body.texts, windowing, codec, info, body, read, planner.cover)
        steered = [setting for setting in self._settings if setting.interventions.steering]
        if steered:
            steered[0].interventions.check_reach(plan.jobs)
        return plan

    def report(self) -> dict[str, Any]:
        """Return the unsteered point and the others, each as a `SweepPoint`."""
        unsteered, *points = self._points
        return {"unsteered": unsteered, "points": points}


def _assemble(
    settings: Sequence[SweepSetting], plan: SweepPlan, outputs: Sequence[ScoreOutput]
) -> list[dict[str, Any]]:
    """Return every setting as a `SweepPoint`, the unsteered one first."""
    size = len(plan.jobs)
    unsteered = _sum_targets(plan, outputs[:size])
    return [
        _write_point(setting, plan, outputs[n * size : (n + 1) * size], unsteered)
        for n, setting in enumerate(settings)
    ]


def _sum_targets(plan: SweepPlan, outputs: Sequence[ScoreOutput]) -> list[float]:
    if plan.targets is None:
        return []
    return sum_targets(plan.targets, ScoreOutputs.of(outputs[: len(plan.targets.jobs)]))


def _write_point(
    setting: SweepSetting,
    plan: SweepPlan,
    outputs: Sequence[ScoreOutput],
    unsteered: Sequence[float],
) -> dict[str, Any]:
    own = _sum_targets(plan, outputs)
    first_next = len(plan.targets.jobs) if plan.targets else 0
    first_window = first_next + len(plan.next_jobs)
    items = []
    planned = plan.targets.planned if plan.targets else []
    for n, item in enumerate(plan.targets.items if plan.targets else []):
        targets = [
            {
                "logprob": own[t],
                "change": own[t] - unsteered[t],
                "boundary": planned[t].finding,
                "truncated_tokens": planned[t].truncated,
            }
            for t in item.targets
        ]
        kl = float(outputs[first_next + n].columns["kl"][0])
        items.append({"targets": targets, "kl": kl})
    return {
        "layers": setting.layers,
        "scale": setting.scale,
        "items": items,
        "texts": _sum_texts(plan, outputs[first_window:]),
        "relative_norm": _average_norm(outputs),
    }


def _sum_texts(plan: SweepPlan, outputs: Sequence[ScoreOutput]) -> list[dict[str, Any]]:
    sums, counts = [0.0] * plan.num_texts, [0] * plan.num_texts
    for window, output in zip(plan.windows, outputs, strict=True):
        sums[window.text] += float(output.columns["logprob"].astype(np.float64).sum())
        counts[window.text] += window.num_scored
    return [
        {"perplexity": exp_mean(-total, count), "sum_logprob": total, "num_scored": count}
        for total, count in zip(sums, counts, strict=True)
    ]


def _average_norm(outputs: Sequence[ScoreOutput]) -> float | None:
    """Return the mean of |change| / |activation| over steered tokens and sites, or None."""
    found = [site for output in outputs if output.trace for site in output.trace.sites.values()]
    tokens = sum(count for count, _ in found)
    return sum(count * mean for count, mean in found) / tokens if tokens else None

"""`/patch`: activation patching: replace activations of one run with another's, place by place.

Each place is a job with a plan that replaces one token's activations; the engine runs all of them
in one continuous batch. At tokens before the runs differ, a patch changes nothing: it has the value
of the unpatched run, without a job. Meng et al., Locating and Editing Factual Associations in GPT
(2022), call it causal tracing.

    clean        The  capital  of  France  is   captured: layers x tokens
                                   │
    corrupted    The  capital  of  Spain   is   one job for each set of layers and token:
                                                how probable is " Paris" now?
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from operator import eq
from typing import Any

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import LogprobItem, PatchPair, PatchRequest
from logsteer_server.contract.jobs import CaptureJob, CaptureOutput, Ids, ScoreJob, ScoreOutput
from logsteer_server.contract.plan import Positions, ResidualOp, Site, SteeringPlan, Vector
from logsteer_server.interventions.interventions import Interventions, Stores
from logsteer_server.interventions.references import check_feature
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.tasks.activations import CaptureSite
from logsteer_server.tasks.comparison import compare_jobs, export_jobs, reserve_references
from logsteer_server.tasks.planning import ItemProblems, Planner
from logsteer_server.tasks.run import Batch, BodyTask, Collector, check_count
from logsteer_server.tasks.targets import (
    MAX_TARGETS,
    PlannedTarget,
    TargetPlan,
    describe_rows,
    find_longest,
    plan_targets,
)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One of a pair's runs: its context's tokens, the tokens scored after it, and the targets.

    `numbers`: the indices of the targets' jobs in the plan, in the order of `jobs`.
    """

    context: Ids
    targets: list[PlannedTarget]
    numbers: list[int]
    jobs: list[ScoreJob]

    def measure(self, metric: str, outputs: Sequence[ScoreOutput]) -> float:
        """Compute the metric from the jobs' outputs."""
        if metric == "kl":
            return float(outputs[0].columns["kl"][0])
        by_number = dict(zip(self.numbers, outputs, strict=True))
        values = [_sum_target(target, by_number[target.job]) for target in self.targets]
        return values[0] if metric == "logprob" else values[0] - values[1]


def _sum_target(target: PlannedTarget, output: ScoreOutput) -> float:
    logprobs = output.columns["logprob"].astype(np.float64)
    return float(logprobs.sum() if target.slot is None else logprobs[target.slot])


@dataclass(frozen=True, slots=True)
class PlannedPair:
    """Both runs of a pair, and the tokens of `source` that are patched into the other run."""

    runs: dict[str, PlannedRun]
    positions: list[int]
    source: list[int]

    def compare(self, file: str) -> "PlannedPair":
        """Return the pair with jobs that compare next-token distributions with the file's."""
        runs = {
            name: replace(run, jobs=compare_jobs(run.jobs, [file]))
            for name, run in self.runs.items()
        }
        return replace(self, runs=runs)

    def list_places(self) -> list[tuple[int, int, bool]]:
        """List each patched token, the token that its activations come from, and whether the patch
        has an effect: not while both runs have read the same tokens.
        """
        clean, corrupted = (run.context.tolist() for run in self.runs.values())
        num_shared = sum(takewhile(bool, map(eq, clean, corrupted)))
        return [
            (own, other, own != other or own >= num_shared)
            for own, other in zip(self.positions, self.source, strict=True)
        ]


def plan_run(plan: TargetPlan, indices: Sequence[int], metric: str, read: ScoreJob) -> PlannedRun:
    """Plan the jobs of the metric for one item, given the indices of its planned targets."""
    targets = [plan.planned[index] for index in indices[: 2 if metric == "difference" else 1]]
    context = plan.context(targets[0])
    if metric == "kl":
        after = np.array(targets[0].token_ids[:1], np.int32)
        job = replace(read, tokens=context, targets=after)
        return PlannedRun(context, targets, [0], [job])
    numbers = sorted({target.job for target in targets})
    return PlannedRun(context, targets, numbers, [plan.jobs[number] for number in numbers])


def match_positions(
    index: int, pair: PatchPair, lengths: dict[str, int], wanted: Sequence[int] | None, base: str
) -> tuple[list[int], list[int]]:
    """Return the positions to patch in run `base`, and their source positions in the other run.

    Errors: APIError `invalid_request`, which names the fault of pair `index`.
    """
    param = f"pairs[{index}]"
    clean, corrupted = lengths["clean"], lengths["corrupted"]
    if pair.align is None and clean != corrupted:
        detail = (
            f"{param}: the clean context has {clean} tokens and the corrupted one {corrupted}; say "
            "in align which tokens correspond, or give contexts of equal length."
        )
        raise api_error("invalid_request", detail, param=f"{param}.align")
    aligned = pair.align or [[n, n] for n in range(clean)]
    for own, other in aligned:
        if own >= clean or other >= corrupted:
            detail = (
                f"{param}.align has [{own}, {other}]; the contexts have {clean} and {corrupted} "
                "tokens, counted from 0."
            )
            raise api_error("invalid_request", detail, param=f"{param}.align")
    own, other = (0, 1) if base == "clean" else (1, 0)
    into = {both[own]: both[other] for both in aligned}
    for position in wanted or ():
        if position not in into:
            detail = f"{param}: position {position} is not a token of both contexts; leave it out."
            raise api_error("invalid_request", detail, param="positions")
    positions = sorted(into) if wanted is None else list(wanted)
    return positions, [into[position] for position in positions]


def replace_at(hook: str, activations: dict[int, Vector], position: int) -> SteeringPlan:
    """Return the plan that replaces one token's activations, by layer."""
    sites = []
    for layer, vector_D in sorted(activations.items()):
        norm = float(np.linalg.norm(vector_D.astype(np.float64)))
        direction_D = (vector_D.astype(np.float64) / norm).astype(np.float32) if norm else vector_D
        sites.append(Site(layer, hook, None, (ResidualOp(direction_D, base=norm, keep=0.0),)))
    return SteeringPlan(tuple(sites), Positions("slices", ((position, position + 1),)))


class PairProblems(ItemProblems):
    """Problems with the items of pairs, which alternate: clean, corrupted."""

    def name_item(self, index: int) -> str:
        """Return an item's place in the request."""
        return f"{super().name_item(index // 2)}.{'corrupted' if index % 2 else 'clean'}"


class PatchTask(BodyTask[PatchRequest]):
    """The metric of each pair under every patch: a set of layers at one token."""

    kind = "patch"
    applied_fields = ("override", "adapter")

    def __init__(self, body: PatchRequest, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(body, models, stores)
        self._base, self._source = "corrupted", "clean"
        if body.direction == "noise":
            self._base, self._source = self._source, self._base

    def check_limits(self, settings: Settings) -> None:
        """Bound pairs and targets; `plan` bounds patches. Errors: APIError `payload_too_large`."""
        pairs = self._body.pairs
        check_count("pairs", len(pairs), settings.max_items)
        targets = sum(len(item.targets or item.target_ids or ()) for item in _list_items(pairs))
        check_count("pairs[].targets", targets, MAX_TARGETS)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Capture one run of each pair, then score both runs, and the other one with every patch.

        Errors: APIError `payload_too_large` for too many patches or captured activations.
        """
        body, info = self._body, self.info
        planner.cover_text(find_longest(_list_items(body.pairs)))
        pairs, layer_sets = await planner.run(self._plan, planner)
        site = CaptureSite.resolve(body.hook, sorted(set().union(*layer_sets)), "each", info)
        layers = site.capture.layers
        places = sum(len(pair.positions) for pair in pairs)
        check_count(
            "pairs x layers x positions", places * len(layer_sets), planner.settings.max_items
        )
        planner.expect_rows(places * len(layer_sets), 1)
        sources = [pair.runs[self._source].context for pair in pairs]
        held = len(layers) * sum(map(len, sources)) + sum(map(len, layer_sets)) * places
        planner.hold_activations(held * site.width)
        captures = [CaptureJob(tokens, capture=site.capture) for tokens in sources]
        captured, scored = Collector(), Collector()
        applied = await planner.run(self.interventions.apply, captures)
        yield Batch(applied, captured.take)
        async with AsyncExitStack() as stack:
            if body.metric == "kl":
                first = [pair.runs["clean"].jobs[0] for pair in pairs]
                clean = await planner.run(self.interventions.apply, first)
                files = await stack.enter_async_context(
                    reserve_references(clean, info.vocab_size, planner, self._scratch)
                )
                yield Batch(export_jobs(clean, files), purpose="reference")
                pairs = [pair.compare(file) for pair, file in zip(pairs, files, strict=True)]
            jobs = await planner.run(
                list, self._list_jobs(pairs, layer_sets, layers, captured.outputs)
            )
            yield Batch(jobs, scored.take, cache=body.cache)
        outputs = iter(scored.outputs)
        self.results = [self._write(pair, layer_sets, outputs) for pair in pairs]

    def _plan(self, planner: Planner) -> tuple[list[PlannedPair], list[list[int]]]:
        body, codec, info = self._body, self.codec, self.info
        check_feature("steering", info, "hook")
        self.interventions = Interventions.resolve(body, self._stores, info, self.codec)
        read = describe_rows((), precision=body.precision)
        items, problems = _list_items(body.pairs), PairProblems("pairs")
        plan = plan_targets(items, codec, info, body, read, planner.cover, problems)
        pairs = []
        for n, pair in enumerate(body.pairs):
            clean, corrupted = (
                plan_run(plan, item.targets, body.metric, read)
                for item in plan.items[2 * n : 2 * n + 2]
            )
            runs = {"clean": clean, "corrupted": corrupted}
            lengths = {name: len(run.context) for name, run in runs.items()}
            where = match_positions(n, pair, lengths, body.positions, self._base)
            pairs.append(PlannedPair(runs, *where))
        return pairs, body.layers or [[layer] for layer in range(info.num_layers)]

    def _list_jobs(
        self,
        pairs: Sequence[PlannedPair],
        layer_sets: Sequence[Sequence[int]],
        layers: Sequence[int],
        captured: Sequence[CaptureOutput],
    ) -> Iterator[ScoreJob]:
        """Yield each pair's jobs: both runs unpatched, then the base run with every patch."""
        change = self.interventions.change
        for pair, output in zip(pairs, captured, strict=True):
            yield from map(change, (*pair.runs["clean"].jobs, *pair.runs["corrupted"].jobs))
            base = [change(job) for job in pair.runs[self._base].jobs]
            source_LTD = dict(zip(layers, output.activations_LTD, strict=True))
            changed = [(into, other) for into, other, changes in pair.list_places() if changes]
            for layer_set in layer_sets:
                for into, other in changed:
                    activations = {layer: source_LTD[layer][other] for layer in layer_set}
                    plan = replace_at(self._body.hook, activations, into)
                    yield from (replace(job, plan=plan) for job in base)

    def _write(
        self,
        pair: PlannedPair,
        layer_sets: Sequence[Sequence[int]],
        outputs: Iterator[ScoreOutput],
    ) -> dict[str, Any]:
        """Return a `PatchResult` from the outputs of a pair's jobs."""

        def measure(name: str) -> float:
            run = pair.runs[name]
            return run.measure(self._body.metric, list(islice(outputs, len(run.jobs))))

        unpatched = {name: measure(name) for name in ("clean", "corrupted")}
        differs = [changes for _, _, changes in pair.list_places()]
        matrix = [
            [measure(self._base) if changes else unpatched[self._base] for changes in differs]
            for _ in layer_sets
        ]
        ids = pair.runs[self._base].context
        findings = {target.finding for run in pair.runs.values() for target in run.targets}
        return {
            **unpatched,
            "layers": layer_sets,
            "positions": pair.positions,
            "tokens": [self.codec.piece(int(ids[position])) for position in pair.positions],
            "matrix": matrix,
            "boundary": max(findings),  # `exact` is the first in the alphabet
            "truncated_tokens": max(run.targets[0].truncated for run in pair.runs.values()),
        }

    def report(self) -> dict[str, Any]:
        """Return the results, and the places measured."""
        body = self._body
        asked = {"hook": body.hook, "metric": body.metric, "direction": body.direction}
        return {**asked, "results": self.results}


def _list_items(pairs: Sequence[PatchPair]) -> list[LogprobItem]:
    return [item for pair in pairs for item in (pair.clean, pair.corrupted)]

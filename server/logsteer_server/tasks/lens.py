"""`/lens`: targets as the residual stream of each layer predicts them (logit lens).

It captures the streams of the rows that predict the targets. Each stream then replaces the last
layer's output in a job of one token, so that the model's own final norm and head decode it, in any
family and on any number of GPUs.

    The  capital  of  France  is   ─►  stream of " is" at layers 0, 1, ... L - 1
                                          │
              [token]  ── last layer's output := stream ──►  norm, head: " Paris"?
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import LensRequest, LogprobItem
from logsteer_server.contract.batches import ScoreOutputs
from logsteer_server.contract.captures import Capture
from logsteer_server.contract.jobs import CaptureJob, CaptureOutput, ScoreJob
from logsteer_server.contract.plan import Positions
from logsteer_server.interventions.captures import find_layers
from logsteer_server.interventions.interventions import Interventions, Stores
from logsteer_server.interventions.references import check_feature
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.stores.layer_vectors import RESID_POST
from logsteer_server.tasks.logprob import show_listed
from logsteer_server.tasks.patch import replace_at
from logsteer_server.tasks.planning import ItemProblems, Planner
from logsteer_server.tasks.policies import plan_policy, refuse_adjustments
from logsteer_server.tasks.run import Batch, BodyTask, Collector
from logsteer_server.tasks.targets import (
    TargetPlan,
    check_items,
    describe_rows,
    find_longest,
    plan_targets,
    show_columns,
)

HELD = 2
"""Copies of a captured stream in memory: the captured one, and one in its plan."""


def capture_rows(job: ScoreJob, layers: tuple[int, ...]) -> CaptureJob:
    """Return the job that captures the streams of a score job's rows in these layers."""
    rows = Positions("slices", ((job.first_row, len(job.tokens)),))
    capture = Capture(layers, RESID_POST, "each", rows)
    return CaptureJob(job.tokens, job.prompt_len, capture=capture)


class LensTask(BodyTask[LensRequest]):
    """Targets as each layer predicts them, by the model's own final norm and head."""

    kind = "lens"

    def __init__(self, body: LensRequest, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(body, models, stores)
        self._items = [
            LogprobItem(context="", targets=[item]) if isinstance(item, str) else item
            for item in body.items
        ]

    def check_limits(self, settings: Settings) -> None:
        """Bound items and targets. Errors: APIError `payload_too_large`."""
        check_items(self._items, settings)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Capture the rows of all targets, then read each layer's.

        Errors: APIError `payload_too_large` for more layers x tokens than allowed.
        """
        body, info = self._body, self.info
        planner.cover_text(find_longest(self._items))
        problems = ItemProblems("items", body.on_error)
        plan, layers = await planner.run(self._plan, planner, problems)
        if not plan.jobs:  # each item has a problem
            self.results = problems.fill([], self.request_id)
            return
        count = len(plan.jobs.targets) * len(layers)
        limit = planner.settings.max_items
        if count > limit:
            detail = (
                f"{len(plan.jobs.targets)} tokens x {len(layers)} layers are {count} rows, at most "
                f"{limit} are allowed at once: ask for fewer layers or tokens, or raise max_items."
            )
            raise api_error("payload_too_large", detail, param="items")
        planner.expect_rows(count, len(body.columns), plan.num_listed, detokenize=body.detokenize)
        captures = [capture_rows(job, layers) for job in plan.jobs]
        rows = sum(capture.num_rows for capture in captures)
        planner.hold_activations(HELD * rows * len(layers) * info.hidden_size)
        captured, scored = Collector(), Collector()
        applied = await planner.run(self.interventions.apply, captures)
        yield Batch(applied, captured.take)
        jobs = await planner.run(list, self._list_jobs(plan, layers, captured.outputs))
        yield Batch(jobs, scored.take, cache=body.cache, purpose="readout")
        found = await planner.run(self._write, plan, layers, scored.scores)
        self.results = problems.fill(found, self.request_id)

    def _plan(self, planner: Planner, problems: ItemProblems) -> tuple[TargetPlan, tuple[int, ...]]:
        body, info = self._body, self.info
        check_feature("steering", info, "layers")
        layers = find_layers(RESID_POST, body.layers, info)
        self.interventions = Interventions.resolve(body, self._stores, info, self.codec)
        top = min(body.top, info.vocab_size)
        policy = plan_policy(body.policy, self.codec, info)
        refuse_adjustments(policy)
        read = describe_rows(body.columns, policy, body.precision, top, tail=body.tail)
        plan = plan_targets(self._items, self.codec, info, body, read, planner.cover, problems)
        return plan, layers

    def _list_jobs(
        self, plan: TargetPlan, layers: tuple[int, ...], captured: Sequence[CaptureOutput]
    ) -> Iterator[ScoreJob]:
        """Yield the jobs of one token: by layer, planned job and captured row."""
        change, last = self.interventions.change, self.info.num_layers - 1
        for number in range(len(layers)):
            for job, output in zip(plan.jobs, captured, strict=True):
                base = change(job)
                listed = job.alternatives
                for row, stream_D in enumerate(output.activations_LTD[number]):
                    place = job.first_row + row
                    own = slice(None) if job.shares_row else slice(row, row + 1)
                    yield replace(
                        base,
                        tokens=job.tokens[place : place + 1],
                        targets=job.targets[own],
                        alternatives=None if listed is None else listed[own],
                        plan=replace_at(RESID_POST, {last: stream_D}, 0),
                    )

    def _write(
        self, plan: TargetPlan, layers: tuple[int, ...], outputs: ScoreOutputs
    ) -> list[dict[str, Any]]:
        """Return the `LensItem` of each item; a layer's rows are those of the planned jobs."""
        begins, ends = plan.find_rows(plan.jobs.target_starts)
        num_rows = len(plan.jobs.targets)
        targets: list[dict[str, Any]] = []
        for planned, begin, end in zip(plan.planned, begins, ends, strict=True):
            by_layer = {
                str(layer): self._write_rows(outputs, n * num_rows + begin, n * num_rows + end)
                for n, layer in enumerate(layers)
            }
            finite = all(rows["logprob"] is not None for rows in by_layer.values())
            targets.append({
                "target": planned.text,
                "token_ids": planned.token_ids,
                "tokens": list(map(self.codec.piece, planned.token_ids)),
                "offsets": planned.offsets,
                "layers": by_layer,
                "boundary": planned.finding,
                "truncated_tokens": planned.truncated,
                "flags": [] if finite else ["non_finite"],
            })  # fmt: skip
        return [{"targets": [targets[index] for index in item.targets]} for item in plan.items]

    def _write_rows(self, outputs: ScoreOutputs, begin: int, end: int) -> dict[str, Any]:
        columns = {name: values[begin:end] for name, values in outputs.columns.items()}
        total = float(columns["logprob"].astype(np.float64).sum())
        rows = {
            "logprob": total if np.isfinite(total) else None,
            "logprobs": columns["logprob"],
            **show_columns(columns, self._body.columns),
        }
        return rows | show_listed(columns, self.codec if self._body.detokenize else None)

"""`/logprob` and `/diagnostics`: exact log-probabilities of targets given contexts."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from logsteer.schemas import DiagnosticsRequest, LogprobRequest
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.interventions.interventions import Interventions, Stores
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.tasks.columns import ColumnOptions
from logsteer_server.tasks.planning import Planner, Steps
from logsteer_server.tasks.run import Batch, ScoreCollector, Task
from logsteer_server.tasks.target_scores import Shown, assemble_targets
from logsteer_server.tasks.targets import (
    TargetOptions,
    TargetPlan,
    check_items,
    find_longest,
    plan_targets,
)
from logsteer_server.text.tokenizer import TextCodec


class LogprobTask(Task):
    """Exact log-probability of every target given its context."""

    kind = "logprob"

    def __init__(self, body: LogprobRequest, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(models.find(body.model))
        self.precision = body.precision
        self._body = body
        self._stores = stores
        self._shown = Shown(body.columns, body.per_token)
        self._results: list[dict[str, Any]] = []

    def check_limits(self, settings: Settings) -> None:
        """Bound items and targets. Errors: APIError `payload_too_large`."""
        check_items(self._body.items, settings)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Score all targets in one batch, then sum them up."""
        body = self._body
        codec, info = self.model.require()
        planner.cover_text(find_longest(body.items))
        plan, jobs = await planner.advance(self._plan(codec, info))
        rows = len(plan.jobs.targets)
        planner.expect_rows(rows, len(body.columns), min(body.top, info.vocab_size))
        if self.interventions.probes:
            contexts = [plan.jobs[target.job].prompt_len for target in plan.planned]
            planner.expect_readings(self.interventions, len(contexts), rows, sum(contexts))
        collector = ScoreCollector()
        yield Batch(jobs, collector.take, cache=body.cache)
        found = collector.outputs
        shown = replace(self._shown, interventions=self.interventions)
        steps = assemble_targets(plan, found, codec, shown)
        self._results = await planner.advance(steps)

    def _plan(
        self, codec: TextCodec, info: EngineInfo
    ) -> Steps[tuple[TargetPlan, Sequence[ScoreJob]]]:
        body = self._body
        self.interventions = Interventions.resolve(body, self._stores, info)
        options = TargetOptions(body.boundary, body.space, body.bos, body.on_overflow)
        top = min(body.top, info.vocab_size)
        read = ColumnOptions.of(body.columns, body.policy, body.precision, top)
        plan = yield from plan_targets(body.items, codec, info, options, read)
        return plan, self.interventions.apply(plan.jobs)

    def report(self) -> dict[str, Any]:
        """Return the scores of each item's targets."""
        return {"results": self._results}


class DiagnosticsTask(LogprobTask):
    """Targets as a sampling policy saw them: every column of each token, and aggregates."""

    def __init__(self, body: DiagnosticsRequest, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(body, models, stores)
        self._shown = Shown(body.columns, body.per_token, body.window)

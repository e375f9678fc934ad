"""`/divergence`: the divergence of two models' next-token distributions, over the whole vocabulary.

It compares the request's model, with its steering, adapter and override, with `reference`: another
model of the same vocabulary, or the same model with other changes. Both read the same tokens.
"""

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import DivergenceColumn, DivergenceRequest
from logsteer_server.contract.batches import OutputPart
from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.interventions.interventions import AppliedReport, Interventions, Stores
from logsteer_server.interventions.variants import expand, find_variant
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.tasks.comparison import Comparison, compare_parts, summarize
from logsteer_server.tasks.logprob import LogprobTask
from logsteer_server.tasks.planning import Planner
from logsteer_server.tasks.run import Batch, Collector, Event
from logsteer_server.tasks.targets import TargetPlan


class DivergenceTask(LogprobTask):
    """Divergence of two models' next-token distributions, token by token."""

    kind = "divergence"
    has_file = False
    compares = True

    _body: DivergenceRequest

    def __init__(self, body: DivergenceRequest, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(body, models, stores)
        self._models = models
        self._summary: dict[str, Any] = {}

    async def _exchange_rows(
        self, planner: Planner, plan: TargetPlan, jobs: Sequence[ScoreJob], collector: Collector
    ) -> AsyncGenerator[Batch, None]:
        comparison, others = await planner.run(self._plan_reference, plan)
        report = AppliedReport(others)
        references = await planner.run(others.apply, list(map(_strip, plan.jobs)))

        def take_reference(part: OutputPart) -> Iterable[Event]:
            for output in part.outputs:
                report.add(output)
            return ()

        compared = [replace(job, beta=self._body.beta) for job in jobs]
        if others.shares_head(self.interventions) and comparison.reference is self.model:
            # The two share the head, so they exchange hidden states, which are smaller.
            comparison.width = self.info.hidden_size
            references = [replace(job, exchange="hidden") for job in references]
            compared = [replace(job, exchange="hidden") for job in compared]
        async for batch in compare_parts(
            compared,
            references,
            comparison,
            planner,
            self._scratch,
            (),
            collector.take,
            take_reference,
        ):
            yield batch
        scores = collector.scores
        self._summary = {
            "reference": {"model": comparison.reference.id, **report.write()},
            "divergence": {
                name: summarize(scores.columns[name].astype(np.float64))
                for name in self._body.columns
                if name in get_args(DivergenceColumn)
            },
        }

    def _plan_reference(self, plan: TargetPlan) -> tuple[Comparison, Interventions]:
        """Return the other model and its changes.

        Errors: APIError `invalid_request`, `unknown_model`, `context_too_long`; those of
        `Interventions.resolve`.
        """
        asked = self._body.reference
        if asked.model is None:
            asked = asked.model_copy(update={"model": self.model.id})
        elif asked.model not in self._models.by_id:
            variant = find_variant(asked.model, self._stores.variants)
            if variant is not None:
                asked = expand(asked, asked.model, variant, ignores=False)
        other = self._models.find(asked.model)
        comparison = Comparison(self.model, other)
        codec, info = other.require()
        longest = int(np.diff(plan.jobs.token_starts).max())
        if longest > info.context_length:
            detail = (
                f"A sequence has {longest} tokens, {other.id} reads {info.context_length}: shorten "
                "it."
            )
            raise api_error("context_too_long", detail, param="reference")
        return comparison, Interventions.resolve(asked, self._stores, info, codec)

    def report(self) -> dict[str, Any]:
        """Return the targets with their columns, and the divergences of all tokens together."""
        return {**super().report(), **self._summary}


def _strip(job: ScoreJob) -> ScoreJob:
    """Return the job with no outputs except the exported rows."""
    return replace(job, columns=("logprob",), top=0, alternatives=None, tail=False)

"""`/models/{id}/selftest`: whether a resident model keeps what the service promises."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

from logsteer.errors import APIError, api_error
from logsteer.schemas.operations import SelftestRequest
from logsteer_server.models.model import ResidentModel
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.tasks.comparison import check_same_vocabulary
from logsteer_server.tasks.planning import Capacity, Planner
from logsteer_server.tasks.run import Batch, Event, Run, Task
from logsteer_server.tasks.selftest_checks import PROMISES, draw, run_checks
from logsteer_server.tasks.selftest_trial import MAX_TOKENS, Trial, choose_texts

log = logging.getLogger(__name__)


class SelftestTask(Task):
    """Measures what the service promises on this model, each promise with a verdict.

    The same tokens are scored alone, in batches, shuffled, from the prefix cache and in chunks;
    continuations are scored as they were sampled, steered and not; and where a second model is
    named, both score the same. Nothing comes from the result cache. In under a minute on a small
    model; other requests are answered meanwhile, and share its batches.
    """

    kind = "selftest"
    applied_fields = ()

    def __init__(self, model: ResidentModel, body: SelftestRequest, models: ModelRegistry) -> None:
        super().__init__(model, streams=body.stream)
        self._body = body
        self._other = None if body.against is None else _find_other(body, self.model, models)
        self._trial: Trial | None = None
        self._checks: list[dict[str, Any]] = []
        self._began = time.monotonic()

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The checks that have failed."""
        return [check for check in self._checks if check["verdict"] == "failed"]

    def require(self) -> None:
        """Make sure that the engine is ready; a model that failed its self-test can be tested."""
        self.codec, self.info = self.model.require(through_gate=True)

    def check_limits(self, settings: Settings) -> None:
        """Leave it to the plan, which knows how many tokens the texts are."""

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch | Event, None]:
        """Draw continuations, then run check after check, each followed by its event."""
        context = self.info.context_length
        if self._other is not None:
            check_same_vocabulary(self.model, self._other, "against")
            context = min(context, self._other.require()[1].context_length)
        trial = self._trial = await planner.capacity.call_long(self._choose, context)
        for batch in draw(trial, context):
            yield batch
        for step in run_checks(trial):
            if isinstance(step, Batch):
                yield step
                continue
            self._checks.append(step.write(PROMISES[step.name]))
            if self.streams:
                yield Event("check", self._checks[-1])

    def _choose(self, context: int) -> Trial:
        given = choose_texts(self._body, self.codec, self.info, context, MAX_TOKENS)
        return Trial(self.model, self.info, self._other, given, MAX_TOKENS)

    def report(self) -> dict[str, Any]:
        """Return the verdict and the checks."""
        assert self._trial is not None
        return {
            "verdict": "failed" if self.failed else "passed",
            "checks": self._checks,
            "against": self._body.against,
            "num_texts": len(self._trial.texts),
            "num_tokens": sum(map(len, self._trial.texts)),
            "seconds": time.monotonic() - self._began,
        }


def _find_other(
    body: SelftestRequest, model: ResidentModel, models: ModelRegistry
) -> ResidentModel:
    other = models.find(body.against)
    if other is model:
        detail = f"{model.id} cannot be held against itself; name another model."
        raise api_error("invalid_request", detail, param="against")
    return other


async def prove(model: ResidentModel, models: ModelRegistry, capacity: Capacity) -> None:
    """Test a model whose engine is ready, and let it answer if it passes.

    It is tested again where its engine was restarted meanwhile.
    """
    while True:
        task = SelftestTask(model, SelftestRequest(), models)
        try:
            await Run(task, capacity).finish()
        except APIError as error:
            if not error.retryable:
                _block(model, f"its self-test could not be run: {error.detail}")
                return
            log.warning("the self-test of model %s begins again: %s", model.id, error.detail)
            await asyncio.sleep(error.retry_after or 1)
            await model.handle.ready.wait()
            continue
        except Exception as error:  # a fault of the server: nobody waits for this task
            log.exception("the self-test of model %s broke", model.id)
            _block(model, f"its self-test broke: {type(error).__name__}: {error}")
            return
        told = [f"{check['name']} ({check['reason']})" for check in task.failed]
        if told:
            _block(model, f"it failed its self-test: {'; '.join(told)}")
        else:
            model.gate = None
            log.info("model %s passed its self-test", model.id)
        return


def _block(model: ResidentModel, reason: str) -> None:
    log.error("model %s: %s", model.id, reason)
    model.gate = ("failed", reason)

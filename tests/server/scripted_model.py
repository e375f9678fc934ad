"""A resident model whose engine is a script in this process: no server, no subprocess."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import ModelState, ReplicaCard
from logsteer_server.contract.batches import ResultPart
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.gradients import GradientJob, GradientOutput
from logsteer_server.contract.jobs import (
    CaptureJob,
    CaptureOutput,
    GenerateJob,
    Job,
    JobFailure,
    JobResult,
    Routing,
    ScoreJob,
)
from logsteer_server.engines.fake import (
    FAKE_COLUMNS,
    fake_activations,
    fake_generation,
    fake_scores,
)
from logsteer_server.interventions.interventions import Stores
from logsteer_server.models.admission import SCRATCH, Admission
from logsteer_server.models.cache import ResultCache
from logsteer_server.models.model import ResidentModel
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.observation.metrics import Metrics
from logsteer_server.settings import ModelSettings, Settings
from logsteer_server.text.tokenizer import TextCodec
from tests.conftest import DEMO_MODEL, VOCAB_SIZE
from tests.server import steering_cases

INFO = replace(
    steering_cases.INFO,
    tokenizer_path=str(DEMO_MODEL),
    vocab_size=VOCAB_SIZE,
    columns=FAKE_COLUMNS,
)
SETTINGS = Settings(models=[ModelSettings(id="any", path="here")])
Answer = Callable[[Job], Sequence[JobResult]]
T = TypeVar("T")


class NoFiles:
    """A source in which no override and no adapter is stored."""

    def find(self, name: str) -> Any:
        raise api_error("unknown_override", f"Nothing is named {name!r}.")


STORES = Stores(steering_cases.NoVectors(), *[NoFiles()] * 5)


@cache
def load_codec() -> TextCodec:
    """The demo model's tokenizer, loaded once."""
    return TextCodec.load(str(DEMO_MODEL))


def answer_as_fake(job: Job) -> Sequence[JobResult]:
    """What the fake engine answers, and gradients of 1."""
    match job:
        case ScoreJob():
            return fake_scores(job)
        case GenerateJob():
            return fake_generation(job)
        case CaptureJob():
            found = fake_activations(job, job.tokens, INFO.hidden_size)
            return [CaptureOutput(activations=found)]
        case GradientJob():
            rows = len(job.positions.mask(0, len(job.tokens), job.prompt_len).nonzero()[0])
            ones_TD = np.ones((rows, INFO.hidden_size), dtype=np.float32)
            logprobs_R = np.full(len(job.targets), -0.5, dtype=np.float32)
            return [GradientOutput(logprobs_R, (ones_TD,) * len(job.sites))]
        case _:
            return [JobFailure("internal", "the script has no answer to this job")]


class ScriptedHandle:
    """What a model asks its engine's handle for; jobs are answered one by one, in order.

    `calls` has the jobs of each run, `open` counts runs that have not ended.
    """

    def __init__(self, info: EngineInfo = INFO, answer: Answer = answer_as_fake) -> None:
        self.info = info
        self.state: ModelState = "ready"
        self.given_up = False
        self.detail = "answers"
        self.restarts = 0
        self.ready = asyncio.Event()
        self.ready.set()
        self.calls: list[list[Job]] = []
        self.open = 0
        self._answer = answer

    def start(self) -> None:
        """There is nothing to start."""

    def stop(self) -> None:
        """There is nothing to stop."""

    async def close(self) -> None:
        """There is nothing to close."""

    def read(self) -> Sequence[ReplicaCard]:
        return [ReplicaCard(state=self.state, detail=self.detail, restarts=self.restarts)]

    @property
    def num_jobs(self) -> int:
        """Jobs that it was given so far."""
        return sum(map(len, self.calls))

    def check_ready(self) -> EngineInfo:
        if self.state != "ready":
            raise api_error("model_loading", "The script has not begun.", retry_after=1)
        return self.info

    async def run(
        self, jobs: Sequence[Job], routing: Routing | None = None
    ) -> AsyncGenerator[ResultPart, None]:
        self.calls.append(list(jobs))
        self.open += 1
        try:
            for index, job in enumerate(jobs):
                for output in self._answer(job):
                    await asyncio.sleep(0)
                    if isinstance(output, JobFailure):
                        raise api_error(output.code, output.detail)
                    yield ResultPart([index], [output], time.monotonic())
        finally:
            self.open -= 1


def make_model(
    handle: ScriptedHandle | None = None,
    max_tokens: int = 1000,
    results: ResultCache | None = None,
    model_id: str = "any",
) -> ResidentModel:
    """A model that answers; without a result cache unless one is given."""
    model = ResidentModel(
        ModelSettings(id=model_id, path="here"),
        handle or ScriptedHandle(),
        Admission(max_tokens),
        results or ResultCache(0),
        Metrics().for_model(model_id),
    )
    model._codec = load_codec()
    return model


def register(*models: ResidentModel) -> ModelRegistry:
    """A registry of these models, which have no engines to be started."""
    registry = ModelRegistry.__new__(ModelRegistry)
    registry.by_id = {model.id: model for model in models}
    registry.scratch = Admission(SETTINGS.max_reference_bytes, SCRATCH)
    return registry


def free(_tokens: int) -> None:
    """Reserve nothing for what is planned."""

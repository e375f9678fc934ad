"""`/vectors/train`: a steering vector from the activations of contrasting texts."""

from collections.abc import AsyncGenerator
from typing import Any

from logsteer.schemas import TrainRequest, VectorAbout, VectorCard
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import CaptureJob
from logsteer_server.interventions.interventions import Stores
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.tasks.run import Batch, Collector, Task, check_count, off_loop
from logsteer_server.tasks.training import (
    CaptureSite,
    TrainedVectors,
    plan_captures,
    train_vectors,
)


class TrainTask(Task):
    """A vector from the activations of contrasting texts, stored under the name given."""

    kind = "train"
    applied_fields = ()

    def __init__(self, body: TrainRequest, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(models.find(body.model))
        self._body = body
        self._stores = stores
        self._card: VectorCard | None = None

    def check_limits(self, settings: Settings) -> None:
        """Bound the number of texts. Errors: APIError `payload_too_large`."""
        check_count("pairs", 2 * len(self._body.pairs), settings.max_items)

    async def plan(self, settings: Settings) -> AsyncGenerator[Batch, None]:
        """Capture all activations in one batch, then train and store."""
        body = self._body
        codec, info = self.model.require()
        site = CaptureSite(body.hook, body.layers, body.read)
        jobs: list[CaptureJob] = await off_loop(
            plan_captures, body.pairs, site, body.bos, codec, info, settings.max_training_bytes
        )
        collector = Collector(jobs)
        yield Batch(jobs, collector.take)
        trained = await off_loop(train_vectors, jobs, collector.outputs, body.method)
        about = self._describe(trained, info)
        self._card = await off_loop(self._stores.vectors.put, body.name, trained.vectors, about)

    def _describe(self, trained: TrainedVectors, info: EngineInfo) -> VectorAbout:
        return VectorAbout(
            source="training",
            model=self.model.id,
            weights_digest=info.weights_digest,
            method=self._body.method,
            read=self._body.read,
            pairs=len(self._body.pairs),
            quality={str(layer): quality for layer, quality in trained.quality.items()},
        )

    def report(self) -> dict[str, Any]:
        """Return the card of the stored vector."""
        assert self._card is not None
        return {"vector": self._card.model_dump()}

"""Steering objects, as requests have them, for a model in Python."""

from pathlib import Path

from logsteer.schemas import Steering, SteeringLike
from logsteer_server.engines.tlens.causal import CausalModel, describe_model
from logsteer_server.interventions.steering import ResolvedSteering, resolve_steering
from logsteer_server.stores.contents import ContentFiles
from logsteer_server.stores.namespace import Namespace
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.saes import SaeStore
from logsteer_server.stores.store import SAES, VECTORS, Store
from logsteer_server.stores.vectors import StoredVectors, VectorStore


class _NoVectors:
    """The source of vectors of a model that was given no store."""

    def find(self, name: str) -> StoredVectors:
        """Refuse a name."""
        raise ValueError(f"vector {name!r}: give the model vectors=DIRECTORY, or data inline")

    find_content = find

    def find_feature(self, name: str, feature: int | str, *, reads: bool) -> StoredVectors:  # noqa: ARG002
        """Refuse an autoencoder."""
        return self.find(name)


class SteeringResolver:
    """What steering objects mean for a model; `vectors` is a server's `store_directory`.

    Errors: ValueError where that is none.
    """

    def __init__(self, model: CausalModel, vectors: str | Path | None) -> None:
        self._info = describe_model(model)
        self._source = _NoVectors() if vectors is None else _open_store(Path(vectors))

    def resolve(self, given: SteeringLike | None) -> ResolvedSteering | None:
        """Return the plan of a steering object, None for None. Errors: ValueError, APIError."""
        if given is None:
            return None
        return resolve_steering(Steering.model_validate(given), self._source, self._info)


def _open_store(directory: Path) -> VectorStore:
    if not (directory / VECTORS.plural).is_dir():
        raise ValueError(f"vectors: {directory} is no store_directory of a server; it has none")
    objects = Objects(directory)
    saes = SaeStore(Namespace(Store(SAES, objects, max_bytes=0)), ContentFiles(objects, 0))
    vectors = Namespace(Store(VECTORS, objects, max_bytes=0))  # it only reads
    return VectorStore(vectors, features=saes)

"""The `vectors` of the two clients: steering vectors that the server keeps.

Layer L with hook resid_post is the residual stream that leaves block L, 0-based.
"""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol, TypeVar, Unpack

from pydantic import BaseModel

from logsteer import _calls
from logsteer._call import Call
from logsteer._options import TrainOptions
from logsteer._upload import AsyncSource, Source
from logsteer.schemas import (
    ContentFormat,
    ContrastPair,
    DeletedVector,
    TrainAnswer,
    VectorCard,
    VectorFormat,
    VectorList,
)

A = TypeVar("A", bound=BaseModel)


class Ask(Protocol):
    """Sends a call and gives its answer."""

    def __call__(self, call: Call[A], /) -> A: ...


class AsyncAsk(Protocol):
    """The same, awaited."""

    def __call__(self, call: Call[A], /) -> Awaitable[A]: ...


class Vectors:
    """What `Client.vectors` can do; every method raises the errors of `logsteer.errors`."""

    def __init__(self, ask: Ask, model: str | None) -> None:
        self._ask = ask
        self._model = model

    def list(self) -> VectorList:
        """The card of every kept vector, by name."""
        return self._ask(_calls.list_vectors())

    def get(self, name: str) -> VectorCard:
        """The card of one vector; NotFoundError where none has this name."""
        return self._ask(_calls.show_vector(name))

    def put(
        self,
        name: str,
        source: Source | bytes,
        format: VectorFormat | None = None,  # noqa: A002
    ) -> VectorCard:
        """The card of the vector in a file, which this name stands for from now on.

        `source` is a path, an open binary file, or the file's bytes: safetensors, a GGUF control
        vector, or a dictionary that torch.save has written. `format` None: what it looks like.
        """
        return self._ask(_calls.put_vector(name, source, format))

    def download(
        self,
        name: str,
        format: ContentFormat = "safetensors",  # noqa: A002
    ) -> bytes:
        """The vector as a file; the SHA-256 of the safetensors file is the vector's own."""
        return self._ask(_calls.download_vector(name, format)).data

    def delete(self, name: str) -> DeletedVector:
        """The name that is gone, and the content that it stood for."""
        return self._ask(_calls.delete_vector(name))

    def train(
        self,
        name: str,
        pairs: Sequence[ContrastPair | Mapping[str, str]],
        **options: Unpack[TrainOptions],
    ) -> TrainAnswer:
        """A vector from pairs of texts, `positive` and `negative`, kept under this name."""
        return self._ask(_calls.train_vector(name, pairs, options, self._model))

    def combine(
        self, name: str, weights: Mapping[str, float], orthogonal_to: Sequence[str] = ()
    ) -> VectorCard:
        """The card of a weighted sum of kept vectors, by name, kept under a name itself.

        What it shares with the vectors named by `orthogonal_to` is taken away, layer by layer.
        """
        return self._ask(_calls.combine_vectors(name, weights, orthogonal_to))


class AsyncVectors:
    """What `AsyncClient.vectors` can do: the same as `Vectors`."""

    def __init__(self, ask: AsyncAsk, model: str | None) -> None:
        self._ask = ask
        self._model = model

    async def list(self) -> VectorList:
        """As `Vectors.list`."""
        return await self._ask(_calls.list_vectors())

    async def get(self, name: str) -> VectorCard:
        """As `Vectors.get`."""
        return await self._ask(_calls.show_vector(name))

    async def put(
        self,
        name: str,
        source: AsyncSource | bytes,
        format: VectorFormat | None = None,  # noqa: A002
    ) -> VectorCard:
        """As `Vectors.put`; an asynchronous iterable is a source, too."""
        return await self._ask(_calls.put_vector(name, source, format))

    async def download(
        self,
        name: str,
        format: ContentFormat = "safetensors",  # noqa: A002
    ) -> bytes:
        """As `Vectors.download`."""
        return (await self._ask(_calls.download_vector(name, format))).data

    async def delete(self, name: str) -> DeletedVector:
        """As `Vectors.delete`."""
        return await self._ask(_calls.delete_vector(name))

    async def train(
        self,
        name: str,
        pairs: Sequence[ContrastPair | Mapping[str, str]],
        **options: Unpack[TrainOptions],
    ) -> TrainAnswer:
        """As `Vectors.train`."""
        return await self._ask(_calls.train_vector(name, pairs, options, self._model))

    async def combine(
        self, name: str, weights: Mapping[str, float], orthogonal_to: Sequence[str] = ()
    ) -> VectorCard:
        """As `Vectors.combine`."""
        return await self._ask(_calls.combine_vectors(name, weights, orthogonal_to))

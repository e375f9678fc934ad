"""The client for asyncio: the arguments and methods of `logsteer.client.Client`."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import httpx

from logsteer._async_methods import (
    AsyncAdapters,
    AsyncClientMethods,
    AsyncOverrides,
    AsyncVectorMethods,
)
from logsteer._callers import weigh_vectors
from logsteer._exchange import Encoding
from logsteer._settings import read_settings
from logsteer._upload import UploadBody
from logsteer.schemas import VectorCard


class AsyncVectors(AsyncVectorMethods):
    """Methods of `AsyncClient.vectors`."""

    async def combine(
        self,
        name: str,
        weights: Mapping[str, float],
        orthogonal_to: Sequence[str] = (),
        *,
        overwrite: bool = False,
    ) -> VectorCard:
        """Sum stored vectors, each by its name and weight, store the sum, and return its card.

        What it shares with the vectors named by `orthogonal_to` is taken away, layer by layer.
        `overwrite` replaces what another request has stored under the name.
        """
        values = weigh_vectors(name, weights, orthogonal_to, overwrite)
        card: VectorCard = await self._ask("vectors.combine", **values)
        return card


class AsyncClient(AsyncClientMethods):
    """A client for asyncio, with the arguments and methods of `Client`."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout | None = None,
        max_retries: int = 2,
        model: str | None = None,
        encoding: Encoding = "json",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        settings = read_settings(base_url, api_key, timeout, max_retries, model, encoding)
        if transport is None and (made := settings.transport_arguments()):
            transport = httpx.AsyncHTTPTransport(**made)
        self._http = httpx.AsyncClient(transport=transport, **settings.http_arguments())
        self._terms = settings.terms(self._http.build_request, UploadBody.async_chunks)
        self._model = model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def base_url(self) -> str:
        """The server's address, without a slash at its end."""
        return str(self._http.base_url).rstrip("/")

    @property
    def vectors(self) -> AsyncVectors:
        """The steering vectors that the server stores."""
        return AsyncVectors(self._ask)

    @property
    def overrides(self) -> AsyncOverrides:
        """The directions of the parameters that the server stores."""
        return AsyncOverrides(self._ask)

    @property
    def adapters(self) -> AsyncAdapters:
        """The LoRA adapters that the server stores."""
        return AsyncAdapters(self._ask)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

"""The client that blocks; `logsteer.async_client` has its twin for asyncio.

Options are keywords; one that is left out is not sent, and takes the server's default. Every method
raises the errors of `logsteer.errors`. Log-probabilities are in nats.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import httpx

from logsteer._callers import weigh_vectors
from logsteer._exchange import Encoding
from logsteer._settings import read_settings
from logsteer._sync_methods import Adapters, ClientMethods, Overrides, VectorMethods
from logsteer._upload import UploadBody
from logsteer.schemas import VectorCard


class Vectors(VectorMethods):
    """Methods of `Client.vectors`."""

    def combine(
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
        card: VectorCard = self._ask("vectors.combine", **values)
        return card


class Client(ClientMethods):
    """A blocking client of one server; threads may share it.

    `base_url` and `api_key` are read from LOGSTEER_BASE_URL and LOGSTEER_API_KEY where they are not
    given; `unix:///path` is a server on a Unix domain socket. `timeout` is in seconds: 600, and 5
    for connecting, unless given; `httpx.Timeout(None)` sets none. `model` is the default of every
    request; `transport` replaces the network. With `encoding="msgpack"` arrays travel as raw
    buffers, which suits large answers.

    Examples:
        >>> with Client(model="demo") as client:  # doctest: +SKIP
        ...     client.score("The capital of France is", [" Paris", " London"]).choice_probs
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout | None = None,
        max_retries: int = 2,
        model: str | None = None,
        encoding: Encoding = "json",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        settings = read_settings(base_url, api_key, timeout, max_retries, model, encoding)
        if transport is None and (made := settings.transport_arguments()):
            transport = httpx.HTTPTransport(**made)
        self._http = httpx.Client(transport=transport, **settings.http_arguments())
        self._terms = settings.terms(self._http.build_request, UploadBody.chunks)
        self._model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def base_url(self) -> str:
        """The server's address, without a slash at its end."""
        return str(self._http.base_url).rstrip("/")

    @property
    def vectors(self) -> Vectors:
        """The steering vectors that the server stores."""
        return Vectors(self._ask)

    @property
    def overrides(self) -> Overrides:
        """The directions of the parameters that the server stores."""
        return Overrides(self._ask)

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters that the server stores."""
        return Adapters(self._ask)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

"""The client that blocks; `logsteer.async_client` has its twin for asyncio.

Options are keywords; one that is left out is not sent, and takes the server's default. Every method
raises the errors of `logsteer.errors`. Log-probabilities are in nats.

Written by `make client` from `async_client.py`: change that.
"""

from collections.abc import Mapping, Sequence
from typing import Self

import httpx

from logsteer._calls import NOT_GIVEN, NotGiven, as_list
from logsteer._exchange import ClientSettings, Encoding
from logsteer._sync_methods import (
    Adapters,
    Captures,
    ClientMethods,
    Overrides,
    Saes,
    Variants,
    VectorMethods,
)
from logsteer._upload import Source
from logsteer.extras.tensors import convert_upload
from logsteer.schemas import VectorCard, VectorFormat


class Vectors(VectorMethods):
    """Methods of `Client.vectors`."""

    def put(
        self,
        name: str,
        source: Source | bytes,
        format: VectorFormat | NotGiven | None = NOT_GIVEN,  # noqa: A002
        *,
        overwrite: bool | NotGiven = NOT_GIVEN,
    ) -> VectorCard:
        """Upload the steering vector, store it under a name, and return its card.

        The server takes safetensors and GGUF control vectors. A dictionary that torch.save has
        written is converted on this machine, which takes torch.

        Args:
            name: What the steering vector is called from now on.
            source: A path, an open binary file, or the file's bytes.
            format: Of the file; left out: what it looks like.
            overwrite: Whether to replace what another request has stored under this name, which
                is else refused: `exists`. The same request again gets the same answer.
        """
        source, form = convert_upload(source, format)
        return super().put(name, source, form, overwrite=overwrite)

    def combine(
        self,
        name: str,
        weights: Mapping[str, float],
        orthogonal_to: Sequence[str] = (),
        *,
        overwrite: bool | NotGiven = NOT_GIVEN,
    ) -> VectorCard:
        """Sum stored vectors, each with a name and weight, store the sum, and return its card.

        What it shares with the vectors named by `orthogonal_to` is taken away, layer by layer.
        `overwrite` replaces what another request has stored under the name.
        """
        parts = [{"name": part, "weight": float(weight)} for part, weight in weights.items()]
        card: VectorCard = self._ask(
            "vectors.combine",
            name=name,
            vectors=parts,
            orthogonal_to=as_list(orthogonal_to),
            overwrite=overwrite,
        )
        return card


class Client(ClientMethods):
    """A blocking client of one server; threads may share it.

    `base_url` and `api_key` are read from LOGSTEER_BASE_URL and LOGSTEER_API_KEY where they are not
    given; `unix:///path` is a server on a Unix domain socket. `timeout` is in seconds: 600, and 5
    for connecting, unless given; `httpx.Timeout(None)` sets none. `model` is the default of every
    request; `transport` replaces the network. With `encoding="msgpack"` arrays travel as raw
    buffers, which suits large answers.

    | method | scores |
    |---|---|
    | `score` | targets after one context: which is most probable, and by how much |
    | `logprob` | many contexts, each with targets, ids or messages; every token, every option |
    | `get_log_prob` | every prompt with every target, flat records: for pandas and older scripts |
    | `diagnostics` | `logprob` with all columns and their aggregates: what a sampling policy saw |
    | `perplexity` | whole texts of any length, by a window protocol |
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
        settings = ClientSettings(base_url, api_key, timeout, max_retries, model, encoding)
        if transport is None and settings.transport:
            transport = httpx.HTTPTransport(**settings.transport)
        self._http = httpx.Client(transport=transport, **settings.http)
        self._settings = settings
        self._model = settings.model
        self.vectors = Vectors(self._ask)
        self.overrides = Overrides(self._ask)
        self.adapters = Adapters(self._ask)
        self.saes = Saes(self._ask)
        self.captures = Captures(self._ask)
        self.variants = Variants(self._ask)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def base_url(self) -> str:
        """The server's address, without a slash at its end."""
        return str(self._http.base_url).rstrip("/")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

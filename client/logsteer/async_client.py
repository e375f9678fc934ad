"""The client for asyncio: the arguments and methods of `logsteer.client.Client`."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx
from pydantic import BaseModel

from logsteer import _calls
from logsteer._adapters import AsyncAdapters
from logsteer._call import Call, as_list
from logsteer._calls import GenerateEvent, PerplexityEvent, SteerEvent
from logsteer._exchange import Encoding, exchange
from logsteer._options import (
    DiagnosticsOptions,
    GenerateOptions,
    GradientOptions,
    LogprobOptions,
    PairOptions,
    PerplexityOptions,
    SteeringLike,
    SteerOptions,
    SweepOptions,
    TokenOptions,
    WindowOptions,
)
from logsteer._overrides import AsyncOverrides
from logsteer._pairs import pair_items, pair_records, pair_scores
from logsteer._progress import SamplingProgress
from logsteer._settings import read_settings
from logsteer._upload import AsyncSource, Upload
from logsteer._vectors import AsyncVectors
from logsteer._wire import AsyncWire
from logsteer.extras.datasets import PROMPT, draw_prompts, read_prompts
from logsteer.extras.datasets import Source as PromptSource
from logsteer.extras.samples import Reward, Sample, Samples, collect
from logsteer.records import LogProb
from logsteer.schemas import (
    DetokenizeAnswer,
    GenerateAnswer,
    GradientAnswer,
    GradientVariable,
    Health,
    ItemScore,
    LogprobAnswer,
    LogprobItem,
    ModelCard,
    ModelList,
    PerplexityAnswer,
    Readiness,
    SteerAnswer,
    SweepAnswer,
    TokenizeAnswer,
)

A = TypeVar("A", bound=BaseModel)


class AsyncClient:
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
        self._http = httpx.AsyncClient(transport=transport, **settings.http_arguments())
        self._terms = settings.terms(self._http.build_request, Upload.async_chunks)
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
        """As `Client.vectors`."""
        return AsyncVectors(self._answer, self._model)

    @property
    def overrides(self) -> AsyncOverrides:
        """As `Client.overrides`."""
        return AsyncOverrides(self._answer, self._model)

    @property
    def adapters(self) -> AsyncAdapters:
        """As `Client.adapters`."""
        return AsyncAdapters(self._answer, self._model)

    async def aclose(self) -> None:
        """Nothing; the connections are closed."""
        await self._http.aclose()

    async def models(self) -> ModelList:
        """As `Client.models`."""
        return await self._answer(_calls.models())

    async def model(self, model_id: str) -> ModelCard:
        """As `Client.model`."""
        return await self._answer(_calls.model(model_id))

    async def health(self) -> Health:
        """As `Client.health`."""
        return await self._answer(_calls.health())

    async def ready(self) -> Readiness:
        """As `Client.ready`."""
        return await self._answer(_calls.ready())

    async def logprob(
        self,
        items: Sequence[LogprobItem | Mapping[str, Any]],
        **options: Unpack[LogprobOptions],
    ) -> LogprobAnswer:
        """As `Client.logprob`."""
        return await self._answer(_calls.logprob(items, options, self._model))

    async def score(
        self, context: str, targets: str | Sequence[str], **options: Unpack[LogprobOptions]
    ) -> ItemScore:
        """As `Client.score`."""
        targets = as_list(targets)
        call = _calls.logprob(pair_items([context], targets), options, self._model)
        return pair_scores(await self._answer(call), 1, len(targets))[0]

    async def get_log_prob(
        self,
        prompts: str | Sequence[str],
        targets: str | Sequence[str],
        **options: Unpack[PairOptions],
    ) -> list[LogProb]:
        """As `Client.get_log_prob`."""
        prompts, targets = as_list(prompts), as_list(targets)
        call = _calls.logprob_pairs(prompts, targets, options, self._model)
        return pair_records(prompts, targets, await self._answer(call))

    async def perplexity(
        self, texts: str | Sequence[str], **options: Unpack[PerplexityOptions]
    ) -> PerplexityAnswer:
        """As `Client.perplexity`."""
        return await self._answer(_calls.perplexity(texts, options, self._model))

    def perplexity_events(
        self, texts: str | Sequence[str], **options: Unpack[PerplexityOptions]
    ) -> AsyncGenerator[PerplexityEvent, None]:
        """As `Client.perplexity_events`."""
        return self._run(_calls.perplexity_events(texts, options, self._model))

    def perplexity_stream(
        self, source: AsyncSource, **options: Unpack[WindowOptions]
    ) -> AsyncGenerator[PerplexityEvent, None]:
        """As `Client.perplexity_stream`; an asynchronous iterable is a source, too."""
        return self._run(_calls.perplexity_stream(source, options, self._model))

    async def diagnostics(
        self,
        items: Sequence[LogprobItem | Mapping[str, Any]],
        **options: Unpack[DiagnosticsOptions],
    ) -> LogprobAnswer:
        """As `Client.diagnostics`."""
        return await self._answer(_calls.diagnostics(items, options, self._model))

    async def generate(
        self, prompts: str | Sequence[str] | None, **options: Unpack[GenerateOptions]
    ) -> GenerateAnswer:
        """As `Client.generate`."""
        return await self._answer(_calls.generate(prompts, options, self._model))

    def generate_events(
        self, prompts: str | Sequence[str] | None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerateEvent, None]:
        """As `Client.generate_events`."""
        return self._run(_calls.generate_events(prompts, options, self._model))

    async def sample(
        self,
        source: PromptSource,
        *,
        field: str = PROMPT,
        count: int | None = None,
        with_replacement: bool = False,
        reward: Reward | None = None,
        batch_size: int = 32,
        progress: bool = True,
        **options: Unpack[GenerateOptions],
    ) -> Samples:
        """As `Client.sample`."""
        seed = options.get("seed") or 0
        prompts = draw_prompts(read_prompts(source, field), count, with_replacement, seed)
        samples: list[Sample] = []
        with SamplingProgress(len(prompts), progress) as bar:
            for first in range(0, len(prompts), batch_size):
                batch = prompts[first : first + batch_size]
                options["seed"] = seed + len(samples)
                answer = await self.generate([row.prompt for row in batch], **options)
                samples += collect(first, batch, answer, reward)
                bar.advance(len(batch))
        return Samples(samples)

    async def steer(
        self,
        prompts: str | Sequence[str] | None,
        steering: SteeringLike,
        **options: Unpack[SteerOptions],
    ) -> SteerAnswer:
        """As `Client.steer`."""
        return await self._answer(_calls.steer(prompts, steering, options, self._model))

    def steer_events(
        self,
        prompts: str | Sequence[str] | None,
        steering: SteeringLike,
        **options: Unpack[SteerOptions],
    ) -> AsyncGenerator[SteerEvent, None]:
        """As `Client.steer_events`."""
        return self._run(_calls.steer_events(prompts, steering, options, self._model))

    async def sweep(
        self,
        steering: SteeringLike,
        scales: Sequence[float],
        **options: Unpack[SweepOptions],
    ) -> SweepAnswer:
        """As `Client.sweep`."""
        return await self._answer(_calls.sweep(steering, scales, options, self._model))

    async def gradient(
        self,
        items: Sequence[LogprobItem | Mapping[str, Any]],
        wrt: GradientVariable | Mapping[str, Any],
        **options: Unpack[GradientOptions],
    ) -> GradientAnswer:
        """As `Client.gradient`."""
        return await self._answer(_calls.gradient(items, wrt, options, self._model))

    async def tokenize(
        self, texts: str | Sequence[str], **options: Unpack[TokenOptions]
    ) -> TokenizeAnswer:
        """As `Client.tokenize`."""
        return await self._answer(_calls.tokenize(texts, options, self._model))

    async def detokenize(
        self, token_ids: Sequence[Sequence[int]], *, model: str | None = None
    ) -> DetokenizeAnswer:
        """As `Client.detokenize`."""
        return await self._answer(_calls.detokenize(token_ids, model or self._model))

    def _run(self, call: Call[A]) -> AsyncGenerator[A, None]:
        return AsyncWire(self._http).run(exchange(call, self._terms))

    async def _answer(self, call: Call[A]) -> A:
        async with aclosing(self._run(call)) as answers:
            async for answer in answers:
                return answer
        raise AssertionError("an exchange delivers an answer or raises")

"""What both clients and their resources are made on: a call by the name of its endpoint.

The generated methods name an endpoint and give its arguments; the methods here send the call, and
do what takes more than one call or reads the answer.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import httpx
from pydantic import BaseModel

from logsteer._call import ApiCall
from logsteer._calls import as_list, build_call, build_file_call
from logsteer._exchange import Terms, exchange
from logsteer._pairs import LogProbs, pair_items, pair_records, pair_scores
from logsteer._sampling import sample_in_tasks, sample_in_threads
from logsteer._wire import AsyncWire, Wire
from logsteer.errors import PayloadTooLargeError
from logsteer.extras.activations import Activations
from logsteer.extras.samples import Samples
from logsteer.extras.sampling import SampledBatch, SamplingRun
from logsteer.extras.shards import ActivationShards, capture_shards
from logsteer.schemas import ItemScore

A = TypeVar("A", bound=BaseModel)
L = TypeVar("L", bound=BaseModel)
C = TypeVar("C", bound=BaseModel)
D = TypeVar("D", bound=BaseModel)


class Caller:
    """Sends calls by `httpx.Client`."""

    _http: httpx.Client
    _terms: Terms
    _model: str | None

    def _ask(self, endpoint: str, /, **values: Any) -> Any:
        return self._answer(build_call(endpoint, values, self._model))

    def _listen(self, endpoint: str, /, **values: Any) -> Generator[Any, None, None]:
        return self._run(build_call(endpoint, values, self._model, events=True))

    def _run(self, call: ApiCall[A]) -> Generator[A, None, None]:
        return Wire(self._http).run(exchange(call, self._terms))

    def _answer(self, call: ApiCall[A]) -> A:
        with closing(self._run(call)) as answers:
            for answer in answers:
                return answer
        raise AssertionError("an exchange delivers an answer or raises")

    def _score(self, context: str, targets: str | Sequence[str], **options: Any) -> ItemScore:
        targets = as_list(targets)
        items = pair_items([context], targets)
        answer = self._ask("logprob", items=items, **options)
        return pair_scores(answer, 1, len(targets))[0]

    def _get_log_prob(
        self, prompts: str | Sequence[str], targets: str | Sequence[str], **options: Any
    ) -> LogProbs:
        prompts, targets = as_list(prompts), as_list(targets)
        items = pair_items(prompts, targets)
        sums: Any = {"per_token": False, "columns": ["logprob"]}
        answer = self._ask("logprob", items=items, **sums, **options)
        return pair_records(prompts, targets, answer)

    def _sample(self, *arguments: Any, **options: Any) -> Samples:
        def draw(**values: Any) -> SampledBatch:
            call = build_call("generate", values, self._model)
            answer: SampledBatch = self._answer(replace(call, answer=SampledBatch))
            return answer

        return sample_in_threads(SamplingRun(options, *arguments), draw)

    def _activations(
        self, items: str | Sequence[Any], layers: Sequence[int], **options: Any
    ) -> Activations:
        file = self._answer(build_file_call(self._model, items, layers, **options))
        return Activations(file.data)

    def _capture(self, *arguments: Any, **options: Any) -> ActivationShards:
        with closing(capture_shards(options, *arguments)) as steps:
            try:
                values = next(steps)
                while True:
                    try:
                        answer = self._activations(**values)
                    except PayloadTooLargeError as error:
                        values = steps.throw(error)
                    else:
                        values = steps.send(answer)
            except StopIteration as end:
                shards: ActivationShards = end.value
                return shards


class AsyncCaller:
    """Sends calls by `httpx.AsyncClient`, line by line as `Caller`."""

    _http: httpx.AsyncClient
    _terms: Terms
    _model: str | None

    async def _ask(self, endpoint: str, /, **values: Any) -> Any:
        return await self._answer(build_call(endpoint, values, self._model))

    def _listen(self, endpoint: str, /, **values: Any) -> AsyncGenerator[Any, None]:
        return self._run(build_call(endpoint, values, self._model, events=True))

    def _run(self, call: ApiCall[A]) -> AsyncGenerator[A, None]:
        return AsyncWire(self._http).run(exchange(call, self._terms))

    async def _answer(self, call: ApiCall[A]) -> A:
        async with aclosing(self._run(call)) as answers:
            async for answer in answers:
                return answer
        raise AssertionError("an exchange delivers an answer or raises")

    async def _score(self, context: str, targets: str | Sequence[str], **options: Any) -> ItemScore:
        targets = as_list(targets)
        items = pair_items([context], targets)
        answer = await self._ask("logprob", items=items, **options)
        return pair_scores(answer, 1, len(targets))[0]

    async def _get_log_prob(
        self, prompts: str | Sequence[str], targets: str | Sequence[str], **options: Any
    ) -> LogProbs:
        prompts, targets = as_list(prompts), as_list(targets)
        items = pair_items(prompts, targets)
        sums: Any = {"per_token": False, "columns": ["logprob"]}
        answer = await self._ask("logprob", items=items, **sums, **options)
        return pair_records(prompts, targets, answer)

    async def _sample(self, *arguments: Any, **options: Any) -> Samples:
        async def draw(**values: Any) -> SampledBatch:
            call = build_call("generate", values, self._model)
            answer: SampledBatch = await self._answer(replace(call, answer=SampledBatch))
            return answer

        return await sample_in_tasks(SamplingRun(options, *arguments), draw)

    async def _activations(
        self, items: str | Sequence[Any], layers: Sequence[int], **options: Any
    ) -> Activations:
        file = await self._answer(build_file_call(self._model, items, layers, **options))
        return Activations(file.data)

    async def _capture(self, *arguments: Any, **options: Any) -> ActivationShards:
        with closing(capture_shards(options, *arguments)) as steps:
            try:
                values = next(steps)
                while True:
                    try:
                        answer = await self._activations(**values)
                    except PayloadTooLargeError as error:
                        values = steps.throw(error)
                    else:
                        values = steps.send(answer)
            except StopIteration as end:
                shards: ActivationShards = end.value
                return shards


class StoreMethods(Generic[L, C, D]):
    """Contents that the server stores under names: cards of type C in a list of type L.

    A deletion is answered by D. Methods raise the errors of `logsteer.errors`.
    """

    _name: ClassVar[str]

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def list(self) -> L:
        """Return the card of every name, in the order of the names."""
        answer: L = self._ask(f"{self._name}.list")
        return answer

    def get(self, name: str) -> C:
        """Return the card of one name; NotFoundError where nothing has it."""
        answer: C = self._ask(f"{self._name}.get", name=name)
        return answer

    def delete(self, name: str) -> D:
        """Delete a name; return it, and the content that it stood for."""
        answer: D = self._ask(f"{self._name}.delete", name=name)
        return answer


class AsyncStoreMethods(Generic[L, C, D]):
    """Contents that the server stores under names, as `StoreMethods` has them."""

    _name: ClassVar[str]

    def __init__(self, ask: Callable[..., Awaitable[Any]]) -> None:
        self._ask = ask

    async def list(self) -> L:
        """Return the card of every name, in the order of the names."""
        answer: L = await self._ask(f"{self._name}.list")
        return answer

    async def get(self, name: str) -> C:
        """Return the card of one name; NotFoundError where nothing has it."""
        answer: C = await self._ask(f"{self._name}.get", name=name)
        return answer

    async def delete(self, name: str) -> D:
        """Delete a name; return it, and the content that it stood for."""
        answer: D = await self._ask(f"{self._name}.delete", name=name)
        return answer


def weigh_vectors(
    name: str, weights: Mapping[str, float], orthogonal_to: Sequence[str], overwrite: bool
) -> dict[str, Any]:
    """Return the arguments of `vectors.combine`."""
    further = {"overwrite": True} if overwrite else {}
    vectors = [{"name": part, "weight": float(weight)} for part, weight in weights.items()]
    return {"name": name, "vectors": vectors, "orthogonal_to": as_list(orthogonal_to)} | further

"""What `Client` and its resources are made on: a call by the name of its endpoint.

The generated methods name an endpoint and give its arguments; the methods here send the call, and
do what takes more than one call or reads the answer.

Written by `make client` from `_async_caller.py`: change that.
"""

# mypy: disable-error-code="no-any-return"
# What an endpoint is answered with is of the type that the table of endpoints has for it.

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from os import PathLike
from time import sleep
from typing import Any, ClassVar, Generic, TypeVar

import httpx
from pydantic import BaseModel

from logsteer._calls import ApiCall, Download, as_list, build_call
from logsteer._endpoints import SAFETENSORS_TYPE
from logsteer._events import EventParser
from logsteer._exchange import ClientSettings, Exchange, is_event_stream
from logsteer._pairs import LogProbs, pair_items, pair_records, pair_scores
from logsteer._progress import CountingProgress
from logsteer.errors import APIError, LogsteerError
from logsteer.extras.activations import (
    INDEX,
    Activations,
    ActivationShards,
    list_missing,
    load_activations,
    read_remotely,
    write_part,
)
from logsteer.extras.datasets import RowLines
from logsteer.extras.datasets import Source as PromptSource
from logsteer.extras.sampling import Samples, SamplingRun, sample_in_threads
from logsteer.extras.teacher import TeacherScores, list_items
from logsteer.schemas import CaptureIndex, Deleted, ItemScore, SpacePolicy
from logsteer.schemas.captures import name_shard

POLL_S = 0.2
"""Between two questions how far a capture has come."""

A = TypeVar("A", bound=BaseModel)
L = TypeVar("L", bound=BaseModel)
C = TypeVar("C", bound=BaseModel)


class Caller:
    """Sends calls by `httpx.Client`."""

    _http: httpx.Client
    _settings: ClientSettings
    _model: str | None

    def _ask(self, endpoint: str, /, **values: Any) -> Any:
        return self._answer(build_call(endpoint, values, self._model))

    def _listen(self, endpoint: str, /, **values: Any) -> Generator[Any, None]:
        return self._run(build_call(endpoint, values, self._model, events=True))

    def _run(self, call: ApiCall[A]) -> Generator[A, None]:
        """Yield what a call is answered with, tried again where that may help; raise its errors."""
        exchange = Exchange(call, self._settings)
        while True:
            try:
                with closing(self._attempt(call, exchange)) as answers:
                    yield from answers
                return
            except (httpx.HTTPError, APIError) as failure:
                seconds = exchange.choose_pause(failure)
            sleep(seconds)

    def _attempt(self, call: ApiCall[A], exchange: Exchange[A]) -> Generator[A, None]:
        try:
            content = call.body if call.upload is None else call.upload.chunks()
            with ExitStack() as opened:
                files = {part: opened.enter_context(p.open("rb")) for part, p in call.files.items()}
                request = self._http.build_request(
                    call.method, call.path, content=content, params=dict(call.params) or None,
                    files=files or None, headers=exchange.write_headers(),
                )  # fmt: skip
                response = self._http.send(request, stream=bool(call.events))
        finally:
            # An error keeps its request, and with it what was being sent.
            if call.upload is not None:
                call.upload.close()
        with closing(response):
            if not is_event_stream(response):
                response.read()
            exchange.check(response)
            if not call.events:
                yield exchange.read_answer(response)
                return
            parser = EventParser()
            for chunk in response.iter_bytes():
                for event in parser.feed(chunk):
                    answer = exchange.read_event(event)
                    if answer is not None:
                        yield answer
                    if event.name == call.last_event:
                        return
        raise httpx.RemoteProtocolError("the stream ended before its result came")

    def _answer(self, call: ApiCall[A]) -> A:
        with closing(self._run(call)) as answers:
            return next(answers)

    def _score(self, context: str, targets: str | Sequence[str], **options: Any) -> ItemScore:
        targets = as_list(targets)
        answer = self._ask("logprob", items=pair_items([context], targets), **options)
        return pair_scores(answer, 1, len(targets))[0]

    def _get_log_prob(
        self,
        prompts: str | Sequence[str],
        targets: str | Sequence[str],
        space: SpacePolicy,
        **options: Any,
    ) -> LogProbs:
        prompts, targets = as_list(prompts), as_list(targets)
        options |= {"per_token": False, "columns": ["logprob"], "space": space}
        answer = self._ask("logprob", items=pair_items(prompts, targets), **options)
        return pair_records(prompts, targets, answer)

    def _sample(self, *arguments: Any, **options: Any) -> Samples:
        run = SamplingRun(options, *arguments)
        sample_in_threads(run, partial(self._ask, "generate"))
        return run.finish()

    def _activations(
        self, items: str | Sequence[Any], layers: Sequence[int] | None = None, **options: Any
    ) -> Activations:
        values = {"items": as_list(items), "layers": layers, **options}
        call = build_call("activations", values, self._model)
        file = self._answer(replace(call, answer=Download, file_type=SAFETENSORS_TYPE))
        return Activations(file.data)

    def _teacher(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        top: int = 64,
        alternatives: Sequence[Any] | None = None,
        temperature: float = 1.0,
        **options: Any,
    ) -> TeacherScores:
        items = list_items(sequences, prompt_lengths, alternatives)
        changes: dict[str, Any] = {"columns": ["logprob"]}
        if temperature != 1:
            changes = {"columns": ["log_q"], "policy": {"temperature": temperature}}
        values = {"items": items, "top": top, **changes, **options}
        call = build_call("logprob", values | {"detokenize": False}, self._model)
        file = self._answer(replace(call, answer=Download, file_type=SAFETENSORS_TYPE))
        return TeacherScores(file.data)

    def _capture(
        self,
        source: PromptSource,
        name: str,
        layers: Sequence[int],
        directory: str | PathLike[str] | None = None,
        field: str = "text",
        progress: bool = True,
        **options: Any,
    ) -> CaptureIndex:
        if isinstance(source, str) and source.startswith("store://"):
            options["source"] = source
        else:
            self._ask(
                "captures.put",
                name=name,
                source=RowLines(source, field),
                overwrite=options["overwrite"],
            )
        card = self._ask("captures.start", name=name, layers=layers, **options)
        bar = CountingProgress("capturing documents", card.documents_total, 0, progress)
        with bar:
            while card.state == "running":
                sleep(POLL_S)
                card = self._ask("captures.get", name=name)
                bar.show(card.documents, f"{card.rows:,} rows")
        if card.state != "done":
            how = card.error or "captures.resume has it go on"
            raise LogsteerError(f"capture {name!r} is {card.state}: {how}")
        index = self._ask("captures.index", name=name)
        if directory is not None:
            self._download(index, directory)
        return index

    def _download(self, index: CaptureIndex, directory: str | PathLike[str]) -> None:
        for number in list_missing(directory, index):
            file = self._ask("captures.shard", name=index.name, number=str(number))
            write_part(directory, name_shard(number), file.data)
        # Last, as what it names is there.
        write_part(directory, INDEX, index.model_dump_json(indent=1).encode())

    def _activation_loader(
        self,
        name: str,
        batch_size: int,
        shuffle_buffer: int = 0,
        layer: int | None = None,
        directory: str | PathLike[str] | None = None,
        seed: int = 0,
        repeat: bool = False,
    ) -> Any:
        index = self._ask("captures.index", name=name)
        if directory is not None:
            self._download(index, directory)
            shards = ActivationShards.of_directory(directory)
        else:
            shards = ActivationShards(index, read_remotely(self._settings, name))
        return load_activations(shards, batch_size, shuffle_buffer, layer, seed, repeat)


class StoreMethods(Generic[L, C]):
    """Contents that the server stores under names: cards of type C in a list of type L.

    Methods raise the errors of `logsteer.errors`.
    """

    _name: ClassVar[str]

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def list(self) -> L:
        """Return the card of every name, in the order of the names."""
        return self._ask(f"{self._name}.list")

    def get(self, name: str) -> C:
        """Return the card of one name; NotFoundError where nothing has it."""
        return self._ask(f"{self._name}.get", name=name)

    def delete(self, name: str) -> Deleted:
        """Delete a name; return it, and the content that it stood for."""
        return self._ask(f"{self._name}.delete", name=name)

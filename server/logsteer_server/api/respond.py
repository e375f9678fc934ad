"""Run a task within its deadline, and answer with its document or its events."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from logsteer.errors import APIError, api_error
from logsteer_server.api.encoding import (
    DONE,
    ENCODERS,
    JSON,
    choose_encoding,
    encode_json,
    encode_tensors,
)
from logsteer_server.api.problems import describe_openai_error, write_problem
from logsteer_server.observation.requests import RequestRecord, find_record
from logsteer_server.settings import Settings
from logsteer_server.tasks.run import Event, Run, Task

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 4 * 2**20
"""Most bytes buffered of a stream's events or of a request's text: seconds of any model's tokens,
and little enough for all possible streams."""
LONG_ANSWER = 2**20
"""Expected bytes from which an answer is written in a thread."""


def encode_event(event: Event, *, openai: bool) -> bytes:
    """Encode a server-sent event: named, or as an unnamed chunk in OpenAI's shape.

    In OpenAI's shape there are only chunks, and what was captured to the store.
    """
    if openai and event.name != "chunk" and "captured" not in event.document:
        return b""
    head = b"" if openai else b"event: " + event.name.encode() + b"\n"
    return head + b"data: " + encode_json(event.document) + b"\n\n"


def encode_error(error: APIError, answer_id: str, *, openai: bool) -> bytes:
    """Encode an error as an event of a stream."""
    if openai:
        return encode_event(Event("chunk", describe_openai_error(error)), openai=True)
    return encode_event(Event("error", write_problem(error, answer_id)), openai=False)


async def respond(
    request: Request,
    task: Task,
    *,
    openai: bool = False,
    body: "ByteBuffer | None" = None,
) -> Response:
    """Run a task and answer with its document, or with a stream of its events.

    A stream starts once its first batch is planned and admitted, so that earlier refusals have
    their own status. With `openai`, events have OpenAI's shape. `body`: the buffer from which the
    task reads the request's body while it plans; then there is no deadline, and a disconnect is
    detected only as far ahead as the buffer reaches.
    """
    settings: Settings = request.app.state.settings
    media_type = choose_encoding(request.headers.get("accept", ""), has_file=task.has_file)
    run = Run(
        task,
        request.app.state.capacity,
        request.state.caller,
        request.state.memory,
        packs_arrays=media_type != JSON,
        record=find_record(request.scope),
    )
    if not task.streams:
        document = await run_within(request, settings.request_timeout_s, run.finish())
        run.record.record_answer(document)
        encode = ENCODERS.get(media_type) or partial(_lay_out, task)
        if run.expected_bytes < LONG_ANSWER:
            content = encode(document)
        else:
            content = await run.capacity.call_long(encode, document)
        return Response(content, media_type=media_type)
    events = run.events()

    async def open_stream() -> Event:
        return await anext(events)

    if body is None:
        opening = await run_within(request, settings.request_timeout_s, open_stream())
    else:
        opening = await run_within(request, None, open_stream(), _read_ahead(request, body))
    return EventStream(task.id, opening, events, run.record, openai=openai)


def _lay_out(task: Task, document: dict[str, Any]) -> bytes:
    """Encode a run's document as a file of tensors."""
    file = task.lay_out(document)
    return encode_tensors(file.tensors, file.about)


class ByteBuffer:
    """A buffer of bytes between a writer and a reader: at most `max_bytes`, or one piece.

    With it, work ends, and releases its reservations, before a slow reader has read its output; and
    a text is received before slow work needs it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._written: list[bytes] = []
        self._size = 0
        self._ended = False
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()

    async def put(self, piece: bytes) -> None:
        """Wait for room, then add a piece."""
        while self._size and self._size + len(piece) > self._max_bytes:
            self._has_room.clear()
            await self._has_room.wait()
        self._written.append(piece)
        self._size += len(piece)
        self._has_news.set()

    def end(self) -> None:
        """Mark the end of the pieces."""
        self._ended = True
        self._has_news.set()

    async def read(self) -> AsyncGenerator[bytes, None]:
        """Yield all buffered bytes at a time, until the end."""
        while self._written or not self._ended:
            await self._has_news.wait()
            self._has_news.clear()
            taken, self._written, self._size = self._written, [], 0
            self._has_room.set()
            if taken:
                yield b"".join(taken)


class EventStream(StreamingResponse):
    """A run's events as server-sent events, protected from buffering and caching by proxies.

    The run continues while its reader is slow, up to the size of the buffer. It ends with the
    response, for whatever reason.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer_id: str,
        opening: Event,
        events: AsyncGenerator[Event, None],
        record: RequestRecord,
        *,
        openai: bool,
    ) -> None:
        self._answer_id = answer_id
        self._opening = opening
        self._events = events
        self._openai = openai
        self._buffer = ByteBuffer(MAX_UNREAD_BYTES)
        self._record = record
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._buffer.read(), headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        writing = asyncio.create_task(self._write())
        try:
            await super().__call__(scope, receive, send)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self) -> None:
        try:
            async with aclosing(self._events), aclosing(self._encode()) as encoded:
                async for event in encoded:
                    await self._buffer.put(event)
        finally:
            self._buffer.end()

    async def _encode(self) -> AsyncGenerator[bytes, None]:
        openai = self._openai
        yield encode_event(self._opening, openai=openai)
        try:
            async for event in self._events:
                yield encode_event(event, openai=openai)
        except APIError as error:
            self._record.code = error.code
            yield encode_error(error, self._answer_id, openai=openai)
        except Exception:
            self._record.code = "internal"
            log.exception("the stream of %s failed", self._answer_id)
            detail = f"A fault of the server; its log has it under {self._answer_id}."
            yield encode_error(api_error("internal", detail), self._answer_id, openai=openai)
        if openai:
            yield DONE


async def run_within(
    request: Request,
    timeout_s: float | None,
    work: Coroutine[Any, Any, T],
    beside: Coroutine[Any, Any, None] | None = None,
) -> T:
    """Return the result of `work`; cancel it at the deadline, or if the caller disconnects.

    The header X-Request-Timeout shortens the deadline. `beside` runs concurrently, and returns when
    the caller disconnects; None: only wait for the disconnect.

    Errors: APIError `deadline_exceeded`; ClientDisconnect; those of `beside`.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(beside or _wait_for_disconnect(request))
    both = (working, watching)
    try:
        given = request.headers.get("x-request-timeout")
        if timeout_s is not None and given is not None:
            timeout_s = min(timeout_s, _read_timeout(given))
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if watching.done():
            watching.result()
            raise ClientDisconnect
        detail = (
            f"The work was not done within {timeout_s:g} s and was cancelled: send less at once, "
            "or raise request_timeout_s (or X-Request-Timeout)."
        )
        raise api_error("deadline_exceeded", detail)
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _read_ahead(request: Request, body: ByteBuffer) -> None:
    """Read a body while its buffer has room; return when the caller disconnects after it."""
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        request.state.memory.cover(min(size, MAX_UNREAD_BYTES))
        await body.put(chunk)
    body.end()
    await _wait_for_disconnect(request)


def _read_timeout(given: str) -> float:
    """Parse the caller's timeout in seconds. Errors: APIError `invalid_request`."""
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        detail = f"X-Request-Timeout is {given!r}; send a number of seconds above 0."
        raise api_error("invalid_request", detail)
    return seconds


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def answer(request: Request, document: dict[str, Any]) -> Response:
    """Answer with the document in the encoding that the caller accepts."""
    find_record(request.scope).record_answer(document)
    media_type = choose_encoding(request.headers.get("accept", ""))
    return Response(ENCODERS[media_type](document), media_type=media_type)

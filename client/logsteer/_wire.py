"""Drivers of `_exchange.exchange`: one that blocks, one that awaits, the same line by line."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import TypeVar

import httpx
from pydantic import BaseModel

from logsteer._events import EventParser, ServerSentEvent
from logsteer._exchange import Deliver, Listen, Pause, Send, Steps

A = TypeVar("A", bound=BaseModel)


class Wire:
    """Carries out the steps of one exchange with an `httpx.Client`."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._response: httpx.Response | None = None
        self._events: Iterator[ServerSentEvent] = iter(())

    def run(self, steps: Steps[A]) -> Generator[A, None, None]:
        """Yield the answers that the steps deliver; raise what they raise."""
        try:
            step = next(steps)
            while True:
                if isinstance(step, Deliver):
                    yield step.answer
                    step = next(steps)
                    continue
                try:
                    reply = self._perform(step)
                except httpx.HTTPError as failure:
                    step = steps.throw(failure)
                else:
                    step = steps.send(reply)
        except StopIteration:
            return
        finally:
            self._close()

    def _perform(self, step: Send | Listen | Pause) -> httpx.Response | ServerSentEvent | None:
        if isinstance(step, Send):
            return self._send(step)
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        return next(self._events, None)

    def _send(self, step: Send) -> httpx.Response:
        self._close()
        response = self._http.send(step.request, stream=step.streams)
        self._response = response
        if step.streams and _is_event_stream(response):
            self._events = _events(response)
        else:
            response.read()
        return response

    def _close(self) -> None:
        if self._response is not None:
            self._response.close()


class AsyncWire:
    """Carries out the steps of one exchange with an `httpx.AsyncClient`, on asyncio."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._response: httpx.Response | None = None
        self._events: AsyncIterator[ServerSentEvent] | None = None

    async def run(self, steps: Steps[A]) -> AsyncGenerator[A, None]:
        """Yield the answers that the steps deliver; raise what they raise."""
        try:
            step = next(steps)
            while True:
                if isinstance(step, Deliver):
                    yield step.answer
                    step = next(steps)
                    continue
                try:
                    reply = await self._perform(step)
                except httpx.HTTPError as failure:
                    step = steps.throw(failure)
                else:
                    step = steps.send(reply)
        except StopIteration:
            return
        finally:
            await self._close()

    async def _perform(
        self, step: Send | Listen | Pause
    ) -> httpx.Response | ServerSentEvent | None:
        if isinstance(step, Send):
            return await self._send(step)
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        return await anext(self._events, None) if self._events else None

    async def _send(self, step: Send) -> httpx.Response:
        await self._close()
        response = await self._http.send(step.request, stream=step.streams)
        self._response = response
        if step.streams and _is_event_stream(response):
            self._events = _async_events(response)
        else:
            await response.aread()
        return response

    async def _close(self) -> None:
        if self._response is not None:
            await self._response.aclose()


def _is_event_stream(response: httpx.Response) -> bool:
    kind: str = response.headers.get("Content-Type", "")
    return response.is_success and kind.lower().startswith("text/event-stream")


def _events(response: httpx.Response) -> Iterator[ServerSentEvent]:
    parser = EventParser()
    for chunk in response.iter_bytes():
        yield from parser.feed(chunk)


async def _async_events(response: httpx.Response) -> AsyncIterator[ServerSentEvent]:
    parser = EventParser()
    async for chunk in response.aiter_bytes():
        for event in parser.feed(chunk):
            yield event

"""A server in memory that follows a script, and one face for both clients."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import httpx
import pytest

from logsteer import AsyncClient, Client
from logsteer.cli import main
from logsteer.schemas import SelftestAnswer, SelftestCheck

Handler = Callable[[httpx.Request], httpx.Response]


Output = pytest.CaptureFixture[str]


def answer(document: Any) -> "Script":
    """A server that answers everything with this document."""
    return Script(httpx.Response(200, json=document))


def run(server: Any, *argv: str) -> int:
    """Run the `logsteer` command against a server in memory; return its exit status."""
    return main(argv, transport=httpx.MockTransport(server))


class Caller:
    """Runs a method of either client and gives back what it gives back, streams as lists."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous

    def __call__(
        self, server: Handler | httpx.BaseTransport, use: Callable[[Any], Any], **settings: Any
    ) -> Any:
        in_memory = isinstance(server, httpx.BaseTransport)
        transport: Any = server if in_memory else httpx.MockTransport(server)
        if not self.asynchronous:
            with Client(transport=transport, **settings) as client:
                result = use(client)
                return list(result) if hasattr(result, "send") else result

        async def run() -> Any:
            async with AsyncClient(transport=transport, **settings) as client:
                result = use(client)
                if isinstance(result, Awaitable):
                    return await result
                return [event async for event in result]

        return asyncio.run(run())


class Script:
    """Answers requests with the given responses or errors in turn, the last one for ever."""

    def __init__(self, *replies: httpx.Response | Exception | Handler) -> None:
        self.replies = list(replies)
        self.requests: list[httpx.Request] = []
        self.bodies: list[bytes] = []

    @property
    def sent(self) -> Any:
        """The last request's body, read as JSON; None without one."""
        return json.loads(self.bodies[-1] or b"null")

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        # The mock transport has read the body already.
        self.bodies.append(request.content)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply(request) if callable(reply) else _fresh(reply)


def _fresh(response: httpx.Response) -> httpx.Response:
    # httpx changes a response while it sends it, so that one object serves only once.
    if not hasattr(response, "_content"):
        return response
    return httpx.Response(response.status_code, headers=response.headers, content=response.content)


def answer_selftest(
    monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]
) -> list[tuple[str, str | None, str | None]]:
    """Have self-tests find this; return the addresses and models that they are asked for."""
    asked = []

    async def run_selftest(client: AsyncClient, *, against: str | None) -> AsyncIterator[Any]:
        asked.append((client.base_url, client._model, against))
        for check in document["checks"]:
            yield SelftestCheck.model_validate(check)
        yield SelftestAnswer.model_validate(document)

    monkeypatch.setattr("logsteer.cli.models.run_selftest", run_selftest)
    return asked


def problem(code: str, status: int, **fields: Any) -> httpx.Response:
    """A problem response as the contract has it; `headers` are the response's."""
    headers = {"Content-Type": "application/problem+json", **fields.pop("headers", {})}
    document = {
        "type": f"urn:logsteer:problem:{code}",
        "title": "t",
        "status": status,
        "detail": f"detail of {code}",
        "code": code,
        "param": None,
        "retryable": False,
        "request_id": "from-server",
        **fields,
    }
    return httpx.Response(status, json=document, headers=headers)


def event_stream(text: str) -> httpx.Response:
    """A response of server-sent events."""
    return event_chunks([text.encode()])


def event_chunks(chunks: Iterable[bytes | Exception]) -> httpx.Response:
    """A response of server-sent events that comes in these chunks, or breaks with the error."""

    class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self) -> Any:
            for chunk in chunks:
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk

        async def __aiter__(self) -> Any:
            for chunk in self:
                yield chunk

    headers = {"Content-Type": "text/event-stream; charset=utf-8"}
    return httpx.Response(200, headers=headers, stream=Body())

"""Answers to writes that carry an `Idempotency-Key`: what is sent again is not applied again.

A client that lost an answer sends the same request with the same key, and gets the answer that the
first one had. Answers are kept in memory, up to a number of bytes and an age; those to requests
that failed are not, because these have changed nothing.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel

from logsteer.errors import APIError, api_error
from logsteer_server.http.answer_ledger import (
    AnotherRequestError,
    AnswerStore,
    KeptAnswer,
    SharedAnswers,
)

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
MAX_KEY = 255
PARAMETER: dict[str, Any] = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "description": "The same key with the same body is answered as the first time, and not applied "
    "again; with another body it is refused.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY},
}
"""How OpenAPI describes the header."""


class AnswerMemory:
    """Answers by caller and key: at most `max_bytes`, each for `keep_s` seconds.

    Where other processes take writes as well, `shared` knows of theirs.
    """

    def __init__(self, max_bytes: int, keep_s: float, shared: SharedAnswers | None = None) -> None:
        self._answers = AnswerStore(max_bytes, keep_s)
        self._shared = shared
        self._at_work: dict[bytes, tuple[bytes, asyncio.Future[None]]] = {}

    async def once(
        self, request: Request, body: BaseModel, work: Callable[[], Awaitable[Response]]
    ) -> Response:
        """Return what `work` answers, or has answered to the same request with the same key.

        One that comes while the first is at work waits for it. Errors: those of `work`; APIError
        `invalid_request` for a key that another request had.
        """
        given = request.headers.get(HEADER)
        if given is None:
            return await work()
        if not (0 < len(given) <= MAX_KEY and given.isascii() and given.isprintable()):
            detail = f"{HEADER} must be 1 to {MAX_KEY} printable characters of ASCII."
            raise api_error("invalid_request", detail, param=HEADER)
        key = _digest(request.headers.get("authorization", ""), given)
        asked = _digest(request.method, str(request.url.path), body.model_dump_json())
        while True:
            if (kept := self._answers.find(key)) is not None:
                return _replay(kept, asked)
            if (first := self._at_work.get(key)) is None:
                return await self._run(key, asked, work)
            if first[0] != asked:
                raise _refuse_key()
            await asyncio.shield(first[1])

    async def _run(
        self, key: bytes, asked: bytes, work: Callable[[], Awaitable[Response]]
    ) -> Response:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._at_work[key] = asked, ended
        try:
            if self._shared is None:
                return (await self._answer(key, asked, work))[0]
            return await self._run_shared(self._shared, key, asked, work)
        finally:
            del self._at_work[key]
            ended.set_result(None)

    async def _run_shared(
        self,
        shared: SharedAnswers,
        key: bytes,
        asked: bytes,
        work: Callable[[], Awaitable[Response]],
    ) -> Response:
        """Return what another process has answered, or else what `work` does."""
        try:
            kept = await shared.begin(key, asked)
        except AnotherRequestError:
            raise _refuse_key() from None
        if kept is not None:
            self._answers.keep(key, kept)
            return _replay(kept, asked)
        answer = None
        try:
            response, answer = await self._answer(key, asked, work)
            return response
        finally:
            shared.end(key, answer)

    async def _answer(
        self, key: bytes, asked: bytes, work: Callable[[], Awaitable[Response]]
    ) -> tuple[Response, KeptAnswer | None]:
        """Return what `work` answers, and what of it is kept."""
        response = await work()
        if response.status_code >= 300:
            return response, None
        kept = KeptAnswer(asked, response.status_code, bytes(response.body), response.media_type)
        self._answers.keep(key, kept)
        return response, kept


def _digest(*parts: str) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def _replay(kept: KeptAnswer, asked: bytes) -> Response:
    if kept.asked != asked:
        raise _refuse_key()
    return Response(kept.body, kept.status, {REPLAYED: "true"}, kept.media_type)


def _refuse_key() -> APIError:
    detail = f"This {HEADER} was sent with another request: give each request a key of its own."
    return api_error("invalid_request", detail, param=HEADER)

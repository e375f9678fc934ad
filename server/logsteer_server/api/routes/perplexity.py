"""`POST /perplexity/stream`: a text of any length in the body."""

import codecs
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from logsteer.errors import api_error
from logsteer.schemas import PerplexityStreamQuery
from logsteer_server.api.dependencies import (
    ModelsDep,
    StoresDep,
    expand_model,
)
from logsteer_server.api.respond import MAX_UNREAD_BYTES, ByteBuffer, respond
from logsteer_server.api.routing import KeyedRoute
from logsteer_server.tasks.perplexity import PerplexityStreamTask

READ_AT_ONCE = 2**16
"""Bytes of a text that are encoded together."""

router = APIRouter(route_class=KeyedRoute, tags=["scoring"])


@router.post(
    "/perplexity/stream",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"text/plain": {"schema": {"type": "string", "description": "UTF-8"}}},
        }
    },
)
async def perplexity_stream(
    query: Annotated[PerplexityStreamQuery, Query()],
    request: Request,
    models: ModelsDep,
    stores: StoresDep,
) -> Response:
    """Perplexity of the text in the body, of any length; answers with server-sent events.

    The server reads the body as fast as it scores it. Events follow the end of the body: the
    windows still running then, and the result.
    """
    body = ByteBuffer(MAX_UNREAD_BYTES)
    query, variant = await expand_model(request, query)
    task = PerplexityStreamTask(query, _read_text(body), models, stores)
    task.variant = variant
    return await respond(request, task, body=body)


async def _read_text(body: ByteBuffer) -> AsyncIterator[str]:
    """Yield the body as text. Errors: APIError for bytes that are not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    async for chunk in body.read():
        for start in range(0, len(chunk), READ_AT_ONCE):
            piece = chunk[start : start + READ_AT_ONCE]
            if text := _decode(decoder, piece, size):
                yield text
            size += len(piece)
    _decode(decoder, b"", size, final=True)


def _decode(
    decoder: codecs.IncrementalDecoder, piece: bytes, position: int, *, final: bool = False
) -> str:
    try:
        return decoder.decode(piece, final=final)
    except UnicodeDecodeError as error:
        detail = f"The body is not UTF-8 near byte {position + error.start}; send UTF-8."
        raise api_error("invalid_request", detail) from error

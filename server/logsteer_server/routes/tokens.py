"""`POST /tokenize` and `POST /detokenize`."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from logsteer.errors import api_error
from logsteer.schemas import (
    BosPolicy,
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from logsteer_server.http.dependencies import (
    LimitedRoute,
    ModelsDep,
    SettingsDep,
)
from logsteer_server.http.respond import answer
from logsteer_server.tasks.run import check_count
from logsteer_server.text.tokenizer import TextCodec

router = APIRouter(route_class=LimitedRoute, tags=["tokens"])


@router.post("/tokenize", responses={200: {"model": TokenizeAnswer}})
async def tokenize(
    body: TokenizeRequest, request: Request, models: ModelsDep, settings: SettingsDep
) -> Response:
    """The tokens of each text."""
    check_count("texts", len(body.texts or ()), settings.max_items)
    model = models.find(body.model)
    codec, info = model.require()
    if body.texts is not None:
        results = await asyncio.to_thread(_encode, codec, body.texts, body.bos)
        return answer(request, {"model": model.id, "results": results})
    bos: BosPolicy = "auto" if body.add_special_tokens else "never"
    results = await asyncio.to_thread(_encode, codec, [body.prompt or ""], bos)
    ids = results[0]["token_ids"]
    document = {
        "model": model.id,
        "results": results,
        "tokens": ids,
        "count": len(ids),
        "max_model_len": info.context_length,
    }
    return answer(request, document)


def _encode(codec: TextCodec, texts: list[str], bos: BosPolicy) -> list[dict[str, Any]]:
    results = []
    for encoded in codec.encode(texts):
        front = codec.bos_ids(bos, encoded.ids)
        ids = front + encoded.ids
        results.append(
            {
                "token_ids": ids,
                "tokens": [codec.piece(token_id) for token_id in ids],
                "offsets": [None] * len(front) + list(encoded.offsets),
            }
        )
    return results


@router.post("/detokenize", responses={200: {"model": DetokenizeAnswer}})
async def detokenize(
    body: DetokenizeRequest, request: Request, models: ModelsDep, settings: SettingsDep
) -> Response:
    """The text of each sequence of token ids, special tokens written out."""
    sequences = body.token_ids if body.token_ids is not None else [body.tokens or []]
    check_count("token_ids", len(sequences), settings.max_items)
    model = models.find(body.model)
    codec, info = model.require()
    for index, ids in enumerate(sequences):
        if ids and max(ids) >= info.vocab_size:
            detail = f"token_ids[{index}] has id {max(ids)}; the vocabulary ends at "
            detail += f"{info.vocab_size - 1}."
            raise api_error("invalid_request", detail, param=f"token_ids[{index}]")
    texts = await asyncio.to_thread(lambda: [codec.decode(ids) for ids in sequences])
    document: dict[str, Any] = {"model": model.id, "texts": texts}
    if body.tokens is not None:
        document["prompt"] = texts[0]
    return answer(request, document)

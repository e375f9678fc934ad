"""`POST /tokenize` and `POST /detokenize`."""

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request, Response

from logsteer.schemas import (
    BosPolicy,
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    list_conversations,
)
from logsteer_server.api.dependencies import (
    CapacityDep,
    ModelsDep,
    expand_model,
)
from logsteer_server.api.respond import answer, run_within
from logsteer_server.api.routing import KeyedRoute
from logsteer_server.models.admission import Reservation
from logsteer_server.tasks.planning import Cover, Planner
from logsteer_server.tasks.run import check_count
from logsteer_server.text.chat import ChatForm
from logsteer_server.text.prompts import find_longest_prompt
from logsteer_server.text.tokenizer import ENCODED_AT_ONCE, TextCodec, check_ids, split_sizes

BYTES_PER_TOKEN = 200
"""Of an answer while it is made: the token's id, text and offsets, as objects and as text."""

router = APIRouter(route_class=KeyedRoute, tags=["tokens"])


@router.post("/tokenize", responses={200: {"model": TokenizeAnswer}})
async def tokenize(
    body: TokenizeRequest, request: Request, models: ModelsDep, capacity: CapacityDep
) -> Response:
    """The tokens of each text."""
    conversations = list_conversations(body.messages) if body.messages else []
    check_count("texts", len(body.texts or conversations), capacity.settings.max_items)
    body, variant = await expand_model(request, body, ignores=True)
    model = models.find(body.model)
    codec, info = model.require()
    codec = codec.literal if body.special_tokens == "text" else codec
    planner = Planner(capacity, request.state.memory, request.state.memory)
    texts: Iterable[str] = body.texts or ([] if conversations else [body.prompt or ""])
    planner.cover_text(find_longest_prompt(body.texts or [body.prompt or ""], conversations))
    bos = body.bos
    if conversations:
        bos, form = "never", ChatForm.of(body)
        texts = (codec.render_chat(messages, form) for messages in conversations)
    elif body.prompt is not None:
        bos = "auto" if body.add_special_tokens else "never"
    work = planner.run(_encode, codec, texts, bos, request.state.memory)
    results = await run_within(request, capacity.settings.request_timeout_s, work)
    if not body.is_single:
        return answer(request, {"model": variant or model.id, "results": results})
    ids = results[0]["token_ids"]
    document = {
        "model": variant or model.id,
        "results": results,
        "tokens": ids,
        "count": len(ids),
        "max_model_len": info.context_length,
    }
    return answer(request, document)


def _encode(
    codec: TextCodec, texts: Iterable[str], bos: BosPolicy, memory: Reservation
) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    num_tokens = 0
    texts = list(texts)
    for part in split_sizes([len(text) for text in texts], ENCODED_AT_ONCE):
        for encoded in codec.encode(texts[part.start : part.stop]):
            front = codec.bos_ids(bos, encoded.ids)
            ids = front + encoded.ids
            num_tokens += len(ids)
            memory.cover(num_tokens * BYTES_PER_TOKEN)
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
    body: DetokenizeRequest, request: Request, models: ModelsDep, capacity: CapacityDep
) -> Response:
    """The text of each sequence of token ids, special tokens written out."""
    sequences = body.token_ids if body.token_ids is not None else [body.tokens or []]
    check_count("token_ids", len(sequences), capacity.settings.max_items)
    body, variant = await expand_model(request, body, ignores=True)
    model = models.find(body.model)
    codec, info = model.require()
    for index, ids in enumerate(sequences):
        check_ids(ids, info.vocab_size, f"token_ids[{index}]")
    planner = Planner(capacity, request.state.memory, request.state.memory)
    planner.cover_text(max(map(len, sequences), default=0))
    work = planner.run(_decode, codec, sequences, planner.cover)
    texts = await run_within(request, capacity.settings.request_timeout_s, work)
    document: dict[str, Any] = {"model": variant or model.id, "texts": texts}
    if body.tokens is not None:
        document["prompt"] = texts[0]
    return answer(request, document)


def _decode(codec: TextCodec, sequences: list[list[int]], cover: Cover) -> list[str]:
    texts = []
    for ids in sequences:
        cover(0)
        texts.append(codec.decode(ids))
    return texts

"""`POST /tokenize` and `POST /detokenize`."""

from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from logsteer.schemas import (
    BosPolicy,
    DetokenizeAnswer,
    DetokenizeRequest,
    Message,
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
from logsteer_server.tasks.planning import Planner, Steps
from logsteer_server.tasks.run import check_count
from logsteer_server.text.chat import ChatForm
from logsteer_server.text.prompts import find_longest_prompt
from logsteer_server.text.tokenizer import ENCODED_AT_ONCE, TextCodec, check_ids, split_sizes

T = TypeVar("T")

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
    texts = body.texts or ([] if conversations else [body.prompt or ""])
    planner.cover_text(find_longest_prompt(texts, conversations))
    bos = body.bos
    if conversations:
        bos, form = "never", ChatForm.of(body)
        texts = await _run(request, planner, _render(codec, conversations, form))
    elif body.prompt is not None:
        bos = "auto" if body.add_special_tokens else "never"
    results = await _run(request, planner, _encode(codec, texts, bos))
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


async def _run(request: Request, planner: Planner, steps: Steps[T]) -> T:
    """Return what the steps come to, within the deadline; they yield bytes of the answer."""
    work = planner.advance(steps)
    return await run_within(request, planner.settings.request_timeout_s, work)


def _render(
    codec: TextCodec, conversations: list[list[Message]], form: ChatForm
) -> Steps[list[str]]:
    texts = []
    for messages in conversations:
        texts.append(codec.render_chat(messages, form))
        yield 0
    return texts


def _encode(codec: TextCodec, texts: list[str], bos: BosPolicy) -> Steps[list[dict[str, Any]]]:
    results: list[dict[str, Any]] = []
    num_tokens = 0
    for part in split_sizes([len(text) for text in texts], ENCODED_AT_ONCE):
        for encoded in codec.encode(texts[part.start : part.stop]):
            front = codec.bos_ids(bos, encoded.ids)
            ids = front + encoded.ids
            num_tokens += len(ids)
            yield num_tokens * BYTES_PER_TOKEN
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
    texts = await _run(request, planner, _decode(codec, sequences))
    document: dict[str, Any] = {"model": variant or model.id, "texts": texts}
    if body.tokens is not None:
        document["prompt"] = texts[0]
    return answer(request, document)


def _decode(codec: TextCodec, sequences: list[list[int]]) -> Steps[list[str]]:
    texts = []
    for ids in sequences:
        texts.append(codec.decode(ids))
        yield 0
    return texts

"""Prompts as tokens, and what does not fit into a model's context."""

from collections.abc import Iterator, Sequence
from typing import Any

from logsteer.errors import api_error
from logsteer.schemas import BosPolicy, OverflowPolicy
from logsteer_server.text.tokenizer import TextCodec


def read_prompts(
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    codec: TextCodec,
    vocab_size: int,
    bos: BosPolicy = "auto",
) -> Iterator[tuple[str | None, list[int]]]:
    """Yield text and tokens of each prompt; ids are taken as they are, and have no text yet.

    Errors: APIError `invalid_request` for ids beyond the vocabulary.
    """
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    given: list[Any] = [prompt] if is_one else list(prompt)
    texts = [entry for entry in given if isinstance(entry, str)]
    encoded = codec.encode_prompts(texts, bos)
    for entry in given:
        if isinstance(entry, str):
            yield entry, next(encoded)
            continue
        ids = list(entry)
        if not ids or max(ids) >= vocab_size:
            detail = f"prompt must have token ids from 0 to {vocab_size - 1}, at least one."
            raise api_error("invalid_request", detail, param="prompt")
        yield None, ids


def fit_prompt(
    ids: list[int], max_tokens: int, limit: int, policy: OverflowPolicy = "error"
) -> tuple[list[int], int]:
    """Return the prompt's tokens as far as they fit, and how many were dropped at the left.

    With 6 tokens, `max_tokens` 3 and a limit of 8, `truncate_left` drops one token.

    Errors: APIError `context_too_long` where nothing may be dropped, or nothing would be left.
    """
    excess = len(ids) + max_tokens - limit
    if excess <= 0:
        return ids, 0
    if policy == "truncate_left" and excess < len(ids):
        return ids[excess:], excess
    detail = (
        f"The prompt has {len(ids)} tokens and max_tokens is {max_tokens}; this model's context "
        f"holds {limit}: shorten one of them."
    )
    raise api_error("context_too_long", detail, param="max_tokens")

"""Prompts as tokens, cut to fit into a model's context."""

from collections.abc import Iterator, Sequence
from typing import Any

from logsteer.errors import api_error
from logsteer.schemas import BosPolicy, Message, OverflowPolicy
from logsteer_server.text.chat import count_chars
from logsteer_server.text.tokenizer import TextCodec, check_ids


def read_prompts(
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    codec: TextCodec,
    bos: BosPolicy = "auto",
) -> Iterator[tuple[str | None, list[int]]]:
    """Yield text and tokens of each prompt; for a prompt of ids, the text is None."""
    prompts: list[Any] = [prompt] if is_one_prompt(prompt) else list(prompt)
    texts = [entry for entry in prompts if isinstance(entry, str)]
    encoded = codec.encode_prompts(texts, bos)
    for entry in prompts:
        if isinstance(entry, str):
            yield entry, next(encoded)
            continue
        yield None, list(entry)


def find_longest_prompt(
    prompts: Sequence[str | list[int]], conversations: Sequence[Sequence[Message]] = ()
) -> int:
    """Return the number of characters, or ids, of the longest prompt or conversation."""
    return max((*map(len, prompts), *map(count_chars, conversations)), default=0)


def is_one_prompt(prompt: str | Sequence[Any]) -> bool:
    """Return whether this is one prompt, as text or ids, and not a list of prompts."""
    return isinstance(prompt, str) or isinstance(prompt[0], int)


def check_prompt(text: str | None, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse a prompt without tokens, or with unknown ids.

    Errors: APIError `invalid_request`.
    """
    if text == "" or not ids:
        raise api_error("invalid_request", "The prompt is empty: give it a token, or leave it out.")
    if text is None:
        check_ids(ids, vocab_size)


def fit_prompt(
    ids: list[int], max_tokens: int, limit: int, policy: OverflowPolicy = "error"
) -> tuple[list[int], int]:
    """Return the prompt's tokens that fit, and the number dropped at the left.

    With 6 tokens, `max_tokens` 3 and a limit of 8, `truncate_left` drops one token.

    Errors: APIError `context_too_long` if no token may be dropped, or none would be left.
    """
    excess = len(ids) + max_tokens - limit
    if excess <= 0:
        return ids, 0
    if policy == "truncate_left" and excess < len(ids):
        return ids[excess:], excess
    more = f" and max_tokens is {max_tokens}" if max_tokens else ""
    detail = (
        f"The prompt has {len(ids)} tokens{more}; this model's context holds {limit}: shorten it."
    )
    raise api_error("context_too_long", detail)

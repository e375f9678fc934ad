"""Sums over scored tokens, and the perplexities that follow from them."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logsteer.schemas.perplexity import summarize_sums
from logsteer_server.text.tokenizer import Offsets, TextCodec

Counts = npt.NDArray[np.int64]
"""[T, 3]: bytes, characters and word starts that each token covers."""


def count_text(text: str, offsets: Offsets, before: str = "") -> Counts:
    """Count what each of T tokens covers: from its first character to the next token's.

    If several tokens are bytes of one character, it counts for the last of them, so that the counts
    of consecutive tokens add up to those of their text. `before`: the character before `text`.
    """
    starts = np.minimum.accumulate(
        np.array([*(start for start, _ in offsets[1:]), len(text)], dtype=np.int64)[::-1]
    )[::-1]
    edges = np.concatenate([[0], starts])
    per_char = np.zeros((len(text) + 1, 3), dtype=np.int64)
    if text:
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        per_char[1:, 0] = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
        per_char[1:, 1] = 1
        first = 0 if not before or before.isspace() or text[0].isspace() else 1
        for match in list(re.finditer(r"\S+", text))[first:]:
            per_char[match.start() + 1, 2] = 1
    return np.diff(per_char.cumsum(axis=0)[edges], axis=0)[: len(offsets)]


def count_ids(ids: Sequence[int], codec: TextCodec) -> Counts:
    """Count what each of T tokens covers of their decoded text, as `count_text`.

    A token covers what it adds to the text before it. A BOS at the beginning covers nothing.
    """
    own = ids[1:] if list(ids[:1]) == [codec.bos_id] else ids
    text = codec.decode(own)
    starts = codec.find_starts(own)
    offsets = [(start, start) for start in [0] * (len(ids) - len(own)) + starts]
    return count_text(text, offsets)


@dataclass(slots=True)
class TextSums:
    """Sufficient statistics of scored tokens; the sums of shards add up to those of the whole."""

    sum_logprob: float = 0.0
    sum_squared_logprob: float = 0.0
    num_tokens: int = 0
    num_scored: int = 0
    num_bytes: int = 0
    num_chars: int = 0
    num_words: int = 0

    def add_scores(self, logprobs_R: npt.NDArray[np.float32], counts_R3: Counts) -> None:
        """Add R scored tokens; sums are in float64."""
        values = logprobs_R.astype(np.float64)
        self.sum_logprob += float(values.sum())
        self.sum_squared_logprob += float((values * values).sum())
        self.num_scored += len(values)
        num_bytes, num_chars, num_words = counts_R3.sum(axis=0).tolist()
        self.num_bytes += num_bytes
        self.num_chars += num_chars
        self.num_words += num_words

    def merge(self, other: "TextSums") -> None:
        """Add the sums of another text."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def summarize(self) -> dict[str, Any]:
        """Return the fields of `TextScore`; non-finite values are None, with a flag."""
        return summarize_sums({name: getattr(self, name) for name in self.__slots__})


def log_sum_exp(values: Sequence[float]) -> float:
    """Return log(sum exp(v)), numerically stable; -inf if all values are."""
    top = max(values)
    if not math.isfinite(top):
        return top
    return top + math.log(math.fsum(math.exp(v - top) for v in values))

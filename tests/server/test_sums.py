"""Sums, coverage counts, and texts that arrive in pieces."""

import math
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.text.incremental import IncrementalEncoder
from logsteer_server.text.sums import TextSums, count_text, log_sum_exp
from logsteer_server.text.tokenizer import TextCodec
from tests.conftest import DEMO_MODEL, STORIES_MODEL, needs_shared

logprob_arrays = st.lists(st.floats(-30, 0, width=32), min_size=1, max_size=40).map(
    lambda values: np.array(values, dtype=np.float32)
)


def tally(logprobs: np.ndarray) -> TextSums:
    result = TextSums()
    result.add_scores(logprobs, np.ones((len(logprobs), 3), dtype=np.int64))
    return result


@given(logprob_arrays, logprob_arrays)
def test_tallies_of_shards_merge_to_that_of_the_whole(a: np.ndarray, b: np.ndarray) -> None:
    whole, merged = tally(np.concatenate([a, b])), tally(a)
    merged.merge(tally(b))
    for name, value in whole.summarize().items():
        assert merged.summarize()[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@given(logprob_arrays)
def test_stderr_is_the_delta_method_on_the_mean(logprobs: np.ndarray) -> None:
    summary = tally(logprobs).summarize()
    if len(logprobs) == 1:
        assert summary["stderr"] is None
        return
    values = logprobs.astype(np.float64)
    expected = math.exp(-values.mean()) * values.std(ddof=1) / math.sqrt(len(values))
    # The sums of squares cancel, so what is left of equal values is rounding.
    assert summary["stderr"] == pytest.approx(
        expected, rel=1e-5, abs=1e-5 * math.exp(-values.mean())
    )


def test_what_is_not_finite_is_null_with_a_flag() -> None:
    assert TextSums().summarize()["flags"] == ["nothing_scored"]
    broken = tally(np.array([-np.inf], dtype=np.float32)).summarize()
    assert (broken["sum_logprob"], broken["perplexity"]) == (None, None)
    assert broken["flags"] == ["non_finite"]


@given(st.lists(st.floats(-700, 0), min_size=1, max_size=5))
def test_log_sum_exp(values: list[float]) -> None:
    assert math.exp(log_sum_exp(values)) == pytest.approx(sum(map(math.exp, values)), rel=1e-9)


@cache
def load_codec() -> TextCodec:
    return TextCodec.load(str(DEMO_MODEL))


@given(
    st.text(st.characters(codec="utf-8") | st.sampled_from("ab \n"), max_size=80), st.integers(0)
)
def test_counts_of_tokens_add_up_to_their_text(text: str, cut: int) -> None:
    wanted = [len(text.encode()), len(text), len(text.split())]
    counts = count_text(text, load_codec().encode([text])[0].offsets)
    if len(counts):
        assert counts.sum(axis=0).tolist() == wanted
        assert (counts >= 0).all()
    cut %= len(text) + 1  # a word that goes on counts once
    pieces = (text[:cut], ""), (text[cut:], text[cut - 1 : cut] if cut else "")
    found = [count_text(piece, [(0, len(piece))], before) for piece, before in pieces]
    assert sum(counts.sum(axis=0) for counts in found).tolist() == wanted


def check_pieces(codec: TextCodec, text: str, cuts: list[int]) -> None:
    encoder = IncrementalEncoder(codec, chunk_chars=60, margin_chars=24)
    edges = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    pieces = [encoder.feed(text[a:b]) for a, b in pairwise(edges)]
    pieces.append(encoder.finish())
    whole = codec.encode([text])[0]
    assert [i for piece in pieces for i in piece.ids] == whole.ids
    counts = np.concatenate([piece.counts for piece in pieces])
    assert (counts == count_text(text, whole.offsets)).all()
    assert encoder.seams_moved == 0


words = st.text("abcdefghijklmnop", min_size=1, max_size=9)
prose = st.lists(words | st.sampled_from([",", "\n", "  ", "é", "日本", "🙂"]), max_size=120).map(
    " ".join
)


@given(prose, st.lists(st.integers(0, 2000), max_size=12))
def test_a_text_in_pieces_has_the_tokens_of_the_whole(text: str, cuts: list[int]) -> None:
    check_pieces(load_codec(), text, cuts)


@needs_shared
def test_a_text_in_pieces_has_the_tokens_of_the_whole_with_a_llama_tokenizer() -> None:
    codec = TextCodec.load(str(STORIES_MODEL))
    text = (STORIES_MODEL.parents[1] / "data" / "wikitext2-valid.txt").read_text()[:40_000]
    check_pieces(codec, text, list(range(0, 40_000, 997)))


def test_memory_of_an_encoder_does_not_grow_with_its_text() -> None:
    encoder = IncrementalEncoder(load_codec(), chunk_chars=1000, margin_chars=100)
    sizes = []
    for _ in range(300):
        encoder.feed("Once upon a time there was a cat. " * 5)
        sizes.append(len(encoder._text))
    assert max(sizes[20:]) <= max(sizes[:20])

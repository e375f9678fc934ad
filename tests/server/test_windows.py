"""Each window protocol against the arithmetic of its reference implementation.

The reference and the cutter see the same log-probabilities: a function of everything that the
model would have read before the token."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logsteer.schemas import Protocol
from logsteer_server.text.incremental import IncrementalEncoder
from logsteer_server.text.sums import TextSums, count_text, log_sum_exp
from logsteer_server.text.tokenizer import TextCodec
from logsteer_server.text.windows import Window, WindowCutter, Windowing
from tests.conftest import STORIES_MODEL, needs_shared
from tests.refusals import refused
from tests.server.scripted_model import load_codec

BOS = 1


def logprob(read: Sequence[int], target: int) -> float:
    """A made-up log-probability that depends on every token read and on the target."""
    return -0.1 - (hash((tuple(read), target)) % 1000) / 250


def cut(
    protocol: Protocol,
    ids: Sequence[int],
    length: int,
    stride: int | None,
    step: int,
    rows: int | None = None,
) -> list[Window]:
    cutter = WindowCutter(Windowing(protocol, length, stride, rows).fit(length), BOS)
    windows = [w for i in range(0, len(ids), step) for w in cutter.feed(ids[i : i + step])]
    return windows + cutter.finish()


def score(windows: Sequence[Window]) -> dict[int, float]:
    """Position -> log-probability; fails where a position is scored twice."""
    found: dict[int, float] = {}
    for window in windows:
        first_row = len(window.tokens) - len(window.targets)
        for row, target in enumerate(window.targets):
            position = window.first_scored + row
            assert position not in found
            found[position] = logprob(window.tokens[: first_row + row + 1], target)
    return found


def score_as_transformers(ids: Sequence[int], length: int, stride: int) -> dict[int, float]:
    """The loop of the perplexity guide of Hugging Face transformers, labels masked with -100."""
    found: dict[int, float] = {}
    previous_end = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        window = ids[begin:end]
        labels = [-100] * (len(window) - (end - previous_end)) + list(
            window[len(window) - (end - previous_end) :]
        )
        for position in range(1, len(window)):  # the shift by one inside the model's loss
            if labels[position] != -100:
                found[begin + position] = logprob(window[:position], labels[position])
        previous_end = end
        if end == len(ids):
            break
    return found


def score_as_gptq(ids: Sequence[int], length: int) -> float:
    """Perplexity as in GPTQ's evaluation: the mean of the windows' mean losses, exponentiated."""
    losses = []
    for index in range(len(ids) // length):
        window = ids[index * length : (index + 1) * length]
        mean = sum(-logprob(window[:i], window[i]) for i in range(1, length)) / (length - 1)
        losses.append(mean * length)
    return math.exp(sum(losses) / (len(losses) * length))


def score_as_llamacpp(ids: Sequence[int], length: int) -> tuple[float, int]:
    """Summed loss and count as in llama.cpp's perplexity tool."""
    total, count, first = 0.0, 0, length // 2
    for chunk in range(len(ids) // length):
        start = chunk * length
        window = [BOS, *ids[start + 1 : start + length]]
        for j in range(first, length - 1):
            total -= logprob(window[: j + 1], ids[start + j + 1])
        count += length - first - 1
    return total, count


def score_as_exllama(ids: Sequence[int], length: int, stride: int, rows: int) -> tuple[float, int]:
    """Summed log-probability and count as in ExLlamaV3's script: rows first, then their scores."""
    starts = range(0, len(ids) - length, stride)
    read = [ids[start : start + length] for start in starts][:rows]
    scores = [logprob(row[:place], row[place]) for row in read for place in range(1, length)]
    return sum(scores), len(scores)


sequences = st.lists(st.integers(3, 99), min_size=1, max_size=70)
lengths = st.integers(2, 16)
steps = st.integers(1, 80)


@given(sequences, lengths, st.data(), steps)
def test_sliding_is_the_loop_of_the_transformers_guide(
    ids: list[int], length: int, data: st.DataObject, step: int
) -> None:
    stride = data.draw(st.integers(1, length))
    ours = score(cut("sliding", ids, length, stride, step))
    assert ours == score_as_transformers(ids, length, stride)


@given(sequences, lengths, steps)
def test_rolling_is_the_windows_of_lm_eval(ids: list[int], length: int, step: int) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    expected = [
        make_disjoint_window(window) for window in get_rolling_token_windows(ids, BOS, length, 1)
    ]
    windows = cut("rolling", ids, length, None, step)
    assert [list(w.targets) for w in windows] == [targets for _, targets in expected]
    assert [list(w.tokens) for w in windows] == [(c + t)[:-1] for c, t in expected]
    assert sorted(score(windows)) == list(range(len(ids)))


@given(st.lists(st.integers(3, 99), min_size=16, max_size=70), lengths, steps)
def test_disjoint_is_the_perplexity_of_gptq(ids: list[int], length: int, step: int) -> None:
    ours = score(cut("disjoint", ids, length, None, step))
    perplexity = math.exp(-sum(ours.values()) / len(ours))
    assert perplexity == pytest.approx(score_as_gptq(ids, length), rel=1e-12)


@given(st.lists(st.integers(3, 99), min_size=32, max_size=90), st.integers(4, 16), steps)
def test_llamacpp_is_the_sum_of_llama_perplexity(ids: list[int], length: int, step: int) -> None:
    ours = score(cut("llamacpp", ids, length, None, step))
    total, count = score_as_llamacpp(ids, length)
    assert (len(ours), -sum(ours.values())) == (count, pytest.approx(total, rel=1e-12))


def test_llamacpp_refuses_a_text_of_less_than_two_windows() -> None:
    with refused("invalid_request", "at least 20 tokens"):
        cut("llamacpp", list(range(19)), 10, None, 19)


@given(sequences, lengths, st.integers(1, 40), st.integers(1, 9), steps)
def test_exl3_is_the_sum_of_exllamas_script(
    ids: list[int], length: int, stride: int, rows: int, step: int
) -> None:
    windows = cut("exl3", ids, length, stride, step, rows)
    ours = [value for window in windows for value in score([window]).values()]
    total, count = score_as_exllama(ids, length, stride, rows)
    assert (len(ours), sum(ours)) == (count, pytest.approx(total, rel=1e-12))


def test_exl3_has_the_numbers_of_the_script_unless_told() -> None:
    assert Windowing("exl3", 8).fit(64) == Windowing("exl3", 8, 8, 100)
    assert Windowing("exl3").fit(64) == Windowing("exl3", 64, 64, 100)
    # Its last token is read by no row: 8 tokens are one row of 4, not two.
    assert [(w.start, w.end) for w in cut("exl3", range(8), 4, None, 8)] == [(0, 4)]
    assert [(w.start, w.end) for w in cut("exl3", range(9), 4, None, 8)] == [(0, 4), (4, 8)]
    assert [len(w.targets) for w in cut("exl3", range(13), 8, 2, 13)] == [7, 7, 7]  # again


@given(
    st.sampled_from(
        [("sliding", 1), ("rolling", None), ("disjoint", None), ("exl3", 1), ("exl3", 40)]
    ),
    st.lists(st.integers(3, 99), min_size=1, max_size=500),
    lengths,
)
def test_a_cutter_keeps_no_more_than_two_windows(
    moves: tuple[Protocol, int | None], ids: list[int], length: int
) -> None:
    protocol, stride = moves
    cutter = WindowCutter(Windowing(protocol, length, stride, rows=3).fit(length), BOS)
    for token in ids:
        cutter.feed([token])
        assert len(cutter._kept) <= 2 * length + 1


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

"""Each window protocol against the arithmetic of its reference implementation.

The reference and the cutter see the same log-probabilities: a function of everything that the
model would have read before the token.
"""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logsteer.errors import APIError
from logsteer.schemas import Protocol
from logsteer_server.text.windows import Window, Windowing, make_cutter

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
    cutter = make_cutter(Windowing(protocol, length, stride, rows).fit(length), BOS)
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
    with pytest.raises(APIError, match="at least 20 tokens") as caught:
        cut("llamacpp", list(range(19)), 10, None, 19)
    assert caught.value.code == "invalid_request"


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
    cutter = make_cutter(Windowing(protocol, length, stride, rows=3).fit(length), BOS)
    for token in ids:
        cutter.feed([token])
        assert len(cutter._kept) <= 2 * length + 1

"""Which tokens of a step are steered, in every chunking and after preemption."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.contract.plan import Positions
from logsteer_server.engines.vllm.traces import TraceRecorder

KINDS = st.sampled_from(
    [
        Positions("all"),
        Positions("prompt"),
        Positions("completion"),
        Positions("predicting"),
        Positions("last_prompt"),
        Positions("slices", ((2, 4), (7, 9))),
        Positions("slices", ((3, 5),)),
    ]
)


def run(recorder: TraceRecorder, steps: list[dict[str, tuple[int, int]]]) -> dict[str, set[int]]:
    """The steered positions of each request, over steps of [begin, end) by request."""
    found: dict[str, set[int]] = {}
    for step in steps:
        names = list(step)
        starts = np.cumsum([0, *(end - begin for begin, end in step.values())])
        computed = np.array([begin for begin, _ in step.values()])
        tokens = recorder.find(names, starts, computed)
        recorder.record({1: np.full(len(tokens.index_t), 0.5, np.float32)})
        for place in tokens.index_t:
            row = int(np.searchsorted(starts, place, side="right")) - 1
            found.setdefault(names[row], set()).add(int(computed[row] + place - starts[row]))
    return found


@given(
    positions=KINDS,
    prompt_len=st.integers(1, 9),
    cuts=st.lists(st.integers(1, 11), max_size=4),
    cached=st.integers(0, 5),
)
def test_chunks_steer_what_the_whole_would(
    positions: Positions, prompt_len: int, cuts: list[int], cached: int
) -> None:
    recorder = TraceRecorder(3)
    recorder.begin("a", 2, positions, prompt_len, cached)
    edges = sorted({cached, 12, *(cut for cut in cuts if cut > cached)})
    steps = [
        {"other": (0, 3), "a": (first, last), "last": (4, 5)} for first, last in pairwise(edges)
    ]
    wanted = set(np.nonzero(positions.mask(0, 12, prompt_len))[0].tolist())
    new = {position for position in wanted if position >= cached}
    assert run(recorder, steps).get("a", set()) == new
    steered, layers = recorder.read("a")
    assert steered == len(wanted)
    assert layers == ({1: (len(new), 0.5 * len(new))} if new else {})


@given(positions=KINDS, prompt_len=st.integers(1, 9))
def test_one_token_is_steered_where_its_sequence_is(positions: Positions, prompt_len: int) -> None:
    one_by_one = [positions.holds(position, prompt_len) for position in range(12)]
    assert one_by_one == positions.mask(0, 12, prompt_len).tolist()


def test_tokens_that_are_read_again_count_once() -> None:
    recorder = TraceRecorder(2)
    recorder.begin("a", 1, Positions(), 4, 0)
    run(recorder, [{"a": (0, 3)}, {"a": (0, 4)}, {"a": (4, 5)}])
    assert recorder.read("a") == (5, {1: (5, 2.5)})


def test_entries_are_used_again_and_grow() -> None:
    recorder = TraceRecorder(2)
    for n in range(100):
        recorder.begin(f"r{n}", n + 1, Positions(), 4, 0)
    step = {f"r{n}": (n, n + 1) for n in range(0, 100, 7)}
    assert {n: {int(n[1:])} for n in step} == run(recorder, [step])
    for n in range(100):
        recorder.end(f"r{n}")
    assert len(recorder) == 0
    assert run(recorder, [step]) == {}
    recorder.begin("again", 5, Positions(), 4, 0)
    assert recorder.read("again") == (0, {})


@given(positions=KINDS, prompt_len=st.integers(1, 6), steps=st.integers(1, 150))
def test_decoding_step_by_step_records_every_token(
    positions: Positions, prompt_len: int, steps: int
) -> None:
    recorder = TraceRecorder(3)
    recorder.begin("a", 2, positions, prompt_len, 0)
    recorder.begin("b", 1, Positions(), 3, 0)
    decoding = [
        {"a": (prompt_len + n, prompt_len + n + 1), "b": (3 + n, 4 + n)} for n in range(steps)
    ]
    found = run(recorder, [{"a": (0, prompt_len), "b": (0, 3)}, *decoding])
    wanted = set(np.nonzero(positions.mask(0, prompt_len + steps, prompt_len))[0].tolist())
    assert found.get("a", set()) == wanted
    assert found["b"] == set(range(3 + steps))
    assert recorder.read("a") == (
        len(wanted),
        {1: (len(wanted), len(wanted) / 2)} if wanted else {},
    )
    assert recorder.read("b") == (3 + steps, {1: (3 + steps, (3 + steps) / 2)})


def test_a_request_that_begins_again_a_token_at_a_time_counts_nothing_twice() -> None:
    recorder = TraceRecorder(2)
    recorder.begin("a", 1, Positions(), 2, 0)
    run(recorder, [{"a": (n, n + 1)} for n in (0, 1, 2, 0, 1, 2, 3, 4)])
    assert recorder.read("a") == (5, {1: (5, 2.5)})


def test_the_example_of_the_recorder() -> None:
    recorder = TraceRecorder(8)
    recorder.begin("a", 2, Positions("all"), prompt_len=4, num_cached=0)
    found = recorder.find(["b", "a"], np.array([0, 2, 5]), np.array([5, 0]))
    assert found.index_t.tolist() == [2, 3, 4]
    assert found.slots_t.tolist() == [2, 2, 2]
    recorder.record({7: np.array([0.1, 0.2, 0.3], np.float32)})
    assert recorder.read("a") == (3, {7: (3, pytest.approx(0.6))})
    again = recorder.find(["a"], np.array([0, 4]), np.array([0]))
    assert again.index_t.tolist() == [0, 1, 2, 3]
    recorder.record({7: np.array([9, 9, 9, 0.5], np.float32)})
    assert recorder.read("a") == (4, {7: (4, pytest.approx(1.1))})

"""Which tokens of a step are steered, in every chunking and after preemption."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.contract.plan import Positions
from logsteer_server.engines.vllm.steering import TraceRecorder
from logsteer_server.engines.vllm.tables import TraceSums

KINDS = st.sampled_from(
    [
        Positions("all"),
        Positions("prompt"),
        Positions("completion"),
        Positions("predicting"),
        Positions("last_prompt"),
        Positions("slices", ((2, 4), (7, 9))),
        Positions("slices", ((3, 5),)),
        Positions("last", number=2),
        Positions("every", number=3),
        Positions("all", within=(Positions("every", number=2),)),
        Positions("completion", without=(Positions("every", number=2),)),
    ]
)


class Rank:
    """A recorder and the sums that the tables keep: at layer 1 every token changes by half."""

    def __init__(self) -> None:
        self.recorder = TraceRecorder()
        self.sums = TraceSums(64, 3, torch.empty(0))
        self.entries: dict[str, int] = {}

    def begin(
        self, name: str, slot: int, positions: Positions, prompt_len: int, num_cached: int
    ) -> None:
        entry = self.entries[name] = self.sums.take()
        self.recorder.begin(name, entry, [(slot, positions)], prompt_len, num_cached)

    def end(self, name: str) -> None:
        self.recorder.end(name)
        self.sums.release(self.entries.pop(name))

    def run(self, steps: list[dict[str, tuple[int, int]]]) -> dict[str, set[int]]:
        """The steered positions of each request, over steps of [begin, end) by request."""
        found: dict[str, set[int]] = {}
        for step in steps:
            names = list(step)
            starts = np.cumsum([0, *(end - begin for begin, end in step.values())])
            computed = np.array([begin for begin, _ in step.values()])
            tokens = self.recorder.find(names, starts, computed)
            entries = tokens.entries_t[tokens.is_new_t]
            self.sums.add(1, entries, torch.full((1, len(entries)), 0.5))
            for place in tokens.index_t:
                row = int(np.searchsorted(starts, place, side="right")) - 1
                found.setdefault(names[row], set()).add(int(computed[row] + place - starts[row]))
        return found

    def read(self, name: str) -> tuple[int, dict[int, tuple[int, float]]]:
        """How many tokens were steered; by layer, how many changed, and their ratios' sum."""
        sums_Ln = self.sums.fetch([self.entries[name]])[0].tolist()
        layers = {n: (int(count), total) for n, (count, total) in enumerate(sums_Ln) if count}
        return sum(self.recorder.count(name, 2**31)), layers


@given(
    positions=KINDS,
    prompt_len=st.integers(1, 9),
    cuts=st.lists(st.integers(1, 11), max_size=4),
    cached=st.integers(0, 5),
)
def test_chunks_steer_what_the_whole_would(
    positions: Positions, prompt_len: int, cuts: list[int], cached: int
) -> None:
    rank = Rank()
    rank.begin("a", 2, positions, prompt_len, cached)
    edges = sorted({cached, 12, *(cut for cut in cuts if cut > cached)})
    steps = [
        {"other": (0, 3), "a": (first, last), "last": (4, 5)} for first, last in pairwise(edges)
    ]
    wanted = set(np.nonzero(positions.mask(0, 12, prompt_len))[0].tolist())
    new = {position for position in wanted if position >= cached}
    assert rank.run(steps).get("a", set()) == new
    steered, layers = rank.read("a")
    assert steered == len(wanted)
    assert layers == ({1: (len(new), 0.5 * len(new))} if new else {})


@given(positions=KINDS, prompt_len=st.integers(1, 9))
def test_one_token_is_steered_where_its_sequence_is(positions: Positions, prompt_len: int) -> None:
    one_by_one = [positions.holds(position, prompt_len) for position in range(12)]
    assert one_by_one == positions.mask(0, 12, prompt_len).tolist()


def test_tokens_that_are_read_again_count_once() -> None:
    rank = Rank()
    rank.begin("a", 1, Positions(), 4, 0)
    rank.run([{"a": (0, 3)}, {"a": (0, 4)}, {"a": (4, 5)}])
    assert rank.read("a") == (5, {1: (5, 2.5)})


def test_entries_are_used_again_and_grow() -> None:
    rank = Rank()
    for n in range(60):
        rank.begin(f"r{n}", n + 1, Positions(), 4, 0)
    step = {f"r{n}": (n, n + 1) for n in range(0, 60, 7)}
    assert {n: {int(n[1:])} for n in step} == rank.run([step])
    for n in range(60):
        rank.end(f"r{n}")
    assert len(rank.recorder) == 0
    assert rank.run([step]) == {}
    rank.begin("again", 5, Positions(), 4, 0)
    assert rank.read("again") == (0, {})


@given(positions=KINDS, prompt_len=st.integers(1, 6), steps=st.integers(1, 150))
def test_decoding_step_by_step_records_every_token(
    positions: Positions, prompt_len: int, steps: int
) -> None:
    rank = Rank()
    rank.begin("a", 2, positions, prompt_len, 0)
    rank.begin("b", 1, Positions(), 3, 0)
    decoding = [
        {"a": (prompt_len + n, prompt_len + n + 1), "b": (3 + n, 4 + n)} for n in range(steps)
    ]
    found = rank.run([{"a": (0, prompt_len), "b": (0, 3)}, *decoding])
    wanted = set(np.nonzero(positions.mask(0, prompt_len + steps, prompt_len))[0].tolist())
    assert found.get("a", set()) == wanted
    assert found["b"] == set(range(3 + steps))
    assert rank.read("a") == (
        len(wanted),
        {1: (len(wanted), len(wanted) / 2)} if wanted else {},
    )
    assert rank.read("b") == (3 + steps, {1: (3 + steps, (3 + steps) / 2)})


def test_a_request_that_begins_again_a_token_at_a_time_counts_nothing_twice() -> None:
    rank = Rank()
    rank.begin("a", 1, Positions(), 2, 0)
    rank.run([{"a": (n, n + 1)} for n in (0, 1, 2, 0, 1, 2, 3, 4)])
    assert rank.read("a") == (5, {1: (5, 2.5)})


def test_the_example_of_the_recorder() -> None:
    recorder = TraceRecorder()
    recorder.begin("a", 1, [(2, Positions("all"))], prompt_len=4, num_cached=0)
    found = recorder.find(["b", "a"], np.array([0, 2, 5]), np.array([5, 0]))
    assert found.index_t.tolist() == [2, 3, 4]
    assert found.slots_t.tolist() == [2, 2, 2]
    assert found.is_new_t.tolist() == [True] * 3
    assert recorder.count("a", 9) == (3,)
    again = recorder.find(["a"], np.array([0, 4]), np.array([0]))
    assert again.index_t.tolist() == [0, 1, 2, 3]
    assert again.is_new_t.tolist() == [False] * 3 + [True]
    assert recorder.count("a", 9) == (4,)


def test_a_token_after_the_end_is_in_neither_count_nor_sum() -> None:
    recorder, sums = TraceRecorder(), TraceSums(4, 2, torch.empty(0))
    entries = [sums.take() for _ in range(2)]
    for name, entry in zip("ab", entries, strict=True):
        recorder.begin(name, entry, [(2, Positions("all"))], prompt_len=4, num_cached=0)
    for at, ratios in ((0, [0.5, 0.25]), (1, [2.0, 4.0])):
        found = recorder.find(["a", "b"], np.arange(3), np.array([at, at]))
        sums.keep(found.entries_t)
        sums.add(1, found.entries_t, torch.tensor([ratios]))
    assert [recorder.is_beyond("a", end) for end in (1, 2)] == [True, False]
    assert (recorder.count("a", 1), recorder.count("b", 2)) == ((1,), (2,))
    assert sums.fetch(entries, before=entries[:1])[:, 1].tolist() == [[1, 0.5], [2, 4.25]]


def test_entries_are_empty_when_they_are_given_out_again() -> None:
    sums = TraceSums(3, 2, torch.empty(0))
    first = [sums.take() for _ in range(3)]
    assert sorted(first) == [1, 2, 3]
    with pytest.raises(RuntimeError, match="more requests"):
        sums.take()
    sums.add(1, np.array(first), torch.tensor([[np.nan, 0.0, np.inf]]))
    sums.decided_E[first[1]] = 5
    counts, totals = sums.fetch(first)[:, 1].T
    assert counts.tolist() == [1, 0, 1]
    assert np.isnan(totals[0])
    assert totals[1:].tolist() == [0, np.inf]
    for entry in first:
        sums.release(entry)
    assert sorted(sums.take() for _ in range(3)) == [1, 2, 3]
    assert not sums.fetch(first).any()
    assert not sums.decided_E.any()

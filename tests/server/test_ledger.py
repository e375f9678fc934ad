"""Which tokens of a step are steered, in every chunking and after preemption."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.contract.plan import Positions
from logsteer_server.engines.vllm.ledger import Ledger

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


def run(ledger: Ledger, steps: list[dict[str, tuple[int, int]]]) -> dict[str, set[int]]:
    """The steered positions of each request, over steps of [begin, end) by request."""
    found: dict[str, set[int]] = {}
    for step in steps:
        names = list(step)
        starts = np.cumsum([0, *(end - begin for begin, end in step.values())])
        computed = np.array([begin for begin, _ in step.values()])
        tokens = ledger.find(names, starts, computed)
        ledger.count({1: np.full(len(tokens.index_t), 0.5, np.float32)})
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
    ledger = Ledger(3)
    ledger.open("a", 2, positions, prompt_len, cached)
    edges = sorted({cached, 12, *(cut for cut in cuts if cut > cached)})
    steps = [
        {"other": (0, 3), "a": (first, last), "last": (4, 5)} for first, last in pairwise(edges)
    ]
    wanted = set(np.nonzero(positions.mask(0, 12, prompt_len))[0].tolist())
    new = {position for position in wanted if position >= cached}
    assert run(ledger, steps).get("a", set()) == new
    steered, layers = ledger.read("a")
    assert steered == len(wanted)
    assert layers == ({1: (len(new), 0.5 * len(new))} if new else {})


@given(positions=KINDS, prompt_len=st.integers(1, 9))
def test_one_token_is_steered_where_its_sequence_is(positions: Positions, prompt_len: int) -> None:
    one_by_one = [positions.holds(position, prompt_len) for position in range(12)]
    assert one_by_one == positions.mask(0, 12, prompt_len).tolist()


def test_tokens_that_are_read_again_count_once() -> None:
    ledger = Ledger(2)
    ledger.open("a", 1, Positions(), 4, 0)
    run(ledger, [{"a": (0, 3)}, {"a": (0, 4)}, {"a": (4, 5)}])
    assert ledger.read("a") == (5, {1: (5, 2.5)})


def test_accounts_are_used_again_and_grow() -> None:
    ledger = Ledger(2)
    for n in range(100):
        ledger.open(f"r{n}", n + 1, Positions(), 4, 0)
    step = {f"r{n}": (n, n + 1) for n in range(0, 100, 7)}
    assert {n: {int(n[1:])} for n in step} == run(ledger, [step])
    for n in range(100):
        ledger.close(f"r{n}")
    assert len(ledger) == 0
    assert run(ledger, [step]) == {}
    ledger.open("again", 5, Positions(), 4, 0)
    assert ledger.read("again") == (0, {})


@given(positions=KINDS, prompt_len=st.integers(1, 6), steps=st.integers(1, 150))
def test_decoding_step_by_step_books_every_token(
    positions: Positions, prompt_len: int, steps: int
) -> None:
    ledger = Ledger(3)
    ledger.open("a", 2, positions, prompt_len, 0)
    ledger.open("b", 1, Positions(), 3, 0)
    decoding = [
        {"a": (prompt_len + n, prompt_len + n + 1), "b": (3 + n, 4 + n)} for n in range(steps)
    ]
    found = run(ledger, [{"a": (0, prompt_len), "b": (0, 3)}, *decoding])
    wanted = set(np.nonzero(positions.mask(0, prompt_len + steps, prompt_len))[0].tolist())
    assert found.get("a", set()) == wanted
    assert found["b"] == set(range(3 + steps))
    assert ledger.read("a") == (len(wanted), {1: (len(wanted), len(wanted) / 2)} if wanted else {})
    assert ledger.read("b") == (3 + steps, {1: (3 + steps, (3 + steps) / 2)})


def test_a_request_that_begins_again_a_token_at_a_time_counts_nothing_twice() -> None:
    ledger = Ledger(2)
    ledger.open("a", 1, Positions(), 2, 0)
    run(ledger, [{"a": (n, n + 1)} for n in (0, 1, 2, 0, 1, 2, 3, 4)])
    assert ledger.read("a") == (5, {1: (5, 2.5)})

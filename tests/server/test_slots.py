"""Slots of the steering tables: shared by equal plans, never given to two different ones."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.contract.plan import Site, SteeringPlan
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.slots import PLANS_AT_ONCE, SlotPool, SteeringSlots
from tests.server.steering_cases import INFO


def test_equal_keys_share_a_slot_and_others_wait() -> None:
    pool = SlotPool(2)
    assert pool.take(b"a") == (1, True)
    assert pool.take(b"a") == (1, False)
    assert pool.take(b"b") == (2, True)
    assert pool.take(b"c") is None
    pool.release(1)
    assert pool.take(b"c") is None
    pool.release(1)
    assert pool.take(b"c") == (1, True)


def test_an_idle_slot_keeps_its_content_until_it_is_needed() -> None:
    pool = SlotPool(2)
    pool.take(b"a")
    pool.release(1)
    assert pool.take(b"b") == (2, True)
    assert pool.take(b"a") == (1, False)


@given(st.lists(st.integers(0, 6), max_size=60))
def test_no_slot_ever_serves_two_keys(keys: list[int]) -> None:
    pool = SlotPool(3)
    held: list[tuple[int, int]] = []
    content: dict[int, int] = {}
    for key in keys:
        found = pool.take(bytes([key]))
        if found is None:
            slot, _ = held.pop(0)
            pool.release(slot)
            continue
        slot, is_new = found
        if is_new:
            assert slot not in {other for other, _ in held}
            content[slot] = key
        assert content[slot] == key
        held.append((slot, key))


def test_a_slot_that_could_not_be_filled_is_forgotten() -> None:
    pool = SlotPool(1)
    assert pool.take(b"a") == (1, True)
    pool.forget(1)
    pool.release(1)
    assert pool.take(b"a") == (1, True)
    assert pool.take(b"b") is None


def steer_by(size: float) -> ScoreJob:
    site = Site(1, "resid_post", np.full(INFO.hidden_size, size, np.float32))
    ids = np.arange(3, dtype=np.int32)
    return ScoreJob(ids, ids[:1], plan=SteeringPlan((site,)))


def test_plans_are_loaded_together_and_those_that_fail_again() -> None:
    loaded: list[list[int]] = []

    def call(method: str, *args: Any) -> list[Any]:
        if method == "find_stage":
            return [frozenset(range(INFO.num_layers))]
        loaded.append(list(args[0]))
        if len(loaded) == 1:
            raise RuntimeError("no memory")
        return [None]

    slots = SteeringSlots(call, SteeringSize(2 * PLANS_AT_ONCE, 1, 1, 64), INFO)
    jobs = [steer_by(n) for n in range(PLANS_AT_ONCE + 3)]
    taken = list(map(slots.take_plan, jobs))
    with pytest.raises(RuntimeError, match="no memory"):
        slots.load_plans()
    for slot in taken:
        slots.release(slot)
    again = [slot.numbers[0] for slot in map(slots.take_plan, jobs) if slot is not None]
    slots.load_plans()
    slots.load_plans()
    assert loaded[1:] == [again[:PLANS_AT_ONCE], again[PLANS_AT_ONCE:]]
    assert slots.take_plan(jobs[0]) is not None
    slots.load_plans()
    assert len(loaded) == 3

"""Slots of the steering tables: shared by equal plans, never given to two different ones."""

from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.engines.vllm.slots import SlotPool


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
    assert pool.take(b"a") == (1, True)
    assert pool.take(b"b") is None

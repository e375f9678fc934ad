"""Numbered slots that running jobs share by what is in them: plans, adapters."""

from collections import OrderedDict


class SlotPool:
    """Give out slots 1 to `count`, the same one to all users of a key.

    A slot without users has its content until another key needs it.

        pool = SlotPool(1)
        pool.take(b"a")    (1, True): fill slot 1
        pool.take(b"a")    (1, False): it is filled; two users
        pool.take(b"b")    None: wait
    """

    def __init__(self, count: int) -> None:
        self._users = [0] * (count + 1)
        self._keys: dict[int, bytes] = {}
        self._slots: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count + 1))

    def take(self, key: bytes) -> tuple[int, bool] | None:
        """Return a slot for one more user of a key and whether to fill it; None if none is free."""
        known = self._slots.get(key)
        if known is not None:
            self._idle.pop(known, None)
            self._users[known] += 1
            return known, False
        if not self._idle:
            return None
        slot, _ = self._idle.popitem(last=False)
        if (old := self._keys.pop(slot, None)) is not None:
            del self._slots[old]
        self._keys[slot] = key
        self._slots[key] = slot
        self._users[slot] = 1
        return slot, True

    @property
    def num_used(self) -> int:
        """Slots that have a user."""
        return len(self._users) - 1 - len(self._idle)

    def forget(self, slot: int) -> None:
        """Release a slot that was just taken and could not be filled."""
        del self._slots[self._keys.pop(slot)]
        self.release(slot)

    def release(self, slot: int) -> None:
        """Count one user fewer."""
        self._users[slot] -= 1
        if not self._users[slot]:
            self._idle[slot] = None

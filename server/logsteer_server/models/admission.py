"""Admission: budgets of accepted, unfinished work: a model's in tokens, the process's in bytes.

A run enters with an empty reservation before it plans, so that overload is refused before anything
is computed. It extends the reservation as its jobs become known. For a budget of 100 tokens:

    a = admission.enter()     # 0 of 100 taken
    a.cover(60)               # 60 of 100
    b = admission.enter()
    b.cover(50)               # raises `overloaded`: 60 + 50 > 100
    a.cover(40)               # still 60: a reservation does not shrink before its run ends
    a.release()               # 0 of 100
"""

from collections import Counter
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Lock

from logsteer.errors import APIError, api_error

KEY_SHARE = 0.5
"""Share of a model's token budget that one key may use, so that others keep the rest."""
UNKNOWN_WAIT_S = 5.0
"""Retry-After before any speed has been measured."""
NEW_SHARE = 0.2
"""Weight of the newest run in the moving average of the speed."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """The unit of a budget as its refusals word it, and the setting that bounds it."""

    noun: str
    setting: str


TOKENS = Quantity("tokens of work", "max_pending_tokens")
BYTES = Quantity("bytes of memory", "max_pending_bytes")
SCRATCH = Quantity("bytes of log-probabilities on disk", "max_reference_bytes")


class Admission:
    """A budget of accepted, unfinished work, at most `limit`.

    Each tenant may use at most `share` of it, so that none locks out the others. Threads may use
    its reservations at the same time.
    """

    def __init__(self, limit: int, quantity: Quantity = TOKENS, share: float = 1.0) -> None:
        self.limit = limit
        self.pending = 0
        self.num_open = 0
        """Open reservations: running requests."""
        self.by_tenant: Counter[str] = Counter()
        self.share = share
        self.quantity = quantity
        self.lock = Lock()
        self._per_s = 0.0

    def enter(self, tenant: str = "") -> "Reservation":
        """Open an empty reservation. Errors: APIError `overloaded` if no room is left."""
        if self.pending >= self.limit:
            raise self.refuse(1)
        return Reservation(self, tenant)

    def refuse(self, added: int) -> APIError:
        """Return the error for work that adds more than fits."""
        wait = self.pending / self._per_s if self._per_s else UNKNOWN_WAIT_S
        detail = (
            f"{self.pending} {self.quantity.noun} are taken and this request adds {added}; "
            f"the limit is {self.limit}. Try again later."
        )
        return api_error("overloaded", detail, retry_after=max(1.0, round(wait)))

    def record_speed(self, amount: int, seconds: float) -> None:
        """Record the speed of finished work; Retry-After of refusals follows from it."""
        rate = amount / max(1e-3, seconds)
        old = self._per_s or rate
        self._per_s = (1 - NEW_SHARE) * old + NEW_SHARE * rate


class Reservation(AbstractContextManager["Reservation"]):
    """The reservation of one run, until `release` or the end of its block."""

    def __init__(self, admission: Admission, tenant: str = "") -> None:
        self._admission = admission
        self._tenant = tenant
        self._is_open = True
        self.amount = 0
        """What is reserved."""
        admission.num_open += 1

    def cover(self, amount: int) -> None:
        """Raise the reservation to at least this much.

        Errors: APIError `overloaded` where other work leaves no room, `payload_too_large` where
        the work would not fit even alone; CancelledError after `release`.
        """
        admission, tenant = self._admission, self._tenant
        with admission.lock:
            if not self._is_open:
                raise CancelledError("the request has ended")
            added = amount - self.amount
            if added <= 0:
                return
            limit = int(admission.limit * admission.share) if tenant else admission.limit
            if amount > limit:
                noun, setting = admission.quantity.noun, admission.quantity.setting
                detail = (
                    f"The request needs {amount} {noun}, at most {limit} are allowed at once: "
                    f"split it, or raise {setting}."
                )
                raise api_error("payload_too_large", detail)
            taken, own = admission.pending, admission.by_tenant[tenant]
            if taken + added > admission.limit or own + added > limit:
                raise admission.refuse(added)
            admission.pending = taken + added
            admission.by_tenant[tenant] = own + added
            self.amount = amount

    def add(self, amount: int) -> None:
        """Raise the reservation by this much. Errors: as `cover`."""
        self.cover(self.amount + amount)

    def release(self, *_: object) -> None:
        """Release the reservation; a second call does nothing."""
        admission, tenant = self._admission, self._tenant
        with admission.lock:
            admission.pending -= self.amount
            admission.by_tenant[tenant] -= self.amount
            if not admission.by_tenant[tenant]:
                del admission.by_tenant[tenant]
            self.amount = 0
            admission.num_open -= self._is_open
            self._is_open = False

    __exit__ = release

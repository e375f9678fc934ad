"""Admission: the budget of accepted, unfinished work of one model, counted in tokens.

A run takes a reservation before it plans, so that overload is answered before anything is computed,
and lets it cover its jobs once it knows them. For a budget of 100 tokens:

    a = admission.enter()     # 0 of 100 taken
    a.cover(60)               # 60 of 100
    b = admission.enter()
    b.cover(50)               # raises `overloaded`: 60 + 50 > 100
    a.cover(40)               # still 60: a reservation does not shrink before its run ends
    a.release()               # 0 of 100
"""

from contextlib import AbstractContextManager

from logsteer.errors import APIError, api_error

UNKNOWN_WAIT_S = 5.0
"""What to wait where no speed has been measured yet."""
NEW_SHARE = 0.2
"""Share of the newest run in the speed that is remembered."""


class Admission:
    """The work that one model has accepted and not finished, of at most `max_tokens` tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.pending_tokens = 0
        self._tokens_per_s = 0.0

    def enter(self) -> "Reservation":
        """Begin a reservation of nothing. Errors: APIError `overloaded` where no room is left."""
        if self.pending_tokens >= self.max_tokens:
            raise self._refuse(1)
        return Reservation(self)

    def grow(self, num_tokens: int, added: int) -> None:
        """Take `added` tokens for work that then has `num_tokens`.

        Errors: APIError `overloaded` where other work leaves no room, `payload_too_large` where
        the work would not fit even alone.
        """
        if num_tokens > self.max_tokens:
            detail = (
                f"The request needs {num_tokens} tokens of work, at most {self.max_tokens} are "
                "taken at once: split it, or raise max_pending_tokens."
            )
            raise api_error("payload_too_large", detail)
        if self.pending_tokens + added > self.max_tokens:
            raise self._refuse(added)
        self.pending_tokens += added

    def _refuse(self, added: int) -> APIError:
        rate = self._tokens_per_s
        wait = self.pending_tokens / rate if rate else UNKNOWN_WAIT_S
        detail = (
            f"{self.pending_tokens} tokens of work are waiting and this request adds {added}; "
            f"the limit is {self.max_tokens}. Try again later."
        )
        return api_error("overloaded", detail, retry_after=max(1.0, round(wait)))

    def note_speed(self, num_tokens: int, seconds: float) -> None:
        """Remember how fast work was done; refused callers are told to wait accordingly."""
        rate = num_tokens / max(1e-3, seconds)
        old = self._tokens_per_s or rate
        self._tokens_per_s = (1 - NEW_SHARE) * old + NEW_SHARE * rate


class Reservation(AbstractContextManager["Reservation"]):
    """Room for one run, until it is released or its block is left."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._tokens = 0

    def cover(self, num_tokens: int) -> None:
        """Hold at least this many tokens. Errors: as `Admission.grow`."""
        if num_tokens > self._tokens:
            self._admission.grow(num_tokens, num_tokens - self._tokens)
            self._tokens = num_tokens

    def release(self) -> None:
        """Give the room back; a second time does nothing."""
        self._admission.pending_tokens -= self._tokens
        self._tokens = 0

    def __exit__(self, *_: object) -> None:
        self.release()

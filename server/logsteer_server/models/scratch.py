"""The room on disk for what one model leaves there for another, over all requests together."""

from collections.abc import Iterator
from contextlib import contextmanager

from logsteer.errors import api_error

RETRY_AFTER_S = 5.0


class ScratchSpace:
    """Bytes of files that requests have at once, of at most `max_bytes`; one alone may have more.

    space = ScratchSpace(100)
    with space.take(60):        60 of 100
        with space.take(50):    raises `overloaded`
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.taken_bytes = 0

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[None]:
        """Have room while the block runs. Errors: APIError `overloaded` where others have it."""
        if self.taken_bytes and self.taken_bytes + num_bytes > self.max_bytes:
            detail = (
                f"Other requests have {self.taken_bytes} bytes of log-probabilities on disk and "
                f"this one adds {num_bytes}; the limit is max_reference_bytes, {self.max_bytes}. "
                "Try again later."
            )
            raise api_error("overloaded", detail, retry_after=RETRY_AFTER_S)
        self.taken_bytes += num_bytes
        try:
            yield
        finally:
            self.taken_bytes -= num_bytes

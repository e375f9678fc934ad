"""Planning in threads, with reservations that grow with the plan.

The size of a request is known only when its text is encoded, which may take long. A plan is an
ordinary function that returns the request's jobs. It runs in a thread; small requests, large
requests and long texts have separate threads, so that no kind waits for another. As it proceeds, a
plan calls `Planner.cover` with its tokens so far. That reserves room for them, and ends the plan if
the request was refused or cancelled.

Planning detects problems of items; these fail the request or only that item.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from logsteer.errors import APIError, api_error
from logsteer.schemas import LogprobItem
from logsteer.schemas.common import OnError
from logsteer_server.contract.jobs import Job
from logsteer_server.interventions.interventions import Interventions
from logsteer_server.models.admission import BYTES, Admission, Reservation
from logsteer_server.settings import Settings


class ItemProblems:
    """The problems of a request's items: the entries of `field`, or with `is_one` the field itself.

    With `fail` the first problem is raised. With `report` each becomes its item's result.
    """

    def __init__(self, field: str, on_error: OnError = "fail", *, is_one: bool = False) -> None:
        self._field = field
        self._is_one = is_one
        self._fails = on_error == "fail"
        self._found: dict[int, APIError] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._found

    def __bool__(self) -> bool:
        return bool(self._found)

    def name_item(self, index: int) -> str:
        """Return an item's place in the request."""
        return self._field if self._is_one else f"{self._field}[{index}]"

    @contextmanager
    def catch(self, index: int) -> Iterator[None]:
        """Record an error that the block raises as a problem of an item. Errors: as `add`."""
        try:
            yield
        except APIError as error:
            self.add(index, error)

    def add(self, index: int, error: APIError, part: str | None = None) -> None:
        """Record the first problem of an item; `part`: the faulty field in the item, such as
        `targets[2]`, or None for the one that the error names.

        Errors: APIError that names the item, if it fails the request; the error itself if it names
        a field of the request, such as `bos`, or refuses the request for its size.
        """
        part = part or error.param
        if part is not None and part.partition("[")[0] not in LogprobItem.model_fields:
            raise error
        if error.code in ("payload_too_large", "overloaded"):
            raise error
        place = self.name_item(index)
        param = f"{place}.{part}" if part else place
        if self._fails:
            raise api_error(error.code, f"{param}: {error.detail}", param=param) from error
        self._found.setdefault(index, api_error(error.code, error.detail, param=param))

    def fill(self, results: list[dict[str, Any]], request_id: str) -> list[dict[str, Any]]:
        """Return the results of all items: these, in order, for valid items, else the problem."""
        if not self._found:
            return results
        good = iter(results)
        count = len(results) + len(self._found)
        found = self._found
        return [
            {"problem": found[n].problem(request_id).model_dump()} if n in found else next(good)
            for n in range(count)
        ]


P = ParamSpec("P")
T = TypeVar("T")

Cover = Callable[[int], None]
"""Reserves room for the tokens planned so far. Errors: as `Reservation.cover`."""

LONG_TEXT = 2**17
"""Characters from which encoding a text takes long, and much memory."""
LARGE_REQUEST = 2**17
"""Memory of a request's body, here 16 KiB of JSON, above which its plan has the threads of large
requests."""
BYTES_PER_CHAR = 250
"""Memory of a character while its text is encoded: 187 in English, up to 790 where every byte is a
token. Such texts are encoded one at a time."""
BYTES_PER_ROW = 64
"""Memory of a row in an answer: a token's id, its text and its offset."""
BYTES_PER_NUMBER = 24
"""Memory of a number as text, and as the engine returned it."""
BYTES_PER_PACKED = 4
"""Memory of a number in a raw buffer."""
COPIES = 4
"""Copies of a raw buffer while it is written: 4.0 measured as safetensors, 2.6 as MessagePack."""
BYTES_PER_PROBE = 640
"""Memory of one probe on a sequence beside its numbers: 462 as objects, 163 as JSON."""
BYTES_PER_LISTED = 56
"""Memory of a listed token's id, text and log-probability."""

THREADS = 2
"""Threads of each kind: one encodes without the GIL while the other holds it."""


class Capacity:
    """The server's capacity for requests: limits, planning threads, memory.

    The threads end with `close`.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.memory = Admission(settings.max_pending_bytes, BYTES)
        self.short = ThreadPoolExecutor(THREADS, "planning")
        self.long = ThreadPoolExecutor(THREADS, "planning-long")
        self.texts = ThreadPoolExecutor(1, "planning-texts")

    async def call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run short blocking work in a thread; return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.short, partial(work, *args, **kwargs))

    async def call_long(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work that may take long in a thread; return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.long, partial(work, *args, **kwargs))

    def close(self) -> None:
        """End the threads, without waiting for their work."""
        for threads in (self.short, self.long, self.texts):
            threads.shutdown(wait=False, cancel_futures=True)


class Planner:
    """The resources of one run's plan: the server's settings and threads, and its reservations.

    `tokens`: for the planned tokens; `memory`: for the request's body, its texts and the answer.
    """

    def __init__(
        self,
        capacity: Capacity,
        tokens: Reservation,
        memory: Reservation,
        packs_arrays: bool = False,
    ) -> None:
        self.settings = capacity.settings
        self.expected_bytes = 0
        self._has_long_text = False
        self._is_large = memory.amount > LARGE_REQUEST
        self.packs_arrays = packs_arrays
        self.capacity = capacity
        self.cover: Cover = tokens.cover
        """Reserves room for the tokens planned so far; plans call it in their threads."""
        self._memory = memory

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work in a thread for requests of this size; return its result."""
        capacity, loop = self.capacity, asyncio.get_running_loop()
        threads = capacity.long if self._is_large else capacity.short
        if self._has_long_text:
            threads = capacity.texts
        return await loop.run_in_executor(threads, partial(work, *args, **kwargs))

    def cover_text(self, longest: int) -> None:
        """Reserve memory for encoding the longest text, of `longest` characters.

        A long text is planned in the thread for long texts, and needs much memory. Errors: APIError
        `payload_too_large`, `overloaded`.
        """
        limit = self.settings.max_text_chars
        if longest > limit:
            detail = (
                f"A text has {longest} characters or ids, at most {limit} are allowed: split "
                "it, send it to /perplexity/stream, or raise max_text_chars."
            )
            raise api_error("payload_too_large", detail)
        self._has_long_text = longest > LONG_TEXT
        if self._has_long_text:
            self._memory.add(longest * BYTES_PER_CHAR)

    def expect_rows(
        self, rows: int, numbers: int, listed: int = 0, *, detokenize: bool = True
    ) -> None:
        """Reserve memory for an answer of so many rows, with so much in each.

        `listed`: tokens of a row, with their texts where they are detokenized.
        Errors: APIError `payload_too_large`, `overloaded`.
        """
        is_packed = self.packs_arrays and not detokenize
        each = COPIES * 2 * BYTES_PER_PACKED if is_packed else BYTES_PER_LISTED
        size = rows * (BYTES_PER_ROW + numbers * BYTES_PER_NUMBER + listed * each)
        self.expect_bytes(size)

    def expect_captured(self, shown: Interventions, jobs: Iterable[Job]) -> None:
        """Reserve memory for activations of jobs, shown or stored. Errors: as `expect_arrays`."""
        if (capture := shown.capture) is not None:
            numbers = capture.width * sum(job.num_captured for job in jobs)
            self.expect_arrays(numbers, is_stored=capture.target is not None)

    def expect_arrays(self, numbers: int, *, is_stored: bool = False) -> None:
        """Reserve memory for an answer with so many numbers of activations, or of whole rows.

        Errors: as `expect_rows`, by the bound of activations.
        """
        packs, limit = self.packs_arrays or is_stored, self.settings.max_activation_bytes
        size = numbers * (BYTES_PER_PACKED if packs else BYTES_PER_NUMBER)
        if size > limit:
            detail = (
                f"The arrays would take about {size} bytes{'' if packs else ' as JSON'}, at "
                f"most {limit} are allowed: ask for fewer items, tokens or layers at once, or "
                + ("" if packs else "for MessagePack or safetensors, which take a sixth, or ")
                + "raise max_activation_bytes."
            )
            raise api_error("payload_too_large", detail)
        self._memory.add(size * (COPIES if packs else 1))
        self.expected_bytes += 0 if is_stored else size

    def hold_activations(self, numbers: int) -> None:
        """Reserve memory for activations that are captured and used, but not returned.

        Errors: APIError `payload_too_large`, `overloaded`.
        """
        size, limit = 4 * numbers, self.settings.max_activation_bytes
        if size > limit:
            detail = (
                f"The activations and vectors that the answer is made of take {size} bytes, at "
                f"most {limit} are allowed: ask for fewer items, layers, positions or scales at "
                "once, or raise max_activation_bytes."
            )
            raise api_error("payload_too_large", detail)
        self._memory.add(size)

    def expect_readings(
        self, shown: Interventions, sequences: int, tokens: int, context_tokens: int = 0
    ) -> None:
        """Reserve memory for an answer's readings of probes. Errors: as `expect_rows`."""
        entries = sequences * len(shown.probes) * BYTES_PER_PROBE
        numbers = shown.count_readings(tokens, context_tokens)
        self.expect_bytes(entries + numbers * BYTES_PER_NUMBER)

    def expect_bytes(self, size: int) -> None:
        """Reserve memory for an answer of so many bytes. Errors: as `expect_rows`."""
        limit = self.settings.max_answer_bytes
        if size > limit:
            detail = (
                f"The answer would take about {size} bytes, at most {limit} are allowed: ask for "
                "fewer columns, alternatives or items at once, or raise max_answer_bytes."
            )
            raise api_error("payload_too_large", detail)
        self._memory.add(size)
        self.expected_bytes += size

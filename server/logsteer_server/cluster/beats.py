"""Signs of life of a call between nodes: a network that is cut tells neither side that it is.

Ray and TCP find out after a minute or more; until then a call waits for what cannot come.
"""

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

Part = TypeVar("Part")


class Beating(Protocol):
    """What has calls with beats."""

    beat_s: float
    """Seconds of silence after which a call says that it is there."""


def beat_along(
    call: Callable[..., AsyncGenerator[Part, None]],
) -> Callable[..., AsyncGenerator[Part | None, None]]:
    """Have a method that yields parts yield None, too, whenever `beat_s` have brought none."""

    @functools.wraps(call)
    async def beating(self: Beating, *arguments: Any) -> AsyncGenerator[Part | None, None]:
        parts = call(self, *arguments)
        coming: asyncio.Future[Part] | None = None
        try:
            while True:
                # A task, because a generator that is left off while it waits ends.
                coming = coming or asyncio.ensure_future(anext(parts))
                done, _ = await asyncio.wait({coming}, timeout=self.beat_s)
                if not done:
                    yield None
                    continue
                part, coming = coming, None
                try:
                    yield part.result()
                except StopAsyncIteration:
                    return
        finally:
            if coming is not None:
                coming.cancel()
                with suppress(asyncio.CancelledError, StopAsyncIteration):
                    await coming
            await parts.aclose()

    return beating


async def expect_beats(
    parts: AsyncIterator[Part | None], within_s: float
) -> AsyncGenerator[Part, None]:
    """Yield parts without the beats between them. Errors: TimeoutError, for so long a silence."""
    while True:
        try:
            async with asyncio.timeout(within_s):
                part = await anext(parts)
        except StopAsyncIteration:
            return
        if part is not None:
            yield part

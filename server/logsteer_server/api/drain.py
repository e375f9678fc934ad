"""The server's end: running requests may finish for a while, new ones are refused.

It has two steps:

begin   readiness is withdrawn; new requests get a 503 and lose their connection
end     who still reads a body, or waits within a deadline, gets an error from `receive`; the
        engines' handles answer whoever waits for them
"""

import asyncio
from typing import Any, cast

from starlette.types import Message, Receive

from logsteer_server.runtime.handle import refuse_closing


class Drain:
    """How far the server's end has come, and how many requests still run."""

    def __init__(self) -> None:
        self.num_running = 0
        self.has_begun = False
        self._has_ended = False
        self._receiving: set[asyncio.Task[Any]] = set()
        """Tasks that wait for their request's next message."""

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self.has_begun = True

    @property
    def has_ended(self) -> bool:
        """Whether the time of running requests is over."""
        return self._has_ended

    def end(self) -> None:
        """Let whoever waits for a request's next message get an error."""
        self._has_ended = True
        for task in self._receiving:
            task.cancel()

    def limit(self, receive: Receive) -> Receive:
        """Return a `receive` that raises APIError `engine_restarting` once the drain has ended."""

        async def receive_until_end() -> Message:
            if self._has_ended:
                raise refuse_closing()
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            cancelled = task.cancelling()
            self._receiving.add(task)
            try:
                return await receive()
            except asyncio.CancelledError:
                if self._has_ended and task.uncancel() <= cancelled:
                    raise refuse_closing() from None
                raise  # somebody else cancelled it
            finally:
                self._receiving.discard(task)

        return receive_until_end

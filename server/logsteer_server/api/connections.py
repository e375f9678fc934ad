"""Limits of connections: their number, the size of headers, the slowness of reads and writes.

A caller without a key can open connections and send bytes, so their resources are limited before
there is a request. Every `stall_timeout_s` each connection is checked, and closed if it waits for
a caller who has made no progress since the last check:

    headers    they were incomplete at both checks
    body       no byte has arrived, although the application reads
    answer     the caller has read less than MIN_WRITE_PROGRESS, and the application waits to write
"""

import asyncio
import socket
import struct
from fcntl import ioctl
from termios import TIOCOUTQ
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

NO_LINGER = struct.pack("ii", 1, 0)
"""`struct linger` that closes a connection with RST; otherwise unread bytes stay in the system's
buffers for minutes."""
MIN_WRITE_PROGRESS = 2**16
"""Bytes that a caller must read within `stall_timeout_s`."""
MAX_HEADER_BYTES = 2**16
"""Four times the most that proxies and browsers send."""
MAX_DISCARDED_BYTES = 2**24
"""Most bytes of a body to discard after the answer, so that the caller can read the answer."""


class LimitedProtocol(HttpToolsProtocol):
    """Serve one connection as uvicorn does, within limits."""

    def __init__(
        self, *args: Any, max_connections: int, stall_timeout_s: float, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._max_connections = max_connections
        self._stall_timeout_s = stall_timeout_s
        self._timer: asyncio.TimerHandle
        self._in_body = False
        self._num_requests = 0
        self._header_bytes = self._received_bytes = self._discarded_bytes = 0
        # At the last check: the request whose headers were incomplete, and the unread bytes.
        self._awaited: int | None = None
        self._unsent_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Schedule the first check; close the connection if there are too many."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._stall_timeout_s, self._check)
        if len(self.connections) > self._max_connections:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the next check."""
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received data, unless headers, or a body after its answer, exceed their limit."""
        if self.transport.is_closing():
            return
        self._received_bytes += len(data)
        self._header_bytes += 0 if self._in_body else len(data)
        self._discarded_bytes += 0 if self._is_answering else len(data) * self._in_body
        super().data_received(data)
        if self._header_bytes > MAX_HEADER_BYTES or self._discarded_bytes > MAX_DISCARDED_BYTES:
            self.cut()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count trailers after a body as headers, too."""
        self._header_bytes += (len(name) + len(value)) * self._in_body
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start to wait for the body."""
        self._in_body = True
        self._num_requests += 1
        self._header_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop waiting: the whole request has arrived."""
        self._in_body = False
        super().on_message_complete()

    def resume_writing(self) -> None:
        """Reset the unread bytes: the caller has read."""
        self._unsent_bytes = 0
        super().resume_writing()

    def _check(self) -> None:
        """Close the connection if it stalls, or schedule the next check."""
        received, self._received_bytes = self._received_bytes, 0
        before, self._unsent_bytes = self._unsent_bytes, 0
        awaited, self._awaited = self._awaited, None
        if self.flow.write_paused:
            self._unsent_bytes = self._count_unsent()
            stalls = 0 < before < self._unsent_bytes + MIN_WRITE_PROGRESS
        elif self._in_body:
            stalls = not received and not self.flow.read_paused
        else:  # uvicorn closes connections that are idle between two requests
            if not self._is_answering and (self._header_bytes or not self._num_requests):
                self._awaited = self._num_requests
            stalls = self._awaited is not None and self._awaited == awaited
        if stalls:
            self.cut()
        else:
            self._timer = self.loop.call_later(self._stall_timeout_s, self._check)

    def _count_unsent(self) -> int:
        """Return the written bytes that the caller's system has not acknowledged."""
        queued = ioctl(self.transport.get_extra_info("socket"), TIOCOUTQ, bytes(4))
        return int(self.transport.get_write_buffer_size() + struct.unpack("i", queued)[0])

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def cut(self) -> None:
        """Close the connection now, and drop unsent bytes from the system's buffers."""
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()

"""Connections within bounds: how many, how long their headers are, how slowly they read and write.

A caller who has sent no key yet can open connections and send bytes, so what these may take is
bounded before a request exists. Each connection is looked at every `stall_timeout_s`, and ended
where it waits for its caller, who has done nothing since the last look:

    headers    they have begun, or the connection has, and they have not ended
    body       no byte has come, though the application reads
    answer     less than MIN_WRITE_PROGRESS was taken, and the application waits to write
"""

import asyncio
import socket
import struct
from fcntl import ioctl
from termios import TIOCOUTQ
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

NO_LINGER = struct.pack("ii", 1, 0)
"""`struct linger` that ends a connection with RST; without it, bytes that nobody reads stay in the
system's buffers for minutes."""
MIN_WRITE_PROGRESS = 2**16
"""Bytes that a reader takes within `stall_timeout_s` at least."""
MAX_HEADER_BYTES = 2**16
"""Four times what proxies and browsers send at most."""
MAX_DISCARDED_BYTES = 2**24
"""Bytes of a body that are dropped after its answer, so that the caller gets to read that."""


class LimitedProtocol(HttpToolsProtocol):
    """Serve one connection as uvicorn does, within bounds."""

    def __init__(
        self, *args: Any, max_connections: int, stall_timeout_s: float, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._max_connections = max_connections
        self._stall_timeout_s = stall_timeout_s
        self._looking: asyncio.TimerHandle
        self._in_body = False
        self._num_requests = 0
        self._header_bytes = self._received_bytes = self._discarded_bytes = 0
        # Of the last look: the request whose headers were awaited, and what was not taken.
        self._awaited: int | None = None
        self._unsent_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to look at the connection; end it where there are too many."""
        super().connection_made(transport)
        self._looking = self.loop.call_later(self._stall_timeout_s, self._look)
        if len(self.connections) > self._max_connections:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._looking.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless headers grow beyond their bound, or a body after its answer."""
        if self.transport.is_closing():
            return
        self._received_bytes += len(data)
        self._header_bytes += 0 if self._in_body else len(data)
        self._discarded_bytes += 0 if self._is_answering else len(data) * self._in_body
        super().data_received(data)
        if self._header_bytes > MAX_HEADER_BYTES or self._discarded_bytes > MAX_DISCARDED_BYTES:
            self.cut()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count trailers after a body, which are headers, too."""
        self._header_bytes += (len(name) + len(value)) * self._in_body
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to wait for the body."""
        self._in_body = True
        self._num_requests += 1
        self._header_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Wait for nothing: the whole request has arrived."""
        self._in_body = False
        super().on_message_complete()

    def resume_writing(self) -> None:
        """Forget what had not been taken."""
        self._unsent_bytes = 0
        super().resume_writing()

    def _look(self) -> None:
        """End the connection where it stalls, or look again later."""
        received, self._received_bytes = self._received_bytes, 0
        before, self._unsent_bytes = self._unsent_bytes, 0
        awaited, self._awaited = self._awaited, None
        if self.flow.write_paused:
            self._unsent_bytes = self._count_unsent()
            stalls = 0 < before < self._unsent_bytes + MIN_WRITE_PROGRESS
        elif self._in_body:
            stalls = not received and not self.flow.read_paused
        else:  # uvicorn ends connections that are idle between two requests
            if not self._is_answering and (self._header_bytes or not self._num_requests):
                self._awaited = self._num_requests
            stalls = self._awaited is not None and self._awaited == awaited
        if stalls:
            self.cut()
        else:
            self._looking = self.loop.call_later(self._stall_timeout_s, self._look)

    def _count_unsent(self) -> int:
        """Return the bytes that the caller's system has not acknowledged."""
        queued = ioctl(self.transport.get_extra_info("socket"), TIOCOUTQ, bytes(4))
        return int(self.transport.get_write_buffer_size() + struct.unpack("i", queued)[0])

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def cut(self) -> None:
        """End the connection now; what the system still holds to send is dropped, not kept."""
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()

"""Limits of connections: their number, the size of headers, the slowness of reads and writes.

A caller without a key can open connections and send bytes, so their resources are limited before
there is a request:

    connection ──── MAX_HEADER_BYTES ────► headers ─────────────► body ──► the application
                  within stall_timeout_s            never without a byte        │
    closed by the other ◄──────────── never without progress ──── answer ◄──────┘

At `max_connections` the connection that has been idle the longest is closed for a new one; if all
have a request, the new one gets a 503.
"""

import asyncio
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from logsteer_server.settings import Settings

NO_LINGER = struct.pack("ii", 1, 0)
"""`struct linger` that closes a connection with RST; otherwise unread bytes stay in the system's
buffers for minutes."""
MIN_WRITE_PROGRESS = 2**16
"""Bytes that a caller must read within `stall_timeout_s`."""
MAX_HEADER_BYTES = 2**16
"""Four times the most that proxies and browsers send."""
MAX_DISCARDED_BYTES = 2**24
"""Most bytes of a body to discard after the answer, so that the caller can read the answer."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of all connections, and the idle connections, oldest first."""

    max_connections: int
    stall_timeout_s: float
    idle: dict["LimitedProtocol", None] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, descriptors: int) -> "ConnectionLimits":
        """Return the limits in the settings; `descriptors`: the most connections possible."""
        return cls(max(1, min(settings.max_connections, descriptors)), settings.stall_timeout_s)


class LimitedProtocol(HttpToolsProtocol):
    """Serve one connection as uvicorn does, within limits."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._in_headers = True
        self._header_bytes = 0
        self._discarded_bytes = 0
        self._unsent_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of headers; at the limit of connections, make room or refuse."""
        limits = self._limits
        if len(self.connections) >= limits.max_connections and not self._make_room():
            detail = "the server has as many connections as it takes; try again later"
            super().connection_made(transport)
            self._refuse(503, detail)
            return
        super().connection_made(transport)
        limits.idle[self] = None
        self._reading = self.loop.call_later(limits.stall_timeout_s, self._end_headers)

    def _make_room(self) -> bool:
        """Close the connection that has been idle the longest, if any."""
        oldest = next(iter(self._limits.idle), None)
        if oldest is None:
            return False
        del self._limits.idle[oldest]
        self.connections.discard(oldest)
        oldest.cut()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the limits."""
        self._limits.idle.pop(self, None)
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received data, unless headers exceed their limit."""
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._header_bytes += len(data)
        if self._reading is None:  # the first bytes of another request on this connection
            self._reading = self.loop.call_later(self._limits.stall_timeout_s, self._end_headers)
        super().data_received(data)
        if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the headers are longer than {MAX_HEADER_BYTES} bytes; send fewer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count trailers after a body as headers, too."""
        if not self._in_headers:
            self._header_bytes += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the timeout of the body."""
        self._in_headers = False
        self._header_bytes = 0
        self._limits.idle.pop(self, None)
        self._wait_for_body()
        super().on_headers_complete()

    def _wait_for_body(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._reading = self.loop.call_later(self._limits.stall_timeout_s, self._end_body)

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body; after the answer discard it, up to a limit."""
        self._wait_for_body()
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timeout: the whole request has arrived."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._in_headers = True
        self._header_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Count the connection as idle until the next request's headers."""
        super().on_response_complete()
        if not self.pipeline and not self.transport.is_closing():
            self._limits.idle[self] = None

    def _end_headers(self) -> None:
        if self._is_answering:  # the next request waits until this one ends
            self._reading = self.loop.call_later(self._limits.stall_timeout_s, self._end_headers)
        elif self._header_bytes:
            seconds = self._limits.stall_timeout_s
            self._refuse(408, f"the headers did not come within {seconds:g} s")
        else:
            self.transport.close()

    def _end_body(self) -> None:
        if self.flow.read_paused:  # the server itself has paused reading
            self._wait_for_body()
        else:
            self.cut()

    def pause_writing(self) -> None:
        """Start to watch whether the caller reads the answer."""
        super().pause_writing()
        self._watch_writing()

    def _watch_writing(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self._limits.stall_timeout_s, self._end_writing)

    def _end_writing(self) -> None:
        taken = self._unsent_bytes - self.transport.get_write_buffer_size()
        if taken >= MIN_WRITE_PROGRESS:
            self._watch_writing()
        else:
            self.cut()

    def resume_writing(self) -> None:
        """Stop watching: the caller has read."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    def cut(self) -> None:
        """Close the connection now, and discard unsent data."""
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, detail: str) -> None:
        """Answer an incomplete request and close; during another answer, cut that."""
        if self._is_answering:
            self.cut()
            return
        body = f"{detail}\n".encode()
        head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: "
        self.transport.write(STATUS_LINE[status] + head + b"%d\r\n\r\n" % len(body) + body)
        self.transport.close()

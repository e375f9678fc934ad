"""Server-sent events: a stream of bytes -> events."""

import codecs
import re
from dataclasses import dataclass

_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event: its type ("message" where none was given) and its data lines, joined."""

    name: str
    data: str


class EventParser:
    """Reads events from a stream of bytes that is cut anywhere, also inside a character or a CR LF.

    Follows the WHATWG's "interpreting an event stream", less ids and reconnection times. An event
    that the stream ends in the middle of is dropped, as told there.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._after_cr = False
        # A list of pieces, because one line may be megabytes long and come in small chunks.
        self._pieces: list[str] = []
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Return the events that `chunk` completes, in order."""
        text = self._decoder.decode(chunk)
        if not text:
            return []
        events = []
        if self._after_cr:
            text = text.removeprefix("\n")
        self._after_cr = text.endswith("\r")
        *ends, rest = _LINE_END.split(text)
        for end in ends:
            line = "".join([*self._pieces, end])
            self._pieces = []
            event = self._read_line(line)
            if event is not None:
                events.append(event)
        if rest:
            self._pieces.append(rest)
        return events

    def _read_line(self, line: str) -> ServerSentEvent | None:
        if not line:
            name, data = self._name or "message", self._data
            self._name, self._data = "", []
            return ServerSentEvent(name, "\n".join(data)) if data else None
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        return None

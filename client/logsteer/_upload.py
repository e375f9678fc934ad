"""Texts that are sent while they are read, so that their size does not matter."""

import asyncio
import io
from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterable, Iterator
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import IO, Any, TypeAlias

Source: TypeAlias = str | PathLike[str] | IO[bytes] | IO[str] | Iterable[bytes] | Iterable[str]
AsyncSource: TypeAlias = Source | AsyncIterable[bytes] | AsyncIterable[str]

_CHUNK = 64 * 1024


class UploadBody:
    """The chunks of a source: a path, an open file, or an iterable of bytes or strings.

    A `str` is a path, never the text itself. Raises OSError for a path that cannot be read, and
    TypeError for any other source.
    """

    def __init__(self, source: AsyncSource) -> None:
        self._start: int | None = None
        self._started = False
        self._running: Generator[bytes, None, None] | None = None
        if isinstance(source, str | PathLike):
            _check_path(Path(source))
        elif isinstance(source, bytes | bytearray):
            raise TypeError("source is bytes: give a path, a file, or an iterable such as [data]")
        elif _is_file(source):
            self._start = _position(source)
        elif not isinstance(source, Iterable | AsyncIterable):
            raise TypeError(f"source is a {type(source).__name__}, not a path, file or iterable")
        self._source: Any = source

    @property
    def can_restart(self) -> bool:
        """Whether the chunks can be read from the beginning (again)."""
        if not self._started or isinstance(self._source, str | PathLike):
            return True
        if _is_file(self._source):
            return self._start is not None
        # An iterator is its own iter(): what was taken from it is gone.
        return isinstance(self._source, Iterable) and iter(self._source) is not self._source

    def chunks(self) -> Iterator[bytes]:
        """Return the source's bytes from its beginning; strings are encoded as UTF-8.

        Raises TypeError for an asynchronous source, which takes `AsyncClient`.
        """
        if not isinstance(self._source, str | PathLike | Iterable):
            raise TypeError("an asynchronous source needs AsyncClient")
        return self._start_chunks()

    def close(self) -> None:
        """Close what the last chunks were read from, unless it was given as an open file."""
        # A thread may still read for a task that was cancelled; it lets go of its file by itself.
        with suppress(ValueError):
            if self._running is not None:
                self._running.close()

    def _start_chunks(self) -> Iterator[bytes]:
        self._running = self._chunks()
        return self._running

    def _chunks(self) -> Generator[bytes, None, None]:
        again, self._started = self._started, True
        if isinstance(self._source, str | PathLike):
            with Path(self._source).open("rb") as file:
                yield from _read(file)
        elif _is_file(self._source):
            if again:
                self._source.seek(self._start)
            yield from _read(self._source)
        else:
            yield from map(_encode, self._source)

    async def async_chunks(self) -> AsyncIterator[bytes]:
        """Yield the same bytes for an event loop; a thread reads files, so as not to block it."""
        if isinstance(self._source, AsyncIterable):
            self._started = True
            async for chunk in self._source:
                yield _encode(chunk)
        elif isinstance(self._source, str | PathLike) or _is_file(self._source):
            chunks = self._start_chunks()
            while (block := await asyncio.to_thread(next, chunks, None)) is not None:
                yield block
        else:
            for block in self._start_chunks():
                yield block


def _check_path(path: Path) -> None:
    # A wrong path is told at once, not after a connection was made.
    with path.open("rb"):
        pass


def _is_file(source: object) -> bool:
    return callable(getattr(source, "read", None))


def _position(file: Any) -> int | None:
    try:
        return file.tell() if file.seekable() else None
    except (AttributeError, OSError, io.UnsupportedOperation):
        return None


def _read(file: Any) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield _encode(chunk)


def _encode(chunk: Any) -> bytes:
    return chunk.encode() if isinstance(chunk, str) else bytes(chunk)

"""A data set as one long text, read while it is sent."""

import io
from collections.abc import Iterable, Iterator
from typing import Any

from logsteer.errors import InvalidRequestError
from logsteer.extras.datasets import Row, Source, read_row, read_rows

JOIN = "\n\n"
"""What stands between two rows in the perplexity scripts of GPTQ, llama.cpp and ExLlamaV3."""


class JoinedRows(io.RawIOBase):
    """A file of UTF-8 with one column of a data set's rows, `join` between them.

    `Client.perplexity_stream` takes it, and reads it again after a failure. Reading it raises
    InvalidRequestError for a row without that text.
    """

    def __init__(self, source: Source, column: str, join: str = JOIN) -> None:
        self._source = source
        self._column = column
        self._join = join
        self._start()

    def _start(self) -> None:
        self._pieces = self._encode(read_rows(self._source))
        self._left = b""
        self._position = 0

    def _encode(self, rows: Iterable[str | Row]) -> Iterator[bytes]:
        for number, row in enumerate(rows):
            text = read_row(row, number, self._column, "column")
            piece = (self._join if number else "") + text
            try:
                data = piece.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequestError(
                    "invalid_request",
                    f"row {number} has a lone surrogate, {piece[error.start]!r}, which UTF-8 "
                    "cannot express; write the whole character",
                    param="source",
                ) from error
            yield data

    def readable(self) -> bool:
        """Return that it is read from."""
        return True

    def seekable(self) -> bool:
        """Return whether it can be read again from its beginning: an iterator cannot."""
        return not isinstance(self._source, Iterator)

    def tell(self) -> int:
        """Return how many bytes were read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Begin again; errors: OSError for any other place."""
        if offset or whence != io.SEEK_SET:
            raise io.UnsupportedOperation("only the beginning can be sought")
        self._start()
        return 0

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer as far as there is text."""
        size = len(buffer)
        pieces = [self._left]
        length = len(self._left)
        while length < size and (piece := next(self._pieces, None)) is not None:
            pieces.append(piece)
            length += len(piece)
        data = b"".join(pieces)
        self._left = data[size:]
        count = len(data) - len(self._left)
        buffer[:count] = data[:count]
        self._position += count
        return count

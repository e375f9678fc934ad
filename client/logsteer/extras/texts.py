"""A data set as one long text, read while it is sent."""

from collections.abc import Iterable, Iterator

from logsteer.errors import InvalidRequestError
from logsteer.extras.datasets import Row, Source, read_row, read_rows

_CHUNK = 64 * 1024
JOIN = "\n\n"
"""What stands between two rows in the perplexity scripts of GPTQ, llama.cpp and ExLlamaV3."""


class JoinedRows(Iterable[bytes]):
    """UTF-8 of one column of a data set's rows, `join` between them, each time it is iterated.

    `Client.perplexity_stream` takes it. Iterating raises InvalidRequestError for a row without that
    text.
    """

    def __init__(self, source: Source, column: str, join: str = JOIN) -> None:
        self._source = source
        self._column = column
        self._join = join
        self._began = False

    def __iter__(self) -> Iterator[bytes]:
        if self._began and isinstance(self._source, Iterator):
            raise _refuse("the source is an iterator, and cannot be read again; give a list of it")
        self._began = True
        chunk = b""
        for number, row in enumerate(read_rows(self._source)):
            chunk += self._encode(number, row)
            if len(chunk) > _CHUNK:
                yield chunk
                chunk = b""
        yield chunk

    def _encode(self, number: int, row: str | Row) -> bytes:
        text = read_row(row, number, self._column, "column")
        piece = (self._join if number else "") + text
        try:
            return piece.encode()
        except UnicodeEncodeError as error:
            raise _refuse(
                f"row {number} has a lone surrogate, {piece[error.start]!r}, which UTF-8 cannot "
                "express; write the whole character"
            ) from error


def _refuse(detail: str) -> InvalidRequestError:
    return InvalidRequestError("invalid_request", detail, param="source")

"""Rows of a file, one by one, as bytes of JSON: from JSON lines, compressed or not, and Parquet."""

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic_core import to_json

from logsteer.errors import LogsteerError

FileFormat = Literal["jsonl", "jsonl.gz", "parquet"]
MAX_ROW_BYTES = 16 * 2**20
"""Bytes of one row: more is no JSON lines, and would have to be held in memory."""
PARQUET_ROWS = 1024
"""Rows of a Parquet file that are decoded at once."""
_SUFFIXES: dict[str, FileFormat] = {
    ".parquet": "parquet",
    ".gz": "jsonl.gz",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
}


def find_format(path: Path) -> FileFormat:
    """Return what a file holds, from its name. Errors: LogsteerError for another name."""
    found = _SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise LogsteerError(
            f"{path}: its name does not say what it holds: JSON lines end in .jsonl or .jsonl.gz, "
            "Parquet in .parquet"
        )
    return found


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring rows, the first of them number `first` of the file, from 0.

    `place` is how far into the file they reach, in the unit of `RowSource.size`.
    """

    first: int
    rows: Sequence[bytes]
    place: int


class RowSource:
    """The rows of a file, read once from its beginning.

    A row of JSON lines is a line that is not blank, as it stands; one of Parquet is an object of
    the columns that are `wanted`, those of them that the file has, written as JSON. `size` is the
    file's in bytes, and rows for Parquet; `place` is how far of that was read.
    """

    def __init__(self, path: Path, wanted: Sequence[str]) -> None:
        self.path = path
        self.format = find_format(path)
        self._wanted = wanted
        self._raw: BinaryIO = path.open("rb")
        self.file_bytes = path.stat().st_size
        self.size = self.file_bytes
        self._rows_read = 0
        try:
            is_parquet = self.format == "parquet"
            self._rows = self._read_parquet() if is_parquet else self._read_lines()
        except BaseException:
            self._raw.close()
            raise

    @property
    def place(self) -> int:
        """How far was read."""
        return self._rows_read if self.format == "parquet" else self._raw.tell()

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def skip(self, count: int) -> Any:
        """Pass over so many rows, and return their hash; of fewer where the file ends before."""
        digest = hashlib.sha256()
        for row in islice(self._rows, count):
            digest.update(row + b"\n")
        return digest

    def cut(self, first: int, max_rows: int, max_bytes: int) -> Iterator[Chunk]:
        """Yield what is left in chunks of at most so many rows, and bytes where it is several.

        `first` is the number of the next row.
        """
        rows: list[bytes] = []
        size = 0
        for row in self._rows:
            if rows and (len(rows) == max_rows or size + len(row) > max_bytes):
                yield Chunk(first, rows, self.place)
                first, rows, size = first + len(rows), [], 0
            rows.append(row)
            size += len(row)
        if rows:
            yield Chunk(first, rows, self.size)

    def _read_lines(self) -> Iterator[bytes]:
        is_packed = self.format == "jsonl.gz"
        file = gzip.GzipFile(fileobj=self._raw) if is_packed else self._raw
        number = 0
        try:
            while line := file.readline(MAX_ROW_BYTES + 1):
                if len(line) > MAX_ROW_BYTES:
                    raise LogsteerError(
                        f"{self.path}: row {number} is longer than {MAX_ROW_BYTES} bytes; is it "
                        "JSON lines, an object a line?"
                    )
                if row := line.strip():
                    number += 1
                    yield row
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise LogsteerError(f"{self.path} cannot be unpacked, row {number}: {error}") from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise LogsteerError(f"{self.path} cannot be unpacked, row {number}: {error}") from error

    def _read_parquet(self) -> Iterator[bytes]:
        try:
            import pyarrow as arrow
            from pyarrow import parquet
        except ImportError as error:
            raise LogsteerError('Parquet needs pyarrow: pip install "logsteer[tables]"') from error
        try:
            file = parquet.ParquetFile(self._raw, pre_buffer=False)
        except arrow.ArrowInvalid as error:
            raise LogsteerError(f"{self.path} is not a Parquet file: {error}") from error
        self.size = file.metadata.num_rows
        columns = [name for name in self._wanted if name in file.schema_arrow.names]
        return self._decode(file, columns)

    def _decode(self, file: Any, columns: Sequence[str]) -> Iterator[bytes]:
        for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
            for row in batch.to_pylist() if columns else [{}] * batch.num_rows:
                self._rows_read += 1
                yield to_json(row)

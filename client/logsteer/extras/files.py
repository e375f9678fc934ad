"""Rows of files: JSON lines, packed by gzip or not, and Parquet."""

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

from pydantic_core import to_json

from logsteer.errors import LogsteerError
from logsteer.extras import import_package

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


def has_rows(name: str) -> bool:
    """Return whether a name says that the file holds rows."""
    return Path(name).suffix.lower() in _SUFFIXES


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

    `place` is how far into the file they reach, in the unit of `RowFile.size`.
    """

    first: int
    rows: Sequence[bytes]
    place: int


class RowFile:
    """The rows of a file, read once from its beginning.

    `lines` are those of JSON lines as they stand, without white space at their ends; one of Parquet
    is an object of the columns that are `wanted`, those of them that the file has, written as JSON
    (None: of all). A row is a line that is not blank. `size` is the file's in bytes, and rows for
    Parquet.
    """

    def __init__(
        self, path: Path, wanted: Sequence[str] | None = None, form: FileFormat | None = None
    ) -> None:
        self.path = path
        self.format = form or find_format(path)
        self._wanted = wanted
        self._raw: BinaryIO = path.open("rb")
        self.file_bytes = path.stat().st_size
        self.size = self.file_bytes
        try:
            is_parquet = self.format == "parquet"
            self.lines = self._read_parquet() if is_parquet else self._read_lines()
        except BaseException:
            self._raw.close()
            raise
        self._rows = filter(None, self.lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
                end = first + len(rows)
                yield Chunk(first, rows, end if self.format == "parquet" else self._raw.tell())
                first, rows, size = end, [], 0
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
                row = line.strip()
                number += bool(row)
                yield row
        except (EOFError, OSError, zlib.error) as error:
            if getattr(error, "errno", None) is not None:  # of the disk, not of what gzip reads
                raise
            raise LogsteerError(f"{self.path} cannot be unpacked, row {number}: {error}") from error

    def _read_parquet(self) -> Iterator[bytes]:
        missing = LogsteerError('Parquet needs pyarrow: pip install "logsteer[tables]"')
        parquet = import_package("pyarrow.parquet", missing)
        try:
            file = parquet.ParquetFile(self._raw, pre_buffer=False)
        except ValueError as error:  # ArrowInvalid is one
            raise LogsteerError(f"{self.path} is not a Parquet file: {error}") from error
        self.size = file.metadata.num_rows
        names = file.schema_arrow.names
        columns = names if self._wanted is None else [n for n in self._wanted if n in names]
        return (
            to_json(row)
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=columns)
            for row in (batch.to_pylist() if columns else [{}] * batch.num_rows)
        )

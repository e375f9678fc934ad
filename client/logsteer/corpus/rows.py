"""Rows of a file, one by one, and what a job asks of each.

{"q": "2 + 2 =", "a": " 4"}                 a row, with fields {"context": "q", "targets": "a"}
{"context": "2 + 2 =", "targets": [" 4"]}   its item of `/logprob`
"""

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, TypeAlias

from pydantic import Field
from pydantic_core import from_json, to_json

from logsteer._calls import checked, read_request
from logsteer.errors import InvalidRequestError, LogsteerError
from logsteer.extras import import_package
from logsteer.schemas import LogprobItem, Message
from logsteer.schemas.common import OneForm, TokenId

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
    file's in bytes, and rows for Parquet.
    """

    def __init__(self, path: Path, wanted: Sequence[str]) -> None:
        self.path = path
        self.format = find_format(path)
        self._wanted = wanted
        self._raw: BinaryIO = path.open("rb")
        self.file_bytes = path.stat().st_size
        self.size = self.file_bytes
        try:
            is_parquet = self.format == "parquet"
            self._rows = self._read_parquet() if is_parquet else self._read_lines()
        except BaseException:
            self._raw.close()
            raise

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
                if row := line.strip():
                    number += 1
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
        columns = [name for name in self._wanted if name in file.schema_arrow.names]
        return (
            to_json(row)
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=columns)
            for row in (batch.to_pylist() if columns else [{}] * batch.num_rows)
        )


Row: TypeAlias = dict[str, Any]


class TextItem(OneForm):
    """A text to score, or a conversation."""

    forms: ClassVar[tuple[str, ...]] = ("text", "messages")

    text: str | None = Field(default=None, min_length=1)
    messages: list[Message] | None = Field(default=None, min_length=1)


class PromptItem(OneForm):
    """A prompt to continue."""

    forms: ClassVar[tuple[str, ...]] = ("prompt", "prompt_ids", "messages")

    prompt: str | None = Field(default=None, min_length=1)
    prompt_ids: list[TokenId] | None = Field(default=None, min_length=1)
    messages: list[Message] | None = Field(default=None, min_length=1)


@dataclass(frozen=True)
class RowKind:
    """How an endpoint takes rows.

    `item` has the fields of a row, `text` is the one that a text stands for, `sample` the part of a
    request that the rows go into. A result has `parts`, which are counted; "" for the sums of a
    text. `refused` are options that are for one request, not for each of many rows: name -> why.
    """

    item: type[LogprobItem | OneForm]
    text: str
    sample: Mapping[str, Any]
    parts: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    is_seeded: bool = False


_STREAM = {"stream": "results are written when they are whole; leave it out"}
_REFERENCE = {"reference": "a comparison is of a whole request, not of each row; leave it out"}
_SCORED = RowKind(
    LogprobItem, "context", {"items": [{"context": "a", "targets": ["b"]}]}, "targets"
)
_CONTINUED = RowKind(
    PromptItem, "prompt", {"prompts": ["a"]}, "completions", _STREAM, is_seeded=True
)
KINDS: Mapping[str, RowKind] = {
    "logprob": _SCORED,
    "diagnostics": _SCORED,
    "gradient": _SCORED,
    "perplexity": RowKind(TextItem, "text", {"texts": ["a"]}, refused=_STREAM | _REFERENCE),
    "generate": _CONTINUED,
    "steer": _CONTINUED,
}
"""Endpoint -> how it takes rows."""


@dataclass(frozen=True)
class RowForm:
    """What a job asks of each row.

    Args:
        endpoint: one of KINDS.
        options: of the request, the same for all rows; checked.
        model: id of the model, where it is said.
        fields: field of an item -> column that holds it; a field that is not named has its own.
        id_column: column whose value is given again with the result.
        targets: those of rows that have none.

    Errors: InvalidRequestError for options that do not fit the endpoint.

    """

    endpoint: str
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    id_column: str | None = None
    targets: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.endpoint not in KINDS:
            raise _refuse(f"{self.endpoint!r} takes no rows; {', '.join(KINDS)} do", "endpoint")
        kind = self.kind
        known = kind.item.model_fields
        if unknown := [name for name in self.fields if name not in known]:
            raise _refuse(f"{unknown[0]} is not a field of a row; {', '.join(known)} are", "fields")
        if self.targets and kind is not _SCORED:
            raise _refuse(f"{self.endpoint} takes no targets; leave them out", "targets")
        options = {name: value for name, value in self.options.items() if name != "model"}
        own = {"on_error": "each row has its result or its error; leave it out"}
        for name, why in {**kind.refused, **own}.items():
            if name in options:
                raise _refuse(f"{name}: {why}", name)
        if kind.is_seeded:
            options["seed"] = options.get("seed") or 0
        model = self.options.get("model", self.model)
        named = {} if model is None else {"model": model}
        asked = read_request(self.endpoint, {**options, **kind.sample, **named})
        checked = asked.model_dump(mode="json", exclude_unset=True)
        for name in kind.sample:
            del checked[name]
        object.__setattr__(self, "options", checked)

    @cached_property
    def _keys(self) -> list[tuple[str, str]]:
        """Fields of an item, and the column of each."""
        return [(name, self.fields.get(name, name)) for name in self.kind.item.model_fields]

    @property
    def kind(self) -> RowKind:
        """How the endpoint takes rows."""
        return KINDS[self.endpoint]

    @property
    def columns(self) -> list[str]:
        """Columns that may be read."""
        own = [column for _, column in self._keys]
        return own if self.id_column is None else [*own, self.id_column]

    def describe(self) -> dict[str, Any]:
        """Return what the lines of a row follow from, beside the row and the model."""
        return {
            "endpoint": self.endpoint,
            "options": dict(self.options),
            "fields": dict(self.fields),
            "id_column": self.id_column,
            "targets": list(self.targets),
        }

    def read_row(self, raw: bytes) -> tuple[Any, Row | InvalidRequestError]:
        """Return the id of a row, and its item as a dictionary, or why it has none."""
        try:
            row = from_json(raw)
        except ValueError as error:
            return None, _refuse(f"no JSON: {error}", None)
        if isinstance(row, str):
            row = {self.fields.get(self.kind.text, self.kind.text): row}
        if not isinstance(row, dict):
            return None, _refuse("no object, such as {" + f'"{self.kind.text}": "…"' + "}", None)
        own = None if self.id_column is None else row.get(self.id_column)
        item = {name: row[key] for name, key in self._keys if row.get(key) is not None}
        try:
            return own, self._check(item)
        except InvalidRequestError as error:
            return own, error

    def name_values(self, item: Row) -> str:
        """Return the field of a request that takes items such as this one."""
        if self.kind is _SCORED:
            return "items"
        (name,) = item
        return {"text": "texts", "prompt": "prompts"}.get(name, name)

    def _check(self, item: Row) -> Row:
        if not item:
            names = [column for _, column in self._keys[:3]]
            raise _refuse(f"no {' or '.join(names)} in this row; name columns by fields", None)
        if isinstance(item.get("targets"), str):
            item["targets"] = [item["targets"]]
        if self.targets and "targets" not in item and "target_ids" not in item:
            item["targets"] = list(self.targets)
        checked(self.kind.item, item)
        return item


def _refuse(detail: str, param: str | None) -> InvalidRequestError:
    return InvalidRequestError("invalid_request", detail, param=param)

"""The finished lines as the file that was asked for, which has its name once it is whole.

The same lines give the same bytes: a job that was interrupted here does this again.
"""

import gzip
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import from_json, to_json

from logsteer.corpus.form import RowForm
from logsteer.corpus.record import sync_directory
from logsteer.corpus.source import RowSource, find_format, load_arrow
from logsteer.errors import LogsteerError

GROUP_ROWS = 8192
"""Rows of a group in a Parquet file, at most."""
GROUP_BYTES = 32 * 2**20
"""Bytes of their lines, at most: a group is held in memory."""
_ERROR = (("code", str), ("detail", str), ("param", str))


def check_target(path: Path) -> None:
    """Make sure that a file of this name can be written. Errors: LogsteerError."""
    if find_format(path) in ("parquet", "jsonl.zst"):
        load_arrow(path.suffix)
    if not path.absolute().parent.is_dir():
        raise LogsteerError(f"{path}: there is no directory {path.absolute().parent}")


def place(lines: Path, target: Path, form: RowForm, source: RowSource) -> None:
    """Make the target of the lines, and give it its name. Errors: OSError."""
    kind = find_format(target)
    new = target.with_name(f"{target.name}.new")
    if kind == "jsonl":
        new = lines
    elif kind == "jsonl.gz":
        # Without a name and a time, which would differ from run to run.
        with (
            new.open("wb") as file,
            lines.open("rb") as plain,
            gzip.GzipFile("", "wb", 6, file, mtime=0) as packed,
        ):
            shutil.copyfileobj(plain, packed, 2**20)
    elif kind == "jsonl.zst":
        arrow, _ = load_arrow("zstd")
        with lines.open("rb") as plain, arrow.CompressedOutputStream(str(new), "zstd") as packed:
            shutil.copyfileobj(plain, packed, 2**20)
    else:
        _write_parquet(lines, new, form, source)
    with new.open("rb") as whole:
        os.fsync(whole.fileno())
    new.replace(target)
    sync_directory(target.absolute().parent)


def _write_parquet(lines: Path, new: Path, form: RowForm, source: RowSource) -> None:
    arrow, parquet = load_arrow("Parquet")
    result = form.kind.result
    fields = [("row", arrow.int64())]
    id_type = None
    if form.id_column is not None:
        known = source.schema is not None and form.id_column in source.schema.names
        id_type = source.schema.field(form.id_column).type if known else arrow.string()
        fields.append(("id", id_type))
    error = arrow.struct([(name, choose_type(kind, arrow)) for name, kind in _ERROR])
    fields += [("result", choose_type(result, arrow)), ("error", error)]
    schema = arrow.schema(fields)
    with parquet.ParquetWriter(new, schema) as writer:
        for group in _cut_groups(lines):
            rows = [from_json(line) for line in group]
            columns = {name: [row.get(name) for row in rows] for name, _ in fields}
            if id_type is not None:
                columns["id"] = _fit_ids(columns["id"], id_type, arrow)
            columns["result"] = [_fit(value, result) for value in columns["result"]]
            arrays = [arrow.array(columns[name], type=kind) for name, kind in fields]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))


def _cut_groups(lines: Path) -> Iterator[list[bytes]]:
    with lines.open("rb") as file:
        group: list[bytes] = []
        size = 0
        for line in file:
            if group and (len(group) == GROUP_ROWS or size + len(line) > GROUP_BYTES):
                yield group
                group, size = [], 0
            group.append(line)
            size += len(line)
        if group:
            yield group


def _fit_ids(values: list[Any], kind: Any, arrow: Any) -> Any:
    """Return ids as the column of the input has them; as text where that was JSON lines."""
    if kind == arrow.string():
        return [v if v is None or isinstance(v, str) else to_json(v).decode() for v in values]
    if arrow.types.is_integer(kind) or arrow.types.is_floating(kind):
        return values
    # What JSON has as text, such as times, is what Arrow reads from it.
    return arrow.array([None if v is None else str(v) for v in values]).cast(kind)


def choose_type(annotation: Any, arrow: Any) -> Any:
    """Return the Arrow type of a field of a schema; JSON as text where it has none of its own."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        rest = [part for part in parts if part is not NoneType]
        return choose_type(rest[0], arrow) if len(rest) == 1 else arrow.string()
    if origin is Literal:
        return choose_type(type(parts[0]), arrow)
    if origin in (list, tuple):
        return arrow.list_(choose_type(parts[0], arrow))
    if origin is dict:
        return arrow.map_(arrow.string(), choose_type(parts[1], arrow))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields.items()
        return arrow.struct([(name, choose_type(f.annotation, arrow)) for name, f in fields])
    plain = {int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}
    return plain.get(annotation, arrow.string())


def _fit(value: Any, annotation: Any) -> Any:
    """Return a value as Arrow takes it for the type of `choose_type`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if value is None:
        return None
    if origin in (Union, UnionType):
        rest = [part for part in parts if part is not NoneType]
        return _fit(value, rest[0]) if len(rest) == 1 else to_json(value).decode()
    if origin in (list, tuple):
        flat = parts[0] in (int, float, str, bool)
        return value if flat else [_fit(entry, parts[0]) for entry in value]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields.items()
        return {name: _fit(value.get(name), f.annotation) for name, f in fields}
    return value

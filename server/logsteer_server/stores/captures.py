"""Data sets of activations in the store, each a few objects below its name.

    captures/<name>/source-<sha256>.jsonl      the rows that are read
    captures/<name>/shard-00000.safetensors    activations of consecutive documents
    captures/<name>/sums-00000.safetensors     sums over all documents up to that shard's last
    captures/<name>/index.json                 a `CaptureIndex`, written whole after each shard
    keys/<key>/captures/…                      the same of a key's namespace
    datasets/…                                 JSON lines and Parquet that requests name

What the index does not list does not count: a shard whose index was not written is written again.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import ValidationError
from safetensors.numpy import save

from logsteer.errors import APIError, api_error
from logsteer.schemas import ActivationItem
from logsteer.schemas.captures import CaptureIndex, CaptureProblem, CaptureShard, name_shard
from logsteer_server.contract.captures import Capture, CapturedActivations
from logsteer_server.stores.objects import PIECE, ObjectEntry, Objects, Upload
from logsteer_server.stores.store import refuse_size, stamp
from logsteer_server.stores.upkeep import SHARED_BYTES

log = logging.getLogger(__name__)

DIRECTORY = "captures"
INDEX = "index.json"
SOURCE = "source-"
DATASETS = "datasets"
"""What data sets that requests name by their place are below: nothing of a key is."""
PARQUET_ROWS = 256
"""Read at once."""
MAX_LINE = 2**24
"""Bytes of a line: what follows is another one."""
SHARD_BYTES = 2**26
"""Of activations in float32, from which on a shard is written."""
MAX_FAILURES = 1000
"""Documents with a problem that an index lists."""
NO_TOKENS = np.zeros(0, np.int32)


def name_sums(number: int) -> str:
    """Return the name of the file of the sums after a shard."""
    return f"sums-{number:05d}.safetensors"


def read_lines(file: IO[bytes], first: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each line that is not blank, from the number `first` on."""
    number = 0
    for line in iter(partial(file.readline, MAX_LINE), b""):
        if line.strip():
            if number >= first:
                yield number, line
            number += 1


@dataclass(slots=True)
class CapturedDocument:
    """A document of a data set: its tokens and their activations, or its problem."""

    number: int
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    activations: CapturedActivations | None = None
    is_cut: bool = False
    problem: APIError | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the document in its shard."""
        return 0 if self.activations is None else self.activations.activations_LTD.shape[1]


def read_parquet(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the rows of a Parquet file as JSON lines. Errors: APIError `invalid_request`."""
    try:
        from pyarrow import parquet

        table = parquet.ParquetFile(file)
        names = {*ActivationItem.model_fields, "text"}.intersection(table.schema_arrow.names)
        for batch in table.iter_batches(PARQUET_ROWS, columns=sorted(names)):
            for row in batch.to_pylist():
                yield orjson.dumps({n: v for n, v in row.items() if v is not None}) + b"\n"
    except (ImportError, ValueError, OSError, NotImplementedError) as error:
        detail = f"The Parquet file cannot be read by pyarrow (pip install pyarrow): {error}"
        raise api_error("invalid_request", detail, param="source") from error


def begin_index(capture: Capture, **about: Any) -> CaptureIndex:
    """Return the index of a data set without documents; `about`: what else describes it."""
    counts = ("documents", "problems", "truncated", "tokens", "rows", "num_shards", "bytes")
    return CaptureIndex(
        **about,
        state="running",
        layers=list(capture.layers),
        hook=capture.hook,
        read=capture.read,
        non_finite=0,
        seconds=0.0,
        created=stamp(),
        shards=[],
        failures=[],
        **dict.fromkeys(counts, 0),
    )


def count_shard_rows(index: CaptureIndex) -> int:
    """Return the rows from which on a shard is written."""
    return max(1, SHARD_BYTES // (4 * index.width * len(index.layers)))


def lay_out(index: CaptureIndex, documents: Iterable[CapturedDocument]) -> dict[str, Any]:
    """Return the tensors of a shard of documents, in float32: see `CaptureShard`."""
    parts: dict[str, list[Any]] = {name: [] for name in ("document", "position", "token_ids")}
    parts |= {f"{index.hook}.{layer}": [] for layer in index.layers}
    for document in documents:
        if (found := document.activations) is None:
            continue
        numbers = np.full(document.num_rows, document.number)
        places = np.full_like(numbers, -1) if index.read == "mean" else found.places
        token_ids = places if index.read == "mean" else document.tokens[places]
        columns = (numbers, places, token_ids, *found.activations_LTD)
        for values, own in zip(parts.values(), columns, strict=True):
            values.append(own)
    return {
        name: np.concatenate(own)
        if own and own[0].ndim == 2
        else np.concatenate([np.zeros(0), *own]).astype(np.int32)
        for name, own in parts.items()
    }


def add_shard(
    index: CaptureIndex,
    documents: Sequence[CapturedDocument],
    tensors: Mapping[str, Any],
    *,
    writes: bool = True,
) -> tuple[CaptureIndex, dict[str, bytes]]:
    """Return the index with documents as its next shard, and the shard's file by name.

    `tensors`: of `lay_out`. There is no file without rows, or if it is not to be written.
    """
    rows, num_lost, size = len(tensors["document"]), 0, 0
    files: dict[str, bytes] = {}
    if writes and rows:
        data, num_lost = _encode(tensors, index.dtype)
        files[name_shard(len(index.shards))], size = data, len(data)
    failures = [
        CaptureProblem(document=one.number, code=one.problem.code, detail=one.problem.detail)
        for one in documents
        if one.problem is not None
    ]
    read = [one for one in documents if one.problem is None]
    shard = CaptureShard(first=index.documents, documents=len(documents), rows=rows, bytes=size)
    changed = {
        "shards": [*index.shards, shard],
        "num_shards": index.num_shards + 1,
        "documents": index.documents + len(documents),
        "problems": index.problems + len(failures),
        "failures": [*index.failures, *failures][:MAX_FAILURES],
        "truncated": index.truncated + sum(one.is_cut for one in read),
        "tokens": index.tokens + sum(len(one.tokens) for one in read),
        "rows": index.rows + rows,
        "bytes": index.bytes + size,
        "non_finite": index.non_finite + num_lost,
    }
    return index.model_copy(update=changed), files


def _encode(tensors: Mapping[str, Any], dtype: str) -> tuple[bytes, int]:
    """Return a shard's file, and how many of its rows have a number that is not finite there."""
    with np.errstate(over="ignore"):
        cast = {n: rows.astype(dtype) for n, rows in tensors.items() if rows.ndim == 2}
    is_whole_LN = [np.isfinite(rows_ND).all(1) for rows_ND in cast.values()]
    num_lost = int((~np.logical_and.reduce(is_whole_LN)).sum())
    return save({**tensors, **cast}), num_lost


def refuse_name(there: CaptureIndex, param: str = "name") -> APIError:
    """Return the error for a name that another request has."""
    detail = (
        f"The capture {there.name!r} exists, of another request: it was created at {there.created}"
        ". Send overwrite=true to replace it, DELETE it, or choose another name."
    )
    return api_error("exists", detail, param=param)


@dataclass(frozen=True, slots=True)
class CaptureStore:
    """The data sets of activations of one namespace, of at most `max_bytes`.

    Methods block. Errors: APIError `not_found` for a name that nothing has, `internal` for a
    damaged index, and those of `Objects`.
    """

    objects: Objects
    prefix: str = ""
    """What its places begin with: nothing, or `keys/<key>/`."""
    max_bytes: int = SHARED_BYTES
    writing: Lock = field(default_factory=Lock, compare=False)
    """Held while what an answer has captured is written."""

    def locate(self, name: str, file: str = "") -> str:
        """Return the place of a file of a data set."""
        return f"{self.prefix}{DIRECTORY}/{name}/{file}"

    def find(self, name: str) -> CaptureIndex | None:
        """Return the index of a name; None where nothing has it."""
        try:
            data = self.objects.read(self.locate(name, INDEX))
        except FileNotFoundError:
            return None
        try:
            return CaptureIndex.model_validate_json(data)
        except ValidationError as error:
            log.error("%s is damaged", self.locate(name, INDEX))
            detail = f"The index of capture {name!r} is damaged: DELETE it, and capture again."
            raise api_error("internal", detail) from error

    def read(self, name: str) -> CaptureIndex:
        """Return the index of a name."""
        if (index := self.find(name)) is None:
            raise api_error("not_found", f"No capture is named {name!r}; GET /captures lists all.")
        return index

    def list_all(self) -> list[CaptureIndex]:
        """Return every index that can be read, by name."""
        entries = self.objects.list(f"{self.prefix}{DIRECTORY}")
        found = []
        for entry in entries:
            if entry.name == INDEX:
                with suppress(APIError):
                    found.append(self.find(entry.place.split("/")[-2]))
        return [index for index in found if index is not None]

    def write_index(self, index: CaptureIndex) -> None:
        """Write an index whole."""
        data = index.model_dump_json().encode()
        self.objects.write(data, self.locate(index.name, INDEX), create=False)

    def list_files(self, name: str) -> list[ObjectEntry]:
        """Return all files of a name."""
        return self.objects.list(self.locate(name).rstrip("/"))

    def check_room(self, added: int) -> None:
        """Make sure that a namespace has room. Errors: APIError `payload_too_large`."""
        entries = self.objects.list(f"{self.prefix}{DIRECTORY}")
        total = added + sum(entry.size for entry in entries)
        if total > self.max_bytes:
            raise refuse_size("capture", total, self.max_bytes)

    def write_files(self, name: str, files: Mapping[str, bytes]) -> None:
        """Write files of a name. Errors: as `check_room`, for a key's."""
        if self.prefix:
            self.check_room(sum(map(len, files.values())))
        for file, data in files.items():
            self.objects.write(data, self.locate(name, file), create=False)

    def receive(self, _name: str, announced: int = 0) -> Upload:
        """Open a file for the upload of a data set. Errors: APIError `payload_too_large`."""
        self.check_room(announced)
        return self.objects.open_upload()

    def put_source(self, name: str, upload: Upload, sha256: str) -> None:
        """Store a data set that was uploaded for a name, in place of another one."""
        place = self.locate(name, f"{SOURCE}{sha256}.jsonl")
        self.check_room(upload.size)
        self.objects.write_file(upload, place, create=False)
        self.remove(name, lambda file: file.startswith(SOURCE) and f"/{file}" not in place)

    def write_source(self, name: str, pieces: Iterable[bytes]) -> str:
        """Store pieces of JSON lines as a name's data set; return its SHA-256."""
        upload = self.receive(name)
        try:
            for piece in pieces:
                upload.write(piece)
            sha256 = upload.finish()
            self.put_source(name, upload, sha256)
        finally:
            upload.discard()
        return sha256

    def copy_source(self, name: str, path: str) -> str:
        """Store an object below `datasets/` as a name's data set; return its rows' SHA-256.

        Errors: APIError `not_found`, and those of `read_parquet`.
        """
        place = f"{DATASETS}/{path}"
        try:
            with self.objects.open_file(place) as file:
                is_parquet = path.endswith(".parquet")
                pieces = read_parquet(file) if is_parquet else iter(partial(file.read, PIECE), b"")
                return self.write_source(name, pieces)
        except FileNotFoundError as error:
            detail = f"The store has no object {place}: put it there, or send the rows as items."
            raise api_error("not_found", detail, param="source") from error

    def find_source(self, name: str) -> str | None:
        """Return the SHA-256 of the data set that was uploaded for a name; None without one."""
        files = (entry.name for entry in self.list_files(name))
        found = [file for file in files if file.startswith(SOURCE)]
        return found[0].removeprefix(SOURCE).removesuffix(".jsonl") if found else None

    def open_source(self, name: str, sha256: str) -> IO[bytes]:
        """Open a data set's file."""
        try:
            return self.objects.open_file(self.locate(name, f"{SOURCE}{sha256}.jsonl"))
        except FileNotFoundError as error:
            detail = f"The data set of capture {name!r} is gone: PUT it again."
            raise api_error("not_found", detail) from error

    def remove(self, name: str, which: Callable[[str], bool] = lambda _: True) -> None:
        """Remove the files of a name that `which` selects, the index first."""
        for entry in sorted(self.list_files(name), key=lambda entry: entry.name != INDEX):
            if which(entry.name):
                with suppress(FileNotFoundError):
                    self.objects.remove(entry.place)

"""Results of earlier score jobs: the same work is answered again without the engine.

    key     SHA-256 of the scope (what computes) and the job (what is computed)
    value   the job's columns and alternatives, as raw buffers in MessagePack
    stores  a dictionary in memory, and where a file is named, SQLite behind it

Each store belongs to one thread, so neither needs a lock, and what one call keeps is found by the
next: a thread works in the order in which it was asked.
"""

import asyncio
import hashlib
import json
import logging
import math
import re
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from typing import Any, cast

import msgpack
import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from logsteer_server.contract.batches import ScoreJobs, ScoreOutputs, make_fingerprints
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.finite import find_finite
from logsteer_server.contract.jobs import Job, Output, ScoreJob, ScoreOutput
from logsteer_server.contract.plan import SteeringTrace
from logsteer_server.models.cachefile import CacheFile
from logsteer_server.settings import ModelSettings, Settings

log = logging.getLogger(__name__)

VERSION = "logsteer-results-6"
"""Part of every key: another number makes all older results unreachable."""

ENTRY_BYTES = 360
"""What an entry takes in memory beyond its value: its key, object headers, places in three dicts.

Measured with tracemalloc at 267 to 360, by how full the dictionaries are.
"""

FOUND_AT_ONCE = 1024
"""Jobs of a call that are looked up before others have a turn."""

MAX_WAITING_WRITES = 64
"""Batches that may wait for the disk; further ones stay in memory only."""


def digest_scope(info: EngineInfo, settings: ModelSettings) -> bytes:
    """Return what every key of a model begins with: all facts about it that may change its numbers.

    Settings that cannot are named here, so that a new one counts until somebody knows better.
    """
    engine = asdict(info)
    for name in ("tokenizer_path", "columns", "lacks", "hook_widths", "capture_rows", "room"):
        del engine[name]
    harmless = {"id", "path", "required", "memory", "max_model_len"}
    harmless |= {"capture_bytes", "steering_probes", "replicas"}
    facts = [VERSION, engine, settings.model_dump(mode="json", exclude=harmless)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def make_keys(scope: bytes, jobs: Sequence[Job]) -> list[bytes | None]:
    """Return the key of each job's result; None for a job whose result is used once."""
    return [
        None if own is None else hashlib.sha256(scope + own).digest()
        for own in make_fingerprints(jobs)
    ]


def pack_outputs(outputs: ScoreOutputs, columns: Iterable[str]) -> list[bytes]:
    """Pack each output: its trace, and of each array dtype, width (0: no table), buffer."""
    arrays: list[npt.NDArray[np.generic]] = [outputs.columns[name] for name in columns]
    if outputs.top_ids is not None and outputs.top_logprobs is not None:
        arrays += [outputs.top_ids, outputs.top_logprobs]
    row_bytes = [array.dtype.itemsize * math.prod(array.shape[1:]) for array in arrays]
    heads = [(array.dtype.str, array.shape[1] if array.ndim > 1 else 0) for array in arrays]
    buffers = [array.tobytes() for array in arrays]
    starts = outputs.row_starts.tolist()
    pack = msgpack.Packer().pack
    packed: list[bytes] = []
    for n, trace in enumerate(outputs.traces or [None] * len(outputs)):
        fields: list[Any] = [trace and _write_trace(trace)]
        for (dtype, width), buffer, size in zip(heads, buffers, row_bytes, strict=True):
            fields += dtype, width, buffer[starts[n] * size : starts[n + 1] * size]
        packed.append(pack(fields))
    return packed


def _write_trace(trace: SteeringTrace) -> list[Any]:
    sites = {name: list(measured) for name, measured in trace.sites.items()}
    return [list(trace.tokens), sites, list(trace.passed)]


def unpack_output(value: bytes, columns: Sequence[str]) -> ScoreOutput:
    """Unpack what `pack_outputs` packed, with read-only arrays. No token of it was read again.

    Errors: ValueError for anything else.
    """
    try:
        return _unpack(value, columns)
    except (TypeError, LookupError, OverflowError, StopIteration, MemoryError) as error:
        raise ValueError(f"it is not a packed result: {error}") from error


def _unpack(value: bytes, columns: Sequence[str]) -> ScoreOutput:
    fields = iter(msgpack.unpackb(value))
    trace = next(fields)
    if trace is not None:
        tokens, sites, passed = trace
        found = {name: (count, mean) for name, (count, mean) in sites.items()}
        trace = SteeringTrace(tuple(tokens), found, tuple(passed))
    arrays = [
        array.reshape(-1, width) if width else array
        for dtype, width, data in zip(fields, fields, fields, strict=True)
        for array in (np.frombuffer(data, _check_dtype(dtype)),)
    ]
    if len(arrays) < len(columns):
        raise ValueError(f"it has {len(arrays)} arrays for {len(columns)} columns")
    top_ids, top_logprobs = arrays[len(columns) :] or (None, None)
    own = dict(zip(columns, arrays, strict=False))
    return ScoreOutput(own, top_ids, top_logprobs, cached_tokens=0, trace=trace)


@lru_cache(64)
def _check_dtype(name: object) -> str:
    """Return the name of a dtype of numbers: numpy would evaluate others as Python."""
    if not isinstance(name, str) or not re.fullmatch(r"[<>|][iuf][1248]", name):
        raise ValueError(f"{str(name)[:20]!r} is not a type of numbers")
    return name


@dataclass(frozen=True, slots=True)
class MissingJob:
    """A job to compute, for all `indices` at which the call has it.

    Its `columns` are kept under `key`.
    """

    key: bytes | None
    indices: list[int]
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """What the cache knows of a call's jobs, by their indices; `by_key`: those that it does not.

    A job without a key stands there under its index.
    """

    hits: list[tuple[int, ScoreOutput]] = field(default_factory=list)
    by_key: dict[bytes | int, MissingJob] = field(default_factory=dict)

    @property
    def missing(self) -> list[MissingJob]:
        """The jobs to compute."""
        return list(self.by_key.values())


Computed = tuple[Sequence[MissingJob], Sequence[Output]]
"""Jobs that were missing, and what came of each."""


class ResultCache:
    """Results by key: at most `max_bytes` in memory, and all that `file` has room for."""

    def __init__(self, max_bytes: int, file: CacheFile | None = None) -> None:
        self._values: LRUCache[bytes, bytes] = LRUCache(max_bytes, getsizeof=_measure)
        self._file = file
        self._memory_thread = ThreadPoolExecutor(1, "result-cache")
        self._disk_thread = ThreadPoolExecutor(1, "result-cache-disk")
        self._disk_room = threading.Semaphore(MAX_WAITING_WRITES)
        self._open = True

    @classmethod
    def open(cls, settings: Settings) -> "ResultCache":
        """Open the cache that the settings describe. Errors: ConfigurationError."""
        file = None
        if settings.cache_file is not None:
            path = settings.directory / settings.cache_file.expanduser()
            file = CacheFile.open(path)
        return cls(settings.cache_bytes, file)

    @property
    def is_on(self) -> bool:
        """Whether anything is ever kept."""
        return self._open and (self._values.maxsize > 0 or self._file is not None)

    @property
    def num_bytes(self) -> int:
        """Memory that the results in it take."""
        return int(self._values.currsize)

    async def find(self, scope: bytes, jobs: Sequence[Job]) -> Findings:
        """Return outputs of the jobs that are known, and the others, equal ones together.

        A long call is looked up in parts, so that others have their turns between them.
        """
        loop, found = asyncio.get_running_loop(), Findings()
        for first in range(0, len(jobs), FOUND_AT_ONCE):
            part = range(first, min(len(jobs), first + FOUND_AT_ONCE))
            find = partial(self._find, scope, jobs, part, found)
            keys = await loop.run_in_executor(self._memory_thread, find)
            if self._file is None or not keys:
                continue
            values = await loop.run_in_executor(self._disk_thread, self._file.read, keys)
            if values:
                add = partial(self._add, found, values)
                await loop.run_in_executor(self._memory_thread, add)
        return found

    def _find(self, scope: bytes, jobs: Sequence[Job], part: range, found: Findings) -> list[bytes]:
        """Look for some of the jobs in memory; return the keys that are new among those missing."""
        new: list[bytes] = []
        own = jobs[part.start : part.stop]
        for index, key, columns in zip(part, make_keys(scope, own), list_columns(own), strict=True):
            if key is None:
                found.by_key[index] = MissingJob(None, [index], columns)
            elif (value := self._values.get(key)) is not None:
                found.hits.append((index, unpack_output(value, columns)))
            elif key in found.by_key:
                found.by_key[key].indices.append(index)
            else:
                found.by_key[key] = MissingJob(key, [index], columns)
                new.append(key)
        return new

    def _add(self, found: Findings, values: dict[bytes, bytes]) -> None:
        """Move what the disk had to the hits; it stays in memory from now on."""
        for key, value in values.items():
            entry = found.by_key[key]
            try:
                hits = [(index, unpack_output(value, entry.columns)) for index in entry.indices]
            except ValueError as error:
                log.warning("a result in the cache's file is passed by: %s", error)
                continue
            self._remember(key, value)
            del found.by_key[key]
            found.hits.extend(hits)

    def _remember(self, key: bytes, value: bytes) -> None:
        with suppress(ValueError):  # it is larger than the memory
            self._values[key] = value

    def keep(self, computed: Sequence[Computed]) -> None:
        """Keep results; returns at once, and a `find` that begins later finds them.

        One that has a NaN is not kept: it says more of the machine or the text than of the model.
        """
        if self.is_on:
            self._memory_thread.submit(self._keep, computed).add_done_callback(_report)

    def _keep(self, computed: Sequence[Computed]) -> None:
        packed = [entry for missing, outputs in computed for entry in _pack(missing, outputs)]
        for key, value in packed:
            self._remember(key, value)
        if self._file is None or not packed:
            return
        if not self._disk_room.acquire(blocking=False):
            log.warning("the disk is behind: %d results are kept in memory only", len(packed))
            return
        future = self._disk_thread.submit(self._file.write, packed)
        future.add_done_callback(lambda _: self._disk_room.release())
        future.add_done_callback(_report)

    def close(self) -> None:
        """Write what still waits, and close the file. Blocks."""
        self._open = False
        self._memory_thread.shutdown()
        if self._file is not None:
            self._disk_thread.submit(self._file.close)
        self._disk_thread.shutdown()


def list_columns(jobs: Sequence[Job]) -> list[tuple[str, ...]]:
    """Return the columns of each job; none of one that is no score job, which is not kept."""
    if isinstance(jobs, ScoreJobs):
        return [jobs.like.columns] * len(jobs)
    return [job.columns if isinstance(job, ScoreJob) else () for job in jobs]


def _pack(missing: Sequence[MissingJob], outputs: Sequence[Output]) -> list[tuple[bytes, bytes]]:
    """Return keys and values of what is kept: all but results with a NaN."""
    if not isinstance(outputs, ScoreOutputs):
        pairs = [(e, o) for e, o in zip(missing, outputs, strict=True) if e.key is not None]
        return [
            kept
            for entry, output in pairs
            for kept in _pack([entry], ScoreOutputs.of([cast(ScoreOutput, output)]))
        ]
    values = pack_outputs(outputs, missing[0].columns)
    return [
        (entry.key, value)
        for entry, value, is_number in zip(missing, values, find_finite(outputs), strict=True)
        if entry.key is not None and is_number
    ]


def _measure(value: bytes) -> int:
    return len(value) + ENTRY_BYTES


def _report(future: Future[None]) -> None:
    if error := future.exception():
        log.error("results could not be kept", exc_info=error)

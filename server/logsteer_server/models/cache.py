"""Results of earlier score jobs: the same work is answered again without the engine.

    key     SHA-256 of the scope (what computes) and the job (what is computed)
    value   the job's columns and alternatives, as raw buffers in MessagePack

One thread has them, so there is no lock, and what one call keeps is found by the next: the thread
works in the order in which it was asked.
"""

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import msgpack
import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from logsteer_server.contract.batches import ScoreJobs, ScoreOutputs, find_finite, make_fingerprints
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import Job, Output, ScoreJob, ScoreOutput
from logsteer_server.contract.plan import SteeringTrace
from logsteer_server.settings import ModelSettings

log = logging.getLogger(__name__)

ENTRY_BYTES = 360
"""What an entry takes in memory beyond its value: its key, object headers, places in three dicts.

Measured with tracemalloc at 267 to 360, by how full the dictionaries are.
"""

FOUND_AT_ONCE = 1024
"""Jobs of a call that are looked up before others have a turn."""


def digest_scope(info: EngineInfo, settings: ModelSettings) -> bytes:
    """Return what every key of a model begins with: all facts about it that may change its numbers.

    Settings that cannot are named here, so that a new one counts until somebody knows better.
    """
    engine = asdict(info)
    for name in ("tokenizer_path", "columns", "lacks", "hook_widths", "capture_rows", "room"):
        del engine[name]
    harmless = {"id", "path", "required", "memory", "max_model_len"}
    harmless |= {"capture_bytes", "steering_probes", "replicas"}
    facts = [engine, settings.model_dump(mode="json", exclude=harmless)]
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
    """Unpack what `pack_outputs` packed, with read-only arrays. No token of it was read again."""
    fields = iter(msgpack.unpackb(value))
    trace = next(fields)
    if trace is not None:
        tokens, sites, passed = trace
        found = {name: (count, mean) for name, (count, mean) in sites.items()}
        trace = SteeringTrace(tuple(tokens), found, tuple(passed))
    arrays = [
        array.reshape(-1, width) if width else array
        for dtype, width, data in zip(fields, fields, fields, strict=True)
        for array in (np.frombuffer(data, dtype),)
    ]
    top_ids, top_logprobs = arrays[len(columns) :] or (None, None)
    own = dict(zip(columns, arrays, strict=False))
    return ScoreOutput(own, top_ids, top_logprobs, cached_tokens=0, trace=trace)


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
    """Results by key, in at most `max_bytes` of memory."""

    def __init__(self, max_bytes: int) -> None:
        self._values: LRUCache[bytes, bytes] = LRUCache(max_bytes, getsizeof=_measure)
        self._thread = ThreadPoolExecutor(1, "result-cache")
        self._open = True

    @property
    def is_on(self) -> bool:
        """Whether anything is ever kept."""
        return self._open and self._values.maxsize > 0

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
            await loop.run_in_executor(self._thread, self._find, scope, jobs, part, found)
        return found

    def _find(self, scope: bytes, jobs: Sequence[Job], part: range, found: Findings) -> None:
        """Add what is known of some of the jobs to `found`."""
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

    def keep(self, computed: Sequence[Computed]) -> None:
        """Keep results; returns at once, and a `find` that begins later finds them.

        One that has a NaN is not kept: it says more of the machine or the text than of the model.
        """
        if self.is_on:
            self._thread.submit(self._keep, computed).add_done_callback(_report)

    def _keep(self, computed: Sequence[Computed]) -> None:
        for missing, outputs in computed:
            for key, value in _pack(missing, outputs):
                with suppress(ValueError):  # it is larger than the memory
                    self._values[key] = value

    def close(self) -> None:
        """Keep no more, and end the thread. Blocks."""
        self._open = False
        self._thread.shutdown()


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

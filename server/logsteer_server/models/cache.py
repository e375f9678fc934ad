"""Results of earlier score jobs: the same work is answered again without the engine.

    key     the scope (what computes) and the SHA-256 of the job (what is computed)
    value   the job's columns and alternatives, row by row, and their dtype

One thread has them, so there is no lock, and what one call keeps is found by the next: the thread
works in the order in which it was asked.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, cast

import msgpack
import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from logsteer_server.contract.batches import ScoreOutputs, find_finite, make_fingerprints
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import Job, Output, ScoreOutput
from logsteer_server.contract.plan import SteeringTrace
from logsteer_server.settings import ModelSettings

log = logging.getLogger(__name__)

ENTRY_BYTES = 444
"""What an entry takes in memory beyond its value: its key, object headers, places in three dicts.

Measured with tracemalloc at 338 to 444, by how full the dictionaries are.
"""

SCOPE_BYTES = 16
TOP_IDS, TOP_LOGPROBS = "top_ids", "top_logprobs"
KNOWN_DTYPES = 64
"""Of rows, which equal entries share: a server is asked for few kinds of columns at a time."""

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
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()[:SCOPE_BYTES]


def make_keys(scope: bytes, jobs: Sequence[Job]) -> list[bytes | None]:
    """Return the key of each job's result; None for a job whose result is used once."""
    return [None if own is None else scope + own for own in make_fingerprints(jobs)]


Packed = tuple[np.dtype[np.void], bytes, bytes]
"""An output: what a row consists of, its rows, and its trace, empty where it has none."""


def pack_outputs(outputs: ScoreOutputs) -> list[Packed]:
    """Pack each output. A row has a field for each column, and two for alternatives."""
    arrays: dict[str, npt.NDArray[Any]] = dict(outputs.columns)
    if outputs.top_ids is not None and outputs.top_logprobs is not None:
        arrays |= {TOP_IDS: outputs.top_ids, TOP_LOGPROBS: outputs.top_logprobs}
    dtype = _make_dtype(*((name, own.dtype.str, own.shape[1:]) for name, own in arrays.items()))
    rows = np.empty(outputs.row_starts[-1], dtype)
    for name, array in arrays.items():
        rows[name] = array
    packed, ends = rows.tobytes(), (dtype.itemsize * outputs.row_starts).tolist()
    traces = map(_pack_trace, outputs.traces or [None] * len(outputs))
    return [
        (dtype, packed[start:end], trace)
        for start, end, trace in zip(ends, ends[1:], traces, strict=False)
    ]


@lru_cache(KNOWN_DTYPES)
def _make_dtype(*columns: tuple[str, str, tuple[int, ...]]) -> np.dtype[np.void]:
    """Return the dtype of rows with these fields; the same object for equal ones."""
    return np.dtype(list(columns))


def _pack_trace(trace: SteeringTrace | None) -> bytes:
    if trace is None:
        return b""
    sites = {name: list(measured) for name, measured in trace.sites.items()}
    packed: bytes = msgpack.packb([list(trace.tokens), sites, list(trace.passed)])
    return packed


def unpack_output(packed: Packed) -> ScoreOutput:
    """Unpack what `pack_outputs` packed. No token of it was read again."""
    dtype, data, packed_trace = packed
    rows, trace = np.frombuffer(data, dtype), None
    if packed_trace:
        tokens, sites, passed = msgpack.unpackb(packed_trace)
        found = {name: (count, mean) for name, (count, mean) in sites.items()}
        trace = SteeringTrace(tuple(tokens), found, tuple(passed))
    columns = {name: np.ascontiguousarray(rows[name]) for name in dtype.names or ()}
    top_ids, top_logprobs = columns.pop(TOP_IDS, None), columns.pop(TOP_LOGPROBS, None)
    return ScoreOutput(columns, top_ids, top_logprobs, trace=trace)


MissingJob = tuple[bytes | int, list[int]]
"""A job to compute: the key that its output is kept under, or a number where it is not, and all
indices at which the call has it."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What the cache knows of a call's jobs, by their indices; `by_key`: those that it does not.

    A job without a key stands there under its index.
    """

    hits: list[tuple[int, ScoreOutput]] = field(default_factory=list)
    by_key: dict[bytes | int, list[int]] = field(default_factory=dict)

    @property
    def missing(self) -> list[MissingJob]:
        """The jobs to compute."""
        return list(self.by_key.items())


Computed = tuple[Sequence[MissingJob], Sequence[Output]]
"""Jobs that were missing, and what came of each."""


class ResultCache:
    """Results by key, in at most `max_bytes` of memory."""

    def __init__(self, max_bytes: int) -> None:
        self._values: LRUCache[bytes, Packed] = LRUCache(max_bytes, getsizeof=_measure)
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
        for index, key in zip(part, make_keys(scope, own), strict=True):
            if key is not None and (value := self._values.get(key)) is not None:
                found.hits.append((index, unpack_output(value)))
            else:
                found.by_key.setdefault(index if key is None else key, []).append(index)

    def keep(self, computed: Sequence[Computed]) -> None:
        """Keep results; returns at once, and a `find` that begins later finds them.

        One that has a NaN is not kept: it says more of the machine or the text than of the model.
        """
        if self.is_on:
            self._thread.submit(self._keep, computed).add_done_callback(_report)

    def _keep(self, computed: Sequence[Computed]) -> None:
        for missing, outputs in computed:
            for key, value in _pack(missing, outputs):
                if _measure(value) <= self._values.maxsize:
                    self._values[key] = value

    def close(self) -> None:
        """Keep no more, and end the thread. Blocks."""
        self._open = False
        self._thread.shutdown()


def _pack(
    missing: Sequence[MissingJob], outputs: Sequence[Output]
) -> Iterator[tuple[bytes, Packed]]:
    """Yield keys and values of what is kept: all but results with a NaN."""
    if isinstance(outputs, ScoreOutputs):
        packed, finite = pack_outputs(outputs), find_finite(outputs)
        for (key, _), value, is_number in zip(missing, packed, finite, strict=True):
            if isinstance(key, bytes) and is_number:
                yield key, value
        return
    for entry, output in zip(missing, outputs, strict=True):
        if isinstance(entry[0], bytes):
            yield from _pack([entry], ScoreOutputs.of([cast(ScoreOutput, output)]))


def _measure(value: Packed) -> int:
    return len(value[1]) + len(value[2]) + ENTRY_BYTES


def _report(future: Future[None]) -> None:
    if error := future.exception():
        log.error("results could not be kept", exc_info=error)

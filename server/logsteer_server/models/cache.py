"""The result cache: equal score jobs are answered without the engine.

    key     the scope (what computes) and the SHA-256 of the job (what is computed)
    value   the job's columns, row by row, and their dtype

One thread owns the cache and serves requests in order: no lock is needed, and a result that one
call stores is visible to the next.
"""

import asyncio
import hashlib
import json
import logging
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import cast

import numpy as np
from cachetools import LRUCache

from logsteer_server.contract.batches import ScoreOutputs, find_finite, make_fingerprints
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import Job, Output, ScoreOutput
from logsteer_server.settings import ModelSettings

log = logging.getLogger(__name__)

ENTRY_BYTES = 444
"""Memory of an entry beyond its value: key, object headers, slots in three dictionaries.

Measured with tracemalloc: 338 to 444, by the load of the dictionaries.
"""

SCOPE_BYTES = 16
KNOWN_DTYPES = 64
"""Row dtypes to keep: requests use few sets of columns at a time."""

FOUND_AT_ONCE = 1024
"""Jobs looked up before other calls get a turn."""


def digest_scope(info: EngineInfo, settings: ModelSettings) -> bytes:
    """Return the prefix of a model's keys: a digest of all facts that may change its numbers.

    Settings that cannot are excluded here by name, so that a new setting counts by default.
    """
    engine = asdict(info)
    for name in ("tokenizer_path", "columns", "lacks", "hook_widths", "capture_rows", "room"):
        del engine[name]
    harmless = {"id", "path", "required", "memory", "max_model_len"}
    harmless |= {"capture_bytes", "steering_probes", "replicas"}
    facts = [engine, settings.model_dump(mode="json", exclude=harmless)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()[:SCOPE_BYTES]


def make_keys(scope: bytes, jobs: Sequence[Job]) -> list[bytes | None]:
    """Return the key of each job's result; None if the result is not to be stored."""
    return [None if own is None else scope + own for own in make_fingerprints(jobs)]


Packed = tuple[np.dtype[np.void], bytes, bytes]
"""A packed output: the fields of a row, its rows, and its trace, empty without one."""


def pack_outputs(outputs: ScoreOutputs) -> list[Packed]:
    """Pack each output. A row has a field for each column."""
    arrays = outputs.columns
    dtype = _make_dtype(*((name, own.dtype.str, own.shape[1:]) for name, own in arrays.items()))
    rows = np.empty(outputs.row_starts[-1], dtype)
    for name, array in arrays.items():
        rows[name] = array
    packed, ends = rows.tobytes(), (dtype.itemsize * outputs.row_starts).tolist()
    return [
        (dtype, packed[start:end], b"" if trace is None else pickle.dumps(trace))
        for start, end, trace in zip(ends, ends[1:], outputs.traces, strict=False)
    ]


@lru_cache(KNOWN_DTYPES)
def _make_dtype(*columns: tuple[str, str, tuple[int, ...]]) -> np.dtype[np.void]:
    """Return the dtype of rows with these fields, one object for equal arguments."""
    return np.dtype(list(columns))


def unpack_output(packed: Packed) -> ScoreOutput:
    """Unpack the result of `pack_outputs`, with no cached tokens."""
    dtype, data, dumped = packed
    trace = pickle.loads(dumped) if dumped else None  # noqa: S301  # never left this process
    rows = np.frombuffer(data, dtype)
    columns = {name: np.ascontiguousarray(rows[name]) for name in dtype.names or ()}
    return ScoreOutput(columns, trace=trace)


MissingJob = tuple[bytes | int, list[int]]
"""A job to compute: the key to store its output under, or a number if it is not stored, and all
its indices in the call."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The cached outputs of a call, by job index; `by_key`: the jobs to compute.

    A job without a key is listed under its index.
    """

    hits: list[tuple[int, ScoreOutput]] = field(default_factory=list)
    by_key: dict[bytes | int, list[int]] = field(default_factory=dict)

    @property
    def missing(self) -> list[MissingJob]:
        """The jobs to compute."""
        return list(self.by_key.items())


Computed = tuple[Sequence[MissingJob], Sequence[Output]]
"""Jobs that were missing, and their outputs."""


class ResultCache:
    """A least-recently-used cache of results, in at most `max_bytes` of memory."""

    def __init__(self, max_bytes: int) -> None:
        self._values: LRUCache[bytes, Packed] = LRUCache(max_bytes, getsizeof=_measure)
        self._thread = ThreadPoolExecutor(1, "result-cache")
        self._open = True

    @property
    def is_on(self) -> bool:
        """Whether the cache stores anything."""
        return self._open and self._values.maxsize > 0

    @property
    def num_bytes(self) -> int:
        """Memory of the stored results."""
        return int(self._values.currsize)

    async def find(self, scope: bytes, jobs: Sequence[Job]) -> Findings:
        """Return the outputs of cached jobs, and the missing jobs without repetitions.

        A long call is looked up in parts, so that other calls get turns in between.
        """
        loop, found = asyncio.get_running_loop(), Findings()
        for first in range(0, len(jobs), FOUND_AT_ONCE):
            part = range(first, min(len(jobs), first + FOUND_AT_ONCE))
            await loop.run_in_executor(self._thread, self._find, scope, jobs, part, found)
        return found

    def _find(self, scope: bytes, jobs: Sequence[Job], part: range, found: Findings) -> None:
        """Look up some of the jobs and add their outputs to `found`."""
        own = jobs[part.start : part.stop]
        for index, key in zip(part, make_keys(scope, own), strict=True):
            if key is not None and (value := self._values.get(key)) is not None:
                found.hits.append((index, unpack_output(value)))
            else:
                found.by_key.setdefault(index if key is None else key, []).append(index)

    def keep(self, computed: Sequence[Computed]) -> None:
        """Store results in the background; every later `find` sees them.

        Results with NaN are not stored: they depend on the machine or the text more than the model.
        """
        if self.is_on:
            self._thread.submit(self._keep, computed).add_done_callback(_report)

    def _keep(self, computed: Sequence[Computed]) -> None:
        for missing, outputs in computed:
            for key, value in _pack(missing, outputs):
                if _measure(value) <= self._values.maxsize:
                    self._values[key] = value

    def close(self) -> None:
        """Stop storing and end the thread. Blocks."""
        self._open = False
        self._thread.shutdown()


def _pack(
    missing: Sequence[MissingJob], outputs: Sequence[Output]
) -> Iterator[tuple[bytes, Packed]]:
    """Yield keys and values to store: all results without NaN."""
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

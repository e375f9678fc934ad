"""Two models on the same rows: the divergence of their next-token distributions.

The reference scores first and writes its log-probabilities to a file; the other model reads them
while it scores the same rows. Then the files are removed.
"""

import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from logsteer.errors import api_error
from logsteer_server.contract.batches import OutputPart
from logsteer_server.contract.jobs import ScoreJob, ScoreOutput
from logsteer_server.engines.lifetime import ScratchDirectory
from logsteer_server.models.admission import UNKNOWN_WAIT_S, Admission
from logsteer_server.models.model import ResidentModel
from logsteer_server.tasks.planning import Planner
from logsteer_server.tasks.run import Batch, Event, discard
from logsteer_server.text.tokenizer import split_sizes

log = logging.getLogger(__name__)

REFERENCE_COLUMNS = ("kl", "top1_agrees")
"""Default columns of a job with a reference's file."""
COMPARED_AT_ONCE = 4
"""Requests with a reference whose files fit at the same time, if each uses its limit."""


@asynccontextmanager
async def export_files(
    jobs: Sequence[ScoreJob], vocab_size: int, planner: Planner
) -> AsyncGenerator[list[str], None]:
    """Create a file for each job's log-probabilities, float32 [R, V], while the block runs.

    The files are in the system's temporary directory, with all space allocated. Errors: APIError
    `overloaded` if the disk has no room.
    """
    with ScratchDirectory() as scratch:
        yield await planner.capacity.call_long(_reserve_files, scratch, jobs, vocab_size)


@asynccontextmanager
async def reserve_references(
    jobs: Sequence[ScoreJob], vocab_size: int, planner: Planner, scratch: Admission
) -> AsyncGenerator[list[str], None]:
    """Create files as `export_files`, within the server's limit for them.

    Errors: APIError `payload_too_large` if they exceed the limit of all requests, `overloaded`.
    """
    with scratch.enter() as room:
        room.cover(count_bytes(jobs, vocab_size))
        async with export_files(jobs, vocab_size, planner) as files:
            yield files


def _reserve_files(directory: Path, jobs: Sequence[ScoreJob], vocab_size: int) -> list[str]:
    files = [directory / str(i) for i in range(len(jobs))]
    try:
        for file, job in zip(files, jobs, strict=True):
            with file.open("wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, count_bytes([job], vocab_size))
    except OSError as error:
        log.exception("no room for log-probabilities in %s", directory)
        detail = (
            f"The server's scratch directory has no room for {count_bytes(jobs, vocab_size)} bytes "
            f"of log-probabilities ({error.strerror}). Try again later, or with fewer tokens."
        )
        raise api_error("overloaded", detail, retry_after=UNKNOWN_WAIT_S) from error
    return [str(file) for file in files]


def count_bytes(jobs: Sequence[ScoreJob], width: int) -> int:
    """Return the size in bytes of the files of jobs, with `width` numbers a row."""
    return sum(4 * len(job.targets) * width for job in jobs)


def read_rows(files: Sequence[str], vocab_size: int) -> list[npt.NDArray[np.float32]]:
    """Return the log-probabilities in each file: float32 [R, V]."""
    return [np.fromfile(file, np.float32).reshape(-1, vocab_size) for file in files]


def export_jobs(jobs: Sequence[ScoreJob], files: Sequence[str]) -> list[ScoreJob]:
    """Return the jobs, writing their log-probabilities to the files."""
    return [replace(job, export=file) for job, file in zip(jobs, files, strict=True)]


def compare_jobs(
    jobs: Sequence[ScoreJob], files: Sequence[str], columns: tuple[str, ...] = REFERENCE_COLUMNS
) -> list[ScoreJob]:
    """Return the jobs with the files as references, and with these additional columns."""
    return [
        replace(job, reference=file, columns=(*job.columns, *columns))
        for job, file in zip(jobs, files, strict=True)
    ]


Take = Callable[[OutputPart], Iterable[Event]]


async def compare_parts(
    jobs: Sequence[ScoreJob],
    references: Sequence[ScoreJob],
    comparison: "Comparison",
    planner: Planner,
    scratch: Admission,
    columns: tuple[str, ...],
    take: Take,
    take_reference: Take = discard,
) -> AsyncGenerator[Batch, None]:
    """Yield batches that score jobs with the reference, then compare them, a few at a time.

    A part has as many jobs as there is room for their files. Both models reserve room for the
    largest part before the first batch, and before a stream of events opens. `take` gets the
    outputs of the compared jobs. Errors: APIError `overloaded`.
    """
    limit = planner.settings.max_reference_bytes // COMPARED_AT_ONCE
    sizes = [count_bytes([job], comparison.width) for job in jobs]
    parts = list(split_sizes(sizes, limit))
    own = [jobs[part.start : part.stop] for part in parts]
    room = max((sum(job.num_expected for job in part) for part in own), default=0)
    size = max((count_bytes(part, comparison.width) for part in own), default=0)
    with scratch.enter() as reserved:
        reserved.cover(min(size, scratch.limit))  # a single window may need more
        for part, compared in zip(parts, own, strict=True):
            async with export_files(compared, comparison.width, planner) as files:
                yield Batch(
                    export_jobs(references[part.start : part.stop], files),
                    take_reference,
                    model=comparison.reference,
                    purpose="reference",
                    silent=True,
                    room=room,
                )
                take_own = partial(_take_from, part.start, take)
                yield Batch(compare_jobs(compared, files, columns), take_own, room=room)


def _take_from(first: int, take: Take, part: OutputPart) -> Iterable[Event]:
    """Pass on outputs of jobs whose numbers count from `first`."""
    return take(part._replace(indices=[first + index for index in part.indices]))


def summarize(values: npt.NDArray[Any]) -> dict[str, float]:
    """Return the fields of `DivergenceSummary` for the values of tokens, at least one."""
    found = {
        "mean": values.mean(),
        "median": np.median(values),
        "p99": np.quantile(values, 0.99),
        "max": values.max(),
    }
    return {name: float(value) for name, value in found.items()}


class Comparison:
    """A model's divergence from a reference, collected output by output.

    Errors: APIError `invalid_request` if the two have different vocabularies.
    """

    def __init__(self, model: ResidentModel, reference: ResidentModel) -> None:
        codec, info = model.require()
        other_codec, other_info = reference.require()
        if (codec.digest, info.vocab_size) != (other_codec.digest, other_info.vocab_size):
            detail = (
                f"{reference.id} and {model.id} have different vocabularies, so their "
                "distributions cannot be compared; name as reference a model with the same "
                "tokenizer."
            )
            raise api_error("invalid_request", detail, param="reference")
        self.context_length = min(info.context_length, other_info.context_length)
        self.width = info.vocab_size
        """Numbers per row in the files that the two exchange."""
        self.reference = reference
        self._divergences: list[npt.NDArray[np.float32]] = []
        self._agreements: list[npt.NDArray[np.float32]] = []

    def add(self, output: ScoreOutput, num_scored: int) -> None:
        """Add the output of a compared job with this number of scored tokens."""
        self._divergences.append(output.columns["kl"][:num_scored])
        self._agreements.append(output.columns["top1_agrees"][:num_scored])

    def summarize(self) -> dict[str, Any]:
        """Return the fields of `Divergence`, over the tokens scored so far."""
        values = np.concatenate([*self._divergences, np.zeros(0)]).astype(np.float64)
        agreements = np.concatenate([*self._agreements, np.zeros(0)])
        names = ("mean", "median", "p99", "max")
        found = summarize(values) if len(values) else dict.fromkeys(names)
        return {
            "reference": self.reference.id,
            **{f"kl_{name}": value for name, value in found.items()},
            "top1_agreement": float(agreements.mean()) if len(values) else None,
            "num_tokens": len(values),
        }

"""Files in which one model leaves log-probabilities for another, whose engine may be elsewhere."""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

from logsteer_server.contract.batches import read_all
from logsteer_server.contract.jobs import Job, JobFailure, ScoreJob

NOT_SHARED = JobFailure(
    "unsupported_by_engine",
    "the files that compared models exchange are not on every node that works on them: set "
    "scratch_directory to a directory that all nodes mount",
)


def list_files(job: Job) -> list[str]:
    """Return the files that a job writes or reads."""
    files = (job.export, job.reference) if isinstance(job, ScoreJob) else ()
    return [file for file in files if file is not None]


async def refuse_absent(jobs: Sequence[Job]) -> JobFailure | None:
    """Return why jobs cannot run where this machine lacks files of theirs; None where it has all.

    They are made before any job is sent.
    """
    files = [file for job in read_all(jobs) for file in list_files(job)]
    if files and not await asyncio.to_thread(_are_here, files):  # a network's disk may be slow
        return NOT_SHARED
    return None


def _are_here(files: Iterable[str]) -> bool:
    return all(Path(file).is_file() for file in files)

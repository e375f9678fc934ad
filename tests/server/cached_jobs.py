"""Jobs and outputs to keep, for the tests of the result cache."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from logsteer_server.contract.jobs import Job, ScoreJob, ScoreOutput
from logsteer_server.models.cache import (
    Findings,
    MissingJob,
    ResultCache,
    make_keys,
)
from logsteer_server.settings import ModelSettings
from tests.server import steering_cases

SCOPE = b"s" * 32
INFO = replace(steering_cases.INFO, engine="vllm", batch_invariant=False)
SETTINGS = ModelSettings(id="a", path="here")
JOB = ScoreJob(
    np.array([1, 2, 3], dtype=np.int32), np.array([3, 4], dtype=np.int32), ("logprob", "rank")
)


def make_key(scope: bytes, job: Job) -> bytes | None:
    """The key of one job's result."""
    (key,) = make_keys(scope, [job])
    return key


def job_of(number: int, length: int = 4) -> ScoreJob:
    return replace(JOB, tokens=np.full(length, number, dtype=np.int32))


def output_of(job: ScoreJob) -> ScoreOutput:
    """An output that tells the job: infinity, -0.0 and a denormal number among its values."""
    odd = np.array([-0.0, -np.inf, 1e-42, job.tokens[0]], dtype=np.float32)
    return ScoreOutput({"logprob": odd, "rank": np.arange(1, 5, dtype=np.int32)}, cached_tokens=7)


def same_bits(a: ScoreOutput, b: ScoreOutput) -> bool:
    pairs = [(a.columns[name], b.columns[name]) for name in a.columns.keys() | b.columns.keys()]
    pairs += [(a.top_ids, b.top_ids), (a.top_logprobs, b.top_logprobs)]  # type: ignore[list-item]
    return all(
        (x is None and y is None)
        or (x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())
        for x, y in pairs
    )


def fill(cache: ResultCache, jobs: Sequence[ScoreJob]) -> None:
    missing: list[MissingJob] = [(make_key(SCOPE, job) or n, [n]) for n, job in enumerate(jobs)]
    cache.keep([(missing, [output_of(job) for job in jobs])])


def find(cache: ResultCache, jobs: Sequence[ScoreJob]) -> Findings:
    return asyncio.run(cache.find(SCOPE, jobs))


def known(cache: ResultCache, jobs: Sequence[ScoreJob]) -> list[int]:
    return sorted(index for index, _ in find(cache, jobs).hits)

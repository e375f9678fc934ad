"""What came of some jobs of a call, on its way from the engine to the answer."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from logsteer_server.contract.batches import ScoreJobs, ScoreOutputs
from logsteer_server.contract.jobs import Job, JobFailure, JobResult, Output


class ResultPart(NamedTuple):
    """Results of some jobs of a call: the jobs' numbers, what came of each, and when the engine
    took them (monotonic seconds, of a clock that all processes share).
    """

    numbers: Sequence[int]
    results: Sequence[JobResult]
    taken_at: float


class OutputPart(NamedTuple):
    """Outputs of some jobs of a call, and the jobs' indices in it."""

    indices: Sequence[int]
    outputs: Sequence[Output]


class WorkCounts(NamedTuple):
    """What outputs come to; the jobs' own tokens are counted with their last ones."""

    prompt_tokens: int
    scored_tokens: int
    generated_tokens: int
    cached_tokens: int


def count_work(jobs: Sequence[Job], part: OutputPart) -> WorkCounts:
    """Count the tokens of outputs of some of the jobs."""
    if isinstance(jobs, ScoreJobs) and isinstance(part.outputs, ScoreOutputs):
        own = np.array(part.indices)
        read, scored = int(jobs.num_tokens[own].sum()), int(jobs.num_targets[own].sum())
        return WorkCounts(read, scored, 0, int(part.outputs.cached_tokens.sum()))
    pairs = zip(part.indices, part.outputs, strict=True)
    ended = [(jobs[index], output) for index, output in pairs if output.is_last]
    return WorkCounts(
        sum(len(job.tokens) for job, _ in ended),
        sum(job.num_scored for job, _ in ended),
        sum(output.num_generated for output in part.outputs),
        sum(output.cached_tokens for _, output in ended),
    )


def find_steered(jobs: Sequence[Job], part: OutputPart) -> Sequence[Output]:
    """Return the last outputs of those jobs that have a plan."""
    if isinstance(jobs, ScoreJobs) and jobs.like.plan is None:
        return ()
    pairs = zip(part.indices, part.outputs, strict=True)
    return [out for index, out in pairs if out.is_last and jobs[index].plan is not None]


def find_last(part: ResultPart) -> Sequence[int]:
    """Return the numbers of the jobs whose last result is in a part."""
    if isinstance(part.results, ScoreOutputs):
        return part.numbers
    pairs = zip(part.numbers, part.results, strict=True)
    return [number for number, result in pairs if result.is_last]


def find_first_failure(results: Sequence[JobResult]) -> JobFailure | None:
    """Return the first failure among results; None where there is none."""
    if isinstance(results, ScoreOutputs):
        return None
    return next((result for result in results if isinstance(result, JobFailure)), None)

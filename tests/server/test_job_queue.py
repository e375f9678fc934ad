"""Queues of the TransformerLens engine, without the model: order, groups, limits."""

from typing import Any

import numpy as np
import pytest

from logsteer_server.contract.jobs import Job, Output
from logsteer_server.engines.tlens.queue import (
    EngineLimits,
    Entry,
    JobQueue,
    Results,
)


class PlainQueue(JobQueue[Entry]):
    """Jobs whose first token is their group."""

    def _accept(self, job_id: int, job: Any) -> Entry:
        return Entry(job_id, job)

    def _group(self, entry: Entry) -> object:
        return int(entry.job.tokens[0])

    def _run(self, batch: list[Entry]) -> Results:
        return [(entry.job_id, Output()) for entry in batch]


def take_all(queue: JobQueue[Any]) -> list[list[int]]:
    """The ids of all batches."""
    found = []
    while queue.has_work:
        batch = queue.take()
        assert [i for i, _ in batch.run()] == [entry.job_id for entry in batch.entries]
        found.append([entry.job_id for entry in batch.entries])
    return found


def make_queue(*jobs: tuple[int, int], **limits: int) -> PlainQueue:
    """A queue of jobs of these lengths and groups, whose ids are their lengths."""
    queue = PlainQueue(EngineLimits(**limits))
    for length, group in jobs:
        queue.add(length, Job(np.full(length, group, np.int32)))
    return queue


def test_the_longest_job_says_how_many_rows_a_batch_has() -> None:
    lengths = [(10, 0), (40, 0), (25, 0), (30, 0)]
    assert take_all(make_queue(*lengths, max_batch_tokens=100)) == [[40, 30], [25, 10]]
    assert take_all(make_queue(*lengths, max_batch_rows=3)) == [[40, 30, 25], [10]]
    assert take_all(make_queue(*lengths, max_batch_tokens=1)) == [[40], [30], [25], [10]]


def test_a_batch_is_of_one_group_and_others_keep_their_place() -> None:
    queue = make_queue((9, 1), (8, 2), (7, 1), (6, 2), (5, 3))
    assert take_all(queue) == [[9, 7], [8, 6], [5]]


def test_whoever_comes_later_waits_for_those_in_front() -> None:
    queue = make_queue((10, 0), (20, 0), max_batch_rows=1)
    assert [entry.job_id for entry in queue.take().entries] == [20]
    queue.add(30, Job(np.zeros(30, np.int32)))
    assert take_all(queue) == [[10], [30]]


def test_dropped_jobs_are_gone() -> None:
    queue = make_queue((10, 0), (20, 0), (30, 0), max_batch_rows=1)
    queue.take()
    queue.add(5, Job(np.zeros(5, np.int32)))
    queue.drop(frozenset({20, 5, 99}))
    assert take_all(queue) == [[10]]
    assert not queue.has_work


def test_limits_are_whole_numbers_that_are_known() -> None:
    assert EngineLimits.parse({"max_batch_rows": 3}) == EngineLimits(max_batch_rows=3)
    for engine_args in ({"max_rows": 3}, {"max_batch_rows": 0}, {"max_batch_rows": True}):
        with pytest.raises(ValueError, match="engine_args"):
            EngineLimits.parse(engine_args)

"""What the result cache keeps, and what makes room."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from logsteer_server.contract.batches import ScoreOutputs
from logsteer_server.models.cache import ENTRY_BYTES, ResultCache, pack_outputs
from tests.server.cached_jobs import JOB, fill, find, job_of, known, output_of, same_bits


@pytest.fixture
def caches() -> Iterator[list[ResultCache]]:
    """Put a cache in, and it is closed after the test."""
    opened: list[ResultCache] = []
    yield opened
    for cache in opened:
        cache.close()


def test_equal_jobs_are_computed_once_and_others_each(caches: list[ResultCache]) -> None:
    caches.append(cache := ResultCache(2**20))
    fill(cache, [job_of(1)])
    filed = replace(JOB, export="file")
    found = find(cache, [job_of(2), job_of(1), job_of(2), filed, filed, job_of(1)])
    assert [index for index, _ in found.hits] == [1, 5]
    assert all(same_bits(output, output_of(job_of(1))) for _, output in found.hits)
    assert [indices for _, indices in found.missing] == [[0, 2], [3], [4]]
    assert [isinstance(key, bytes) for key, _ in found.missing] == [True, False, False]


def test_the_least_recently_used_makes_room(caches: list[ResultCache]) -> None:
    ((_, rows, _),) = pack_outputs(ScoreOutputs.of([output_of(JOB)]))
    size = ENTRY_BYTES + len(rows)
    caches.append(cache := ResultCache(3 * size))
    fill(cache, [job_of(number) for number in (1, 2, 3)])
    assert known(cache, [job_of(1)]) == [0]  # used again, so 2 is the oldest
    fill(cache, [job_of(4)])
    assert known(cache, [job_of(number) for number in (1, 2, 3, 4)]) == [0, 2, 3]
    assert cache.num_bytes == 3 * size


def test_what_is_larger_than_the_memory_is_not_kept(caches: list[ResultCache]) -> None:
    caches.append(cache := ResultCache(100))
    fill(cache, [JOB])
    assert known(cache, [JOB]) == []
    caches.append(off := ResultCache(0))
    assert not off.is_on

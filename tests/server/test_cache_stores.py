"""The stores of the result cache, in memory and on disk: bounds, survival, damage."""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from logsteer_server.__main__ import main
from logsteer_server.contract.batches import ScoreOutputs
from logsteer_server.models.cache import (
    ENTRY_BYTES,
    ResultCache,
    pack_outputs,
)
from logsteer_server.models.cachefile import CacheFile
from logsteer_server.settings import ConfigurationError
from tests.faults.processes import wait_for
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
    assert [entry.indices for entry in found.missing] == [[0, 2], [3], [4]]
    assert [entry.key is None for entry in found.missing] == [False, True, True]


def test_the_least_recently_used_makes_room(caches: list[ResultCache]) -> None:
    size = ENTRY_BYTES + len(pack_outputs(ScoreOutputs.of([output_of(JOB)]), JOB.columns)[0])
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


def test_results_on_disk_outlive_the_cache(tmp_path: Path, caches: list[ResultCache]) -> None:
    path = tmp_path / "results.db"
    jobs = [job_of(number) for number in range(40)]
    first = ResultCache(2**20, CacheFile(path, 2**20))
    fill(first, jobs)
    first.close()
    caches.append(second := ResultCache(2**20, CacheFile(path, 2**20)))
    found = find(second, [*jobs, job_of(99)])
    assert sorted(index for index, _ in found.hits) == list(range(40))
    assert all(same_bits(output, output_of(jobs[index])) for index, output in found.hits)
    assert [entry.indices for entry in found.missing] == [[40]]
    assert second.num_bytes > 0, "what came from the disk is in memory now"


def test_a_file_alone_serves_too(tmp_path: Path, caches: list[ResultCache]) -> None:
    caches.append(cache := ResultCache(0, CacheFile(tmp_path / "results.db", 2**20)))
    fill(cache, [job_of(1)])
    wait_for(lambda: known(cache, [job_of(1)]))
    assert known(cache, [job_of(1), job_of(1)]) == [0, 1]


def rows_of(numbers: Sequence[int], size: int) -> list[tuple[bytes, bytes]]:
    return [(number.to_bytes(32, "big"), number.to_bytes(size, "big")) for number in numbers]


@pytest.mark.parametrize("size", [60, 3000, 100_000])
def test_the_file_keeps_its_bound_and_the_newest(tmp_path: Path, size: int) -> None:
    path, bound = tmp_path / "results.db", 2**20
    file = CacheFile(path, bound)
    count, largest = 3 * bound // size, 0
    for start in range(1, count, max(1, count // 60)):
        rows = rows_of(range(start, start + max(1, count // 60)), size)
        file.write(rows)
        largest = max(largest, path.stat().st_size)
    assert file.read([rows[-1][0]]) == dict(rows[-1:]), "the newest is there"
    assert file.read([rows_of([1], size)[0][0]]) == {}, "the oldest is not"
    file.close()
    assert 0.6 * bound < max(largest, path.stat().st_size) <= 1.05 * bound


def test_one_call_may_bring_more_than_the_file_holds(tmp_path: Path) -> None:
    file = CacheFile(tmp_path / "results.db", 2**20)
    rows = rows_of(range(40_000), 60)
    file.write([*rows, (b"k" * 32, bytes(2**20))])
    assert (tmp_path / "results.db").stat().st_size <= 1.05 * 2**20
    keys = [key for key, _ in rows] + [b"k" * 32]
    found = file.read(keys[:20_000]) | file.read(keys[20_000:])
    assert 1000 < len(found) < 40_000
    assert found.items() <= dict(rows).items()
    file.close()


def test_processes_that_start_at_once_make_one_file(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    together = threading.Barrier(4, timeout=60)

    def work(number: int) -> int:
        together.wait()
        file = CacheFile(path, 2**20)  # a connection of its own, as another process has
        file.write([(bytes([number]) * 32, b"value")])
        together.wait()
        found = file.read([bytes([n]) * 32 for n in range(4)])
        together.wait()
        file.close()
        return len(found)

    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == [4] * 4
        for made in tmp_path.iterdir():
            made.unlink()


def test_a_turned_bit_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    file = CacheFile(path, 2**20)
    file.write(rows := rows_of([1, 2], 50))
    file.close()
    content = path.read_bytes()
    assert content.count(rows[0][1]) == 1
    path.write_bytes(content.replace(rows[0][1], b"\x40" + rows[0][1][1:]))
    file = CacheFile(path, 2**20)
    assert file.read([key for key, _ in rows]) == dict(rows[1:])
    file.write(rows[:1])
    assert file.read([key for key, _ in rows]) == dict(rows)
    file.close()


def break_pages(path: Path) -> None:
    """Overwrite everything but the first page, which holds the schema."""
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xa5" * (len(content) - 4096))


def test_damage_found_while_serving_costs_no_request(
    tmp_path: Path, caches: list[ResultCache], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "results.db"
    jobs = [job_of(number) for number in range(500)]
    caches.append(cache := ResultCache(2**20, CacheFile(path, 2**20)))
    break_pages(path)
    fill(cache, jobs)
    assert len(known(cache, jobs)) == 500
    assert known(cache, [job_of(999)]) == []
    assert "results are not kept there now" in caplog.text


@pytest.mark.parametrize("damage", ["foreign", "old", "directory"])
def test_a_file_that_cannot_serve_is_refused_at_start(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.db"
    match damage:
        case "foreign":
            with sqlite3.connect(path) as other:
                other.execute("CREATE TABLE results (a)")
            other.close()
        case "old":
            CacheFile(path, 2**20).close()
            with sqlite3.connect(path) as other:
                other.execute("PRAGMA user_version = 99")
            other.close()
        case "directory":
            path = tmp_path / "none" / "results.db"
    with pytest.raises(ConfigurationError, match="cache_file"):
        CacheFile(path, 2**20)
    config = tmp_path / "models.yaml"
    config.write_text(f"models:\n  - {{id: a, path: here, engine: fake}}\ncache_file: {path}\n")
    assert main(["--config", str(config), "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: cache_file: ")

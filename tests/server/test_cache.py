"""The result cache: the same numbers again without the engine, within its bounds, and no others."""

import asyncio
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from logsteer import Client
from logsteer.errors import APIError
from logsteer.schemas import PerplexityAnswer
from logsteer_server.__main__ import main
from logsteer_server.cache import (
    ENTRY_BYTES,
    Findings,
    ResultCache,
    digest_scope,
    make_key,
    pack_output,
    unpack_output,
)
from logsteer_server.cachefile import CacheFile
from logsteer_server.engines.base import EngineInfo, ScoreJob, ScoreOutput
from logsteer_server.settings import ConfigurationError, ModelSettings
from tests.conftest import Server, ServerFactory, fake_model

SCOPE = b"s" * 32
INFO = EngineInfo(
    engine="vllm",
    engine_version="1",
    model_path="here",
    tokenizer_path="here",
    weights_digest="sha256:0",
    dtype="float32",
    logits_dtype="float32",
    quantization=None,
    tensor_parallel=1,
    pipeline_parallel=1,
    batch_invariant=False,
    context_length=128,
    vocab_size=100,
    columns=("logprob",),
)
SETTINGS = ModelSettings(id="a", path="here")
JOB = ScoreJob(
    np.array([1, 2, 3], dtype=np.int32), np.array([3, 4], dtype=np.int32), ("logprob", "rank")
)
ITEMS = [
    {"context_ids": [5, 6, 7], "target_ids": [[8, 9], [10]]},
    {"context_ids": [5, 6], "target_ids": [[8, 9, 11]]},
]
OPTIONS: dict[str, Any] = {"columns": ["logprob", "rank", "entropy"], "top": 3}


def job_of(number: int, length: int = 4) -> ScoreJob:
    return replace(JOB, tokens=np.full(length, number, dtype=np.int32))


def output_of(job: ScoreJob) -> ScoreOutput:
    """An output that tells the job: NaN, infinity and a denormal number among its values."""
    odd = np.array([np.nan, -np.inf, 1e-42, job.tokens[0]], dtype=np.float32)
    return ScoreOutput({"logprob": odd, "rank": np.arange(4, dtype=np.int32)}, None, None, 7)


def same_bits(a: ScoreOutput, b: ScoreOutput) -> bool:
    pairs = [(a.columns[name], b.columns[name]) for name in a.columns.keys() | b.columns.keys()]
    pairs += [(a.top_ids, b.top_ids), (a.top_logprobs, b.top_logprobs)]  # type: ignore[list-item]
    return all(
        (x is None and y is None)
        or (x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())
        for x, y in pairs
    )


def fill(cache: ResultCache, jobs: Sequence[ScoreJob]) -> None:
    cache.keep([(make_key(SCOPE, job), job, output_of(job)) for job in jobs])


def find(cache: ResultCache, jobs: Sequence[ScoreJob]) -> Findings:
    return asyncio.run(cache.find(SCOPE, jobs))


def known(cache: ResultCache, jobs: Sequence[ScoreJob]) -> list[int]:
    return sorted(index for index, _ in find(cache, jobs).hits)


@pytest.fixture
def caches() -> Iterator[list[ResultCache]]:
    """Put a cache in, and it is closed after the test."""
    opened: list[ResultCache] = []
    yield opened
    for cache in opened:
        cache.close()


VARIED_JOBS = {
    "tokens": replace(JOB, tokens=np.array([1, 2, 4], dtype=np.int32)),
    "targets": replace(JOB, targets=np.array([3, 5], dtype=np.int32)),
    "columns": replace(JOB, columns=("logprob", "entropy")),
    "top": replace(JOB, top=1),
    "alternatives": replace(JOB, alternatives=True),
}
UNCACHED = {"export": "file", "reference": "file"}


def test_the_key_knows_every_field_of_a_job() -> None:
    assert {field.name for field in fields(ScoreJob)} == VARIED_JOBS.keys() | UNCACHED.keys()


@pytest.mark.parametrize("name", VARIED_JOBS)
def test_another_job_has_another_key(name: str) -> None:
    assert make_key(SCOPE, JOB) == make_key(SCOPE, replace(JOB, tokens=JOB.tokens.copy()))
    assert make_key(SCOPE, JOB) != make_key(SCOPE, VARIED_JOBS[name])


def test_a_token_does_not_slip_from_one_field_into_the_next() -> None:
    moved = replace(
        JOB, tokens=np.array([1, 2, 3, 3], dtype=np.int32), targets=JOB.targets[1:].copy()
    )
    assert make_key(SCOPE, JOB) != make_key(SCOPE, moved)
    assert make_key(SCOPE, replace(JOB, columns=("ab", "c"))) != make_key(
        SCOPE, replace(JOB, columns=("a", "bc"))
    )


@pytest.mark.parametrize("name", UNCACHED)
def test_jobs_with_files_have_no_key(name: str) -> None:
    assert make_key(SCOPE, replace(JOB, **UNCACHED)) is None  # type: ignore[arg-type]
    assert make_key(SCOPE, replace(JOB, **{name: "file"})) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine", "fake"), ("engine_version", "2"), ("weights_digest", "sha256:1"),
        ("dtype", "bfloat16"), ("logits_dtype", "bfloat16"), ("quantization", "fp8"),
        ("tensor_parallel", 2), ("pipeline_parallel", 2), ("batch_invariant", True),
        ("context_length", 64), ("vocab_size", 101), ("model_path", "there"),
    ],
)  # fmt: skip
def test_another_engine_has_another_scope(name: str, value: object) -> None:
    other = replace(INFO, **{name: value})  # type: ignore[arg-type]
    assert digest_scope(INFO, SETTINGS) == digest_scope(replace(INFO), SETTINGS)
    assert digest_scope(INFO, SETTINGS) != digest_scope(other, SETTINGS)
    assert make_key(digest_scope(INFO, SETTINGS), JOB) != make_key(
        digest_scope(other, SETTINGS), JOB
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("compile", False), ("engine_args", {"a": 1}), ("devices", "cpu"), ("chunk_bytes", 2**21)],
)
def test_another_way_to_compute_has_another_scope(name: str, value: object) -> None:
    other = SETTINGS.model_copy(update={name: value})
    assert digest_scope(INFO, SETTINGS) != digest_scope(INFO, other)
    renamed = SETTINGS.model_copy(update={"id": "b", "required": False, "memory": "1GiB"})
    assert digest_scope(INFO, SETTINGS) == digest_scope(INFO, renamed)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_an_output_comes_back_bit_for_bit(num_rows: int) -> None:
    table = np.arange(num_rows * 5, dtype=np.float32).reshape(num_rows, 5)
    output = ScoreOutput(
        {"rank": np.arange(num_rows, dtype=np.int32), "logprob": table[:, 1]},  # not contiguous
        table[:, 2:].astype(np.int32),
        table[:, 2:],
        cached_tokens=3,
    )
    again = unpack_output(pack_output(output, ("logprob", "rank")), ("logprob", "rank"))
    assert same_bits(again, output)
    assert again.cached_tokens == 0


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
    size = ENTRY_BYTES + len(pack_output(output_of(JOB), JOB.columns))
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
    deadline = time.monotonic() + 10
    while not known(cache, [job_of(1)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert known(cache, [job_of(1), job_of(1)]) == [0, 1]


def rows_of(numbers: Sequence[int], size: int) -> list[tuple[bytes, bytes]]:
    return [(number.to_bytes(32, "big"), number.to_bytes(size, "big")) for number in numbers]


@pytest.mark.parametrize("size", [60, 3000, 100_000])
def test_the_file_keeps_its_bound_and_what_was_used_last(tmp_path: Path, size: int) -> None:
    path, bound = tmp_path / "results.db", 2**20
    file = CacheFile(path, bound)
    count = 3 * bound // size
    favourite = rows_of([0], size)
    file.write(favourite)
    largest = 0
    for start in range(1, count, max(1, count // 60)):
        rows = rows_of(range(start, start + max(1, count // 60)), size)
        file.write(rows)
        assert file.read([favourite[0][0]]) == dict(favourite), "it was read after every write"
        largest = max(largest, sum(part.stat().st_size for part in tmp_path.iterdir()))
    assert file.read([rows[-1][0]]) == dict(rows[-1:]), "the newest is there"
    assert file.read([rows_of([1], size)[0][0]]) == {}, "the oldest is not"
    file.close()
    assert 0.6 * bound < largest <= 1.4 * bound, "the file with its log"
    assert path.stat().st_size <= 1.05 * bound


def test_one_call_may_bring_more_than_the_file_holds(tmp_path: Path) -> None:
    file = CacheFile(tmp_path / "results.db", 2**20)
    rows = rows_of(range(40_000), 60)
    file.write([*rows, (b"k" * 32, bytes(2**20))])
    assert (tmp_path / "results.db").stat().st_size <= 1.05 * 2**20
    found = file.read([key for key, _ in rows] + [b"k" * 32])
    assert 1000 < len(found) < 40_000
    assert found.items() <= dict(rows).items()
    file.close()


def test_a_lowered_bound_holds_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    file = CacheFile(path, 4 * 2**20)
    rows = rows_of(range(3000), 1000)
    for start in range(0, 3000, 100):
        file.write(rows[start : start + 100])
    file.close()
    assert path.stat().st_size > 2 * 2**20
    file = CacheFile(path, 2**20)
    assert path.stat().st_size <= 2**20
    assert file.read([rows[-1][0]]) == dict(rows[-1:])
    file.close()


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
    assert "delete it" in caplog.text


@pytest.mark.parametrize("damage", ["text", "foreign", "old", "torn", "directory"])
def test_a_file_that_cannot_serve_is_refused_at_start(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.db"
    match damage:
        case "text":
            path.write_text("this is no database " * 500)
        case "foreign":
            with sqlite3.connect(path) as other:
                other.execute("CREATE TABLE results (a)")
            other.close()
        case "old":
            CacheFile(path, 2**20).close()
            with sqlite3.connect(path) as other:
                other.execute("PRAGMA user_version = 99")
            other.close()
        case "torn":
            file = CacheFile(path, 2**20)
            file.write(rows_of(range(500), 100))
            file.close()
            break_pages(path)
        case "directory":
            path = tmp_path / "none" / "results.db"
    with pytest.raises(ConfigurationError, match="cache_file"):
        CacheFile(path, 2**20)
    config = tmp_path / "models.yaml"
    config.write_text(f"models:\n  - {{id: a, path: here, engine: fake}}\ncache_file: {path}\n")
    assert main(["--config", str(config), "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: cache_file: ")


# Over HTTP. The fake takes half a second a step, so an answer within less came from the cache.


@pytest.fixture(scope="module")
def slow(start_server: ServerFactory) -> Server:
    return start_server({"models": [fake_model(delay_s=0.5)], "max_pending_tokens": 300})


@pytest.fixture
def client(slow: Server) -> Iterator[Client]:
    with Client(slow.url, max_retries=0) as client:
        yield client


def engine_tokens(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "logsteer_prompt_tokens_total"
    )


def test_a_second_answer_is_the_first_without_the_engine(client: Client, slow: Server) -> None:
    before = engine_tokens(slow)
    first = client.logprob(ITEMS, **OPTIONS)
    between = engine_tokens(slow)
    started = time.monotonic()
    second = client.logprob(ITEMS, **OPTIONS)
    assert time.monotonic() - started < 0.4
    assert between > before
    assert engine_tokens(slow) == between
    assert (first.usage.cached_results, second.usage.cached_results) == (0, 3)
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    assert (second.timing.queue_ms, second.timing.engine_ms) == (0, 0)
    assert [r.model_dump() for r in first.results] == [r.model_dump() for r in second.results]


def test_the_bytes_of_both_answers_are_the_same(slow: Server) -> None:
    body = {"items": [{"context_ids": [30, 31], "target_ids": [[32, 33]]}]}
    headers = {"accept": "application/msgpack"}
    answers = [
        msgpack.unpackb(httpx.post(f"{slow.url}/logprob", json=body, headers=headers).content)
        for _ in range(2)
    ]
    assert answers[0]["results"] == answers[1]["results"]
    assert [answer["usage"]["cached_results"] for answer in answers] == [0, 1]


def test_more_of_the_same_computes_only_what_is_new(client: Client, slow: Server) -> None:
    client.logprob([{"context_ids": [40, 41], "target_ids": [[42, 43]]}])
    before = engine_tokens(slow)
    items = [{"context_ids": [40, 41 + i], "target_ids": [[42, 43]]} for i in (1, 0, 1)]
    answer = client.logprob(items)
    assert engine_tokens(slow) - before == 3
    assert answer.usage.cached_results == 2  # the known one, and the second of the equal ones
    alone = client.logprob(items, cache=False)
    assert [r.model_dump() for r in answer.results] == [r.model_dump() for r in alone.results]


def test_cache_false_neither_reads_nor_writes(client: Client, slow: Server) -> None:
    items = [{"context_ids": [50, 51], "target_ids": [[52, 53]]}] * 2
    before = engine_tokens(slow)
    unkept = client.logprob(items, cache=False)
    assert client.logprob(items).usage.cached_results == 1
    unread = client.logprob(items, cache=False)
    assert (unkept.usage.cached_results, unread.usage.cached_results) == (0, 0)
    assert engine_tokens(slow) - before == 3 * (2 + 1 + 2)


def test_known_work_takes_no_room_of_the_budget(client: Client) -> None:
    halves = [
        [{"context_ids": [60 + half] * 100 + [n], "target_ids": [[61, 62]]} for n in range(2)]
        for half in range(2)
    ]
    for half in halves:
        client.logprob(half)
    with pytest.raises(APIError, match="max_pending_tokens"):
        client.logprob(halves[0] + halves[1], cache=False)
    assert client.logprob(halves[0] + halves[1]).usage.cached_results == 4


def test_perplexity_is_cached_by_window(client: Client, slow: Server) -> None:
    text = "one two three four five six seven eight nine ten " * 3
    options: dict[str, Any] = {"context_length": 16, "stride": 8}
    first = client.perplexity([text], **options)
    before = engine_tokens(slow)
    second = client.perplexity([text], **options)
    assert engine_tokens(slow) == before
    assert first.usage.cached_results == 0 < second.usage.cached_results
    assert first.total.sum_logprob == second.total.sum_logprob
    assert client.perplexity([text], cache=False, **options).usage.cached_results == 0
    third = client.perplexity([text], reference="fake", **options)
    assert third.usage.cached_results == 0, "comparisons go through files and are computed"


def test_a_streamed_text_obeys_the_option(client: Client) -> None:
    text = b"a text that is sent as a stream of bytes, " * 4
    counts = []
    for cache in (True, True, False):
        *_, answer = client.perplexity_stream([text], cache=cache)
        assert isinstance(answer, PerplexityAnswer)
        counts.append(answer.usage.cached_results)
    assert counts[0] == counts[2] == 0 < counts[1]


def test_results_survive_a_restart_of_the_server(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    config = {"models": [fake_model()], "cache_file": str(tmp_path / "results.db")}
    answers = []
    for _ in range(2):
        server = start_server(config)
        with Client(server.url, max_retries=0) as client:
            answers.append(client.logprob(ITEMS, **OPTIONS))
        computed = engine_tokens(server)
        server.stop()
    first, second = answers
    assert (first.usage.cached_results, second.usage.cached_results) == (0, 3)
    assert computed == 0
    assert [r.model_dump() for r in first.results] == [r.model_dump() for r in second.results]

"""The result cache: keys, what is kept and what makes room, and answers without the engine."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from logsteer import Client
from logsteer_server.contract.batches import ScoreOutputs
from logsteer_server.contract.jobs import Job, Policy, ScoreJob, ScoreOutput
from logsteer_server.contract.plan import (
    Adapter,
    Direction,
    Override,
    Positions,
    Site,
    SteeringPlan,
    SteeringTrace,
)
from logsteer_server.models.cache import (
    ENTRY_BYTES,
    Findings,
    MissingJob,
    ResultCache,
    digest_scope,
    make_keys,
    pack_outputs,
    unpack_output,
)
from logsteer_server.settings import ModelSettings
from tests.conftest import Server, ServerFactory, fake_model
from tests.faults.processes import read_metric
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


def plan_of(scale: float, positions: str = "all") -> SteeringPlan:
    site = Site(2, "resid_post", np.full(4, scale, dtype=np.float32))
    return SteeringPlan((site,), Positions(positions))


VARIED_JOBS = {
    "tokens": replace(JOB, tokens=np.array([1, 2, 4], dtype=np.int32)),
    "targets": replace(JOB, targets=np.array([3, 5], dtype=np.int32)),
    "columns": replace(JOB, columns=("logprob", "entropy")),
    "top": replace(JOB, top=1),
    "shares_row": replace(JOB, shares_row=True),
    "plan": replace(JOB, plan=plan_of(1.0)),
    "policy": replace(JOB, policy=Policy(temperature=0.5)),
    "double": replace(JOB, double=True),
    "reads_end": replace(JOB, reads_end=True),
    "override": replace(JOB, override=Override(Direction("file", "a" * 64), 1e-3)),
    "adapter": replace(JOB, adapter=Adapter("file", "a" * 64)),
    "cache_namespace": replace(JOB, cache_namespace="ann"),
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


def test_another_way_of_steering_has_another_key() -> None:
    plans = [plan_of(1.0), plan_of(2.0), plan_of(1.0, "prompt"), plan_of(1.0, "completion")]
    keys = {make_key(SCOPE, replace(JOB, plan=plan)) for plan in plans}
    assert len(keys) == len(plans)
    assert make_key(SCOPE, replace(JOB, plan=plan_of(1.0))) in keys


def test_another_override_has_another_key_wherever_its_file_lies() -> None:
    def key(path: str, sha256: str, eta: float) -> bytes | None:
        return make_key(SCOPE, replace(JOB, override=Override(Direction(path, sha256), eta)))

    first = key("here", "a" * 64, 1e-3)
    cast = Override(Direction("here", "a" * 64), 1e-3, "float32")
    assert make_key(SCOPE, replace(JOB, override=cast)) != first
    assert first == key("there", "a" * 64, 1e-3)
    assert len({first, key("here", "b" * 64, 1e-3), key("here", "a" * 64, 1e-3 + 1e-18)}) == 3


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
        ("computed_on", ("torch 2", "AVX2")),
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


@pytest.mark.parametrize("name", ["steering_probes", "capture_bytes"])
def test_a_bound_on_what_is_read_leaves_the_scope(name: str) -> None:
    other = SETTINGS.model_copy(update={name: getattr(SETTINGS, name) + 1})
    assert digest_scope(INFO, SETTINGS) == digest_scope(INFO, other)


@pytest.mark.parametrize(("name", "value"), [("capture_rows", 7), ("hook_widths", {"attn_out": 3})])
def test_what_an_engine_gives_of_activations_leaves_the_scope(name: str, value: object) -> None:
    other = replace(INFO, **{name: value})  # type: ignore[arg-type]
    assert digest_scope(INFO, SETTINGS) == digest_scope(other, SETTINGS)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_an_output_comes_back_bit_for_bit(num_rows: int) -> None:
    table = np.arange(num_rows * 5, dtype=np.float32).reshape(num_rows, 5)
    output = ScoreOutput(
        {"rank": np.arange(num_rows, dtype=np.int32), "logprob": table[:, 1]},  # not contiguous
        table[:, 2:].astype(np.int32),
        table[:, 2:],
        cached_tokens=3,
        trace=SteeringTrace((num_rows,), {"2": (num_rows, 0.25), "3.attn_out": (0, 0.0)}, (2, 0)),
    )
    (packed,) = pack_outputs(ScoreOutputs.of([output]))
    again = unpack_output(packed)
    assert same_bits(again, output)
    assert again.cached_tokens == 0
    assert again.trace == output.trace


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


ITEMS = [
    {"context_ids": [5, 6, 7], "target_ids": [[8, 9], [10]]},
    {"context_ids": [5, 6], "target_ids": [[8, 9, 11]]},
]
OPTIONS: dict[str, Any] = {"columns": ["logprob", "rank", "entropy"], "top": 3}


@pytest.fixture(scope="module")
def slow(start_server: ServerFactory) -> Server:
    return start_server({"models": [fake_model(delay_s=0.5)], "max_pending_tokens": 300})


@pytest.fixture
def client(slow: Server) -> Iterator[Client]:
    with Client(slow.url, max_retries=0) as client:
        yield client


def test_a_second_answer_is_the_first_without_the_engine(client: Client, slow: Server) -> None:
    before = read_metric(slow, "prompt_tokens_total")
    first = client.logprob(ITEMS, **OPTIONS)
    between = read_metric(slow, "prompt_tokens_total")
    second = client.logprob(ITEMS, **OPTIONS)
    assert between > before
    assert read_metric(slow, "prompt_tokens_total") == between
    assert (first.usage.cached_results, second.usage.cached_results) == (0, 3)
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    assert (second.timing.queue_ms, second.timing.engine_ms) == (0, 0)
    assert [r.model_dump() for r in first.results] == [r.model_dump() for r in second.results]

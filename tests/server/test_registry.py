"""Resident models and the result cache.

Which model a request means and when it is ready; which jobs have the same result, which results the
cache keeps and evicts, and that a cached result is not computed again.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logsteer.errors import APIError
from logsteer_server.contract.batches import ResultPart, ScoreOutputs
from logsteer_server.contract.captures import Capture
from logsteer_server.contract.jobs import Job, JobResult, Policy, Routing, ScoreJob, ScoreOutput
from logsteer_server.contract.plan import (
    Adapter,
    Direction,
    Override,
    Positions,
    Site,
    SteeringPlan,
    SteeringTrace,
)
from logsteer_server.models import model as model_module
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
from logsteer_server.models.model import PreparedJobs, ResidentModel
from logsteer_server.models.registry import ModelRegistry, make_handles
from logsteer_server.observation.metrics import Metrics
from logsteer_server.settings import ModelSettings, Settings
from logsteer_server.stores.contents import ContentFiles, JobContents
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.threads import StoreThreads
from tests.own_time import run_in_own_time
from tests.refusals import refused
from tests.server import steering_cases
from tests.server.scripted_model import INFO, ScriptedHandle, answer_as_fake, load_codec, make_model


@pytest.fixture
def results() -> Iterator[ResultCache]:
    cache = ResultCache(2**20)
    yield cache
    cache.close()


def registry(*ids: str) -> ModelRegistry:
    settings = Settings(models=[ModelSettings(id=name, engine="fake", path="here") for name in ids])
    return make_registry(settings)


def make_registry(settings: Settings) -> ModelRegistry:
    """Models that are not started."""
    contents = JobContents(ContentFiles(Objects.open(settings), 0), StoreThreads())
    handles = make_handles(settings, contents)
    return ModelRegistry(settings, ResultCache(0), Metrics(), handles)


class TestFind:
    def test_the_only_one_need_not_be_named(self) -> None:
        assert registry("a").find(None).id == "a"
        with refused("invalid_request", "name one of them as model: a, b", param="model"):
            registry("a", "b").find(None)

    def test_of_several_the_default_need_not_be_named(self) -> None:
        models = [
            ModelSettings(id=one, engine="fake", path="here", default=one == "b") for one in "abc"
        ]
        found = make_registry(Settings(models=models))
        assert [found.find(name).id for name in (None, "a")] == ["b", "a"]
        with pytest.raises(ValueError, match=r"default is set for \['a', 'b'\]"):
            Settings(models=[models[0].model_copy(update={"default": True}), models[1]])

    @pytest.mark.parametrize("name", ["c", "", "A"])
    def test_an_unknown_id_is_told_which_there_are(self, name: str) -> None:
        with refused("unknown_model", "these are: a, b", param="model"):
            registry("a", "b").find(name)


class TestReadiness:
    def test_a_model_without_its_tokenizer_is_still_loading(self) -> None:
        model = make_model()
        model._codec = None
        assert not model.is_ready
        assert model.describe().state == "loading"
        with refused("model_loading", "tokenizer", retry_after=2):
            model.require()
        asyncio.run(model.load_codec())
        assert model.is_ready
        assert model.require()[0].digest == load_codec().digest

    def test_a_tokenizer_that_does_not_load_is_a_failed_model(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("no tokenizer")
        handle = ScriptedHandle(replace(INFO, tokenizer_path=str(tmp_path)))
        model = make_model(handle)
        asyncio.run(model.load_codec())
        assert (model.is_ready, model.describe().state) == (False, "failed")
        assert "tokenizer did not load" in model.describe().detail
        with refused("internal", "tokenizer did not load", retryable=False):
            model.require()


def score(*numbers: int) -> list[ScoreJob]:
    """Jobs of two tokens, equal where the numbers are."""
    return [
        ScoreJob(np.array([5, number], np.int32), np.array([6], np.int32), ("logprob", "rank"))
        for number in numbers
    ]


def cached_prefix(job: Job) -> Sequence[JobResult]:
    """Answers of which a token came from the engine's prefix cache."""
    return [replace(output, cached_tokens=1) for output in answer_as_fake(job)]  # type: ignore[type-var]


async def compute(model: ResidentModel, jobs: Sequence[Job], cache: bool = True) -> dict[int, Any]:
    return dict(await list_outputs(model, await model.prepare(jobs, cache)))


async def list_outputs(model: ResidentModel, prepared: PreparedJobs) -> list[tuple[int, Any]]:
    """Index and output of each job, as they come."""
    return [
        found
        async for part in model.run(prepared)
        for found in zip(part.indices, part.outputs, strict=True)
    ]


class TestJobs:
    async def test_equal_jobs_are_computed_once(self, results: ResultCache) -> None:
        handle = ScriptedHandle(answer=cached_prefix)
        model = make_model(handle, results=results)

        prepared = await model.prepare(score(1, 2, 1, 1), cache=True)
        assert (len(prepared.jobs), prepared.num_known, prepared.num_tokens) == (2, 2, 4)
        found = await list_outputs(model, prepared)
        assert sorted(index for index, _ in found) == [0, 1, 2, 3]
        by_index = dict(found)
        assert [by_index[index].cached_tokens for index in range(4)] == [1, 1, 0, 0]
        assert by_index[0].columns is by_index[2].columns
        again = await compute(model, score(1, 2))
        assert [again[index].cached_tokens for index in range(2)] == [0, 0]
        assert handle.num_jobs == 2

    @pytest.mark.parametrize("at_once", [2, 1000])
    async def test_a_caller_who_leaves_keeps_finished_results_and_ends_the_rest(
        self, results: ResultCache, monkeypatch: pytest.MonkeyPatch, at_once: int
    ) -> None:
        monkeypatch.setattr(model_module, "STORED_AT_ONCE", at_once)
        handle = ScriptedHandle()
        model = make_model(handle, results=results)

        prepared = await model.prepare(score(1, 2, 3, 4, 5), cache=True)
        async with aclosing(model.run(prepared)) as outputs:
            for _ in range(3):
                await anext(outputs)
        assert handle.open == 0
        known = await model.prepare(score(1, 2, 3, 4, 5), cache=True)
        assert sorted(index for index, _ in known.hits) == [0, 1, 2]

    def test_retry_after_follows_the_measured_speed(self) -> None:
        model = make_model(SlowHandle(), max_tokens=100)
        run_in_own_time(compute(model, score(*range(40))))
        model.admission.enter().cover(100)
        with pytest.raises(APIError) as caught:
            model.admission.enter()
        assert caught.value.retry_after == 5, "80 tokens took 4 s"


class SlowHandle(ScriptedHandle):
    """Takes a tenth of a second for each job."""

    async def run(
        self, jobs: Sequence[Job], routing: Routing | None = None
    ) -> AsyncGenerator[ResultPart, None]:
        async for part in super().run(jobs, routing):
            await asyncio.sleep(0.1)
            yield part


# ------------------------------------------------------------------ the result cache


SCOPE = b"s" * 32
ENGINE = replace(steering_cases.INFO, engine="vllm", batch_invariant=False)
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
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs
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
    "step_tokens": replace(JOB, step_tokens=16),
    "alternatives": replace(JOB, alternatives=np.array([[7], [8]], np.int32)),
    "tail": replace(JOB, tail=True),
    "override": replace(JOB, override=Override(Direction("file", "a" * 64), 1e-3)),
    "adapter": replace(JOB, adapter=Adapter("file", "a" * 64)),
    "cache_namespace": replace(JOB, cache_namespace="ann"),
}
UNCACHED = {"export": "file", "reference": "file", "capture": Capture((1,))}


def test_the_key_knows_every_field_of_a_job() -> None:
    """But `beta` and `exchange`, which say how rows are compared with a file."""
    known = VARIED_JOBS.keys() | UNCACHED.keys() | {"beta", "exchange"}
    assert {field.name for field in fields(ScoreJob)} == known


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


def test_another_override_has_another_key_wherever_its_file_lies() -> None:
    def key(path: str, sha256: str, eta: float) -> bytes | None:
        return make_key(SCOPE, replace(JOB, override=Override(Direction(path, sha256), eta)))

    first = key("here", "a" * 64, 1e-3)
    cast = Override(Direction("here", "a" * 64), 1e-3, "float32")
    assert make_key(SCOPE, replace(JOB, override=cast)) != first
    assert first == key("there", "a" * 64, 1e-3)
    assert len({first, key("here", "b" * 64, 1e-3), key("here", "a" * 64, 1e-3 + 1e-18)}) == 3


@pytest.mark.parametrize("name", UNCACHED)
def test_jobs_that_use_files_are_not_cached(name: str) -> None:
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
    other = replace(ENGINE, **{name: value})  # type: ignore[arg-type]
    assert digest_scope(ENGINE, SETTINGS) == digest_scope(replace(ENGINE), SETTINGS)
    assert digest_scope(ENGINE, SETTINGS) != digest_scope(other, SETTINGS)
    assert make_key(digest_scope(ENGINE, SETTINGS), JOB) != make_key(
        digest_scope(other, SETTINGS), JOB
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("compile", False), ("engine_args", {"a": 1}), ("devices", "cpu"), ("chunk_bytes", 2**21)],
)
def test_another_way_to_compute_has_another_scope(name: str, value: object) -> None:
    other = SETTINGS.model_copy(update={name: value})
    assert digest_scope(ENGINE, SETTINGS) != digest_scope(ENGINE, other)
    renamed = SETTINGS.model_copy(update={"id": "b", "required": False, "memory": "1GiB"})
    assert digest_scope(ENGINE, SETTINGS) == digest_scope(ENGINE, renamed)


@pytest.mark.parametrize("name", ["steering_probes", "capture_bytes"])
def test_limits_on_readings_do_not_change_the_scope(name: str) -> None:
    other = SETTINGS.model_copy(update={name: getattr(SETTINGS, name) + 1})
    assert digest_scope(ENGINE, SETTINGS) == digest_scope(ENGINE, other)


@pytest.mark.parametrize(("name", "value"), [("capture_rows", 7), ("hook_widths", {"attn_out": 3})])
def test_what_an_engine_can_capture_does_not_change_the_scope(name: str, value: object) -> None:
    other = replace(ENGINE, **{name: value})  # type: ignore[arg-type]
    assert digest_scope(ENGINE, SETTINGS) == digest_scope(other, SETTINGS)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_an_output_comes_back_bit_for_bit(num_rows: int) -> None:
    table = np.arange(num_rows * 5, dtype=np.float32).reshape(num_rows, 5)
    output = ScoreOutput(
        {
            "rank": np.arange(num_rows, dtype=np.int32),
            "logprob": table[:, 1],  # not contiguous
            "top_ids": table[:, 2:].astype(np.int32),
            "top_logprobs": table[:, 2:],
        },
        cached_tokens=3,
        trace=SteeringTrace((num_rows,), {"2": (num_rows, 0.25), "3.attn_out": (0, 0.0)}, (2, 0)),
    )
    (packed,) = pack_outputs(ScoreOutputs.of([output]))
    again = unpack_output(packed)
    assert same_bits(again, output)
    assert again.cached_tokens == 0
    assert again.trace == output.trace


def test_equal_jobs_are_computed_once_and_others_each() -> None:
    filed = replace(JOB, export="file")
    with closing(ResultCache(2**20)) as cache:
        fill(cache, [job_of(1)])
        found = find(cache, [job_of(2), job_of(1), job_of(2), filed, filed, job_of(1)])
    assert [index for index, _ in found.hits] == [1, 5]
    assert all(same_bits(output, output_of(job_of(1))) for _, output in found.hits)
    assert [indices for _, indices in found.missing] == [[0, 2], [3], [4]]
    assert [isinstance(key, bytes) for key, _ in found.missing] == [True, False, False]


def test_the_least_recently_used_result_is_evicted() -> None:
    ((_, rows, _),) = pack_outputs(ScoreOutputs.of([output_of(JOB)]))
    size = ENTRY_BYTES + len(rows)
    with closing(ResultCache(3 * size)) as cache:
        fill(cache, [job_of(number) for number in (1, 2, 3)])
        assert known(cache, [job_of(1)]) == [0]  # used again, so 2 is the oldest
        fill(cache, [job_of(4)])
        assert known(cache, [job_of(number) for number in (1, 2, 3, 4)]) == [0, 2, 3]
        assert cache.num_bytes == 3 * size


def test_a_result_larger_than_the_cache_is_not_kept() -> None:
    with closing(ResultCache(100)) as cache, closing(ResultCache(0)) as off:
        fill(cache, [JOB])
        assert known(cache, [JOB]) == []
        assert not off.is_on

"""The self-test: it passes an engine that is right, and each check finds what it is there for.

It runs over the endpoints of an application whose engines are scripts in this process.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import pytest

from logsteer import AsyncClient
from logsteer.errors import APIError
from logsteer.schemas import ModelCard, SelftestAnswer, SelftestCheck, SelftestRequest
from logsteer.schemas.perplexity import StreamStart
from logsteer.selftest import EPSILON, PROMISES, Compared, judge, measure_noise, run_selftest
from logsteer_server import app as app_module
from logsteer_server.contract.jobs import GenerateJob, Job, ScoreJob
from logsteer_server.contract.plan import Site
from logsteer_server.models.admission import Admission
from logsteer_server.models.cache import ResultCache
from logsteer_server.models.model import ResidentModel
from logsteer_server.observation.metrics import Metrics
from logsteer_server.settings import ModelSettings, Settings
from logsteer_server.text.tokenizer import TextCodec
from tests.faults.keys import add_key
from tests.refusals import refused
from tests.server.honest_engine import INFO, HonestEngine, Moment, apply_site, steered
from tests.server.scripted_model import load_codec

OFF = 3e-3
"""Nats: 30 times what float32 is allowed."""
IDS = [[*range(5, 45)], [9, 8, 7, 6, 5, 4] * 5]


@asynccontextmanager
async def serve(
    *engines: HonestEngine, key: str = "", **settings: Any
) -> AsyncIterator[AsyncClient]:
    """A client of an application with these engines, as the models `any` and `other`."""
    handles = dict(zip(("any", "other"), engines, strict=False))
    models = [ModelSettings(id=name, path="here") for name in handles]
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as directory:
        patch.setattr(app_module, "make_handles", lambda *_: lambda model: handles[model.id])
        codec = load_codec()
        patch.setattr(TextCodec, "load", lambda _path: codec)
        app = app_module.create_app(Settings(models=models, store_directory=directory, **settings))
        transport = httpx.ASGITransport(app)
        client = AsyncClient("http://localhost", transport=transport, max_retries=0, api_key=key)
        async with app.router.lifespan_context(app), client:
            while any(m.status[0] == "loading" for m in app.state.models.by_id.values()):
                await asyncio.sleep(0.01)
            yield client


async def collect(*engines: HonestEngine, **fields: Any) -> SelftestAnswer:
    async with serve(*engines) as client:
        start, *checks, answer = [one async for one in run_selftest(client, "any", **fields)]
    assert isinstance(start, StreamStart) and isinstance(answer, SelftestAnswer)
    assert answer.checks == checks
    assert [check.name for check in checks] == list(PROMISES)
    is_wrong = any(check.verdict == "failed" for check in checks)
    assert answer.verdict == ("failed" if is_wrong else "passed")
    return answer


def run(*engines: HonestEngine, **fields: Any) -> dict[str, SelftestCheck]:
    """The checks by name."""
    answer = asyncio.run(collect(*engines, **({"token_ids": IDS} | fields)))
    return {check.name: check for check in answer.checks}


def failed(checks: dict[str, SelftestCheck]) -> set[str]:
    return {name for name, check in checks.items() if check.verdict == "failed"}


def card(**fields: Any) -> ModelCard:
    """The card of a model whose engine is described so."""
    found = ResidentModel(
        ModelSettings(id="any", path="here"), HonestEngine(info=replace(INFO, **fields)),
        Admission(1), ResultCache(0), Metrics().for_model("any"),
    )  # fmt: skip
    found._codec = load_codec()
    return found.describe()


def test_an_engine_that_is_right_passes_every_check() -> None:
    checks = run(HonestEngine(), HonestEngine(), against="other", token_ids=(), texts=())
    for name, check in checks.items():
        assert check.verdict == "passed", (name, check.reason)
        assert check.num_compared > 100
        assert check.largest_difference is not None and check.largest_difference < 1e-5
        assert check.tolerance == 1e-4
    assert checks["chunked"].reason == "20 texts, in steps of 16 tokens"
    assert "tokens of 20 texts came from the prefix cache" in checks["prefix_cached"].reason
    assert checks["replicas"].reason == "80 texts at once on 2 replicas"


def by_batch(moment: Moment) -> float:
    return OFF * (len(moment.call) > 1)


def by_company(moment: Moment) -> float:
    """Wrong beside texts of a call that are not all those of the self-test."""
    return OFF * (len(moment.call) > len(IDS) + 4)


def by_leak(moment: Moment) -> float:
    beside = any(steered(job) for call in moment.beside for job in call)
    return OFF * (beside and moment.job.plan is None)


def by_row(moment: Moment) -> float:
    return OFF * (0 < moment.job.first_row <= 8)


def by_step(moment: Moment) -> float:
    assert isinstance(moment.job, ScoreJob)
    return OFF * (moment.job.step_tokens is not None)


def ignore_plan(_job: Job, _site: Site, x_D: np.ndarray) -> np.ndarray:
    return x_D


def ignore_when_scored(job: Job, site: Site, x_D: np.ndarray) -> np.ndarray:
    """A sampler that steers the prompt alone, and scores that steer everything."""
    skips = isinstance(job, GenerateJob) and job.plan.positions.kind == "completion"
    return x_D if skips else apply_site(site, x_D)


def nudge(_job: Job, site: Site, x_D: np.ndarray) -> np.ndarray:
    """Arithmetic that is not exact: what it keeps moves by a thousandth."""
    return apply_site(site, x_D) * (1 + 1e-3 * bool(site.ops))


WRONG = {
    "repeated": HonestEngine(lambda moment: OFF * (moment.serial % 7)),
    "batched": HonestEngine(by_batch),
    "shuffled": HonestEngine(by_company),
    "target_rows": HonestEngine(by_row),
    "sampled": HonestEngine(sampled_fault=lambda job: OFF * (job.plan is None)),
    "steered_sampled": HonestEngine(steer=ignore_when_scored),
    "drawn": HonestEngine(cuts=False),
    "zero_scale": HonestEngine(steer=nudge),
    "steered_neighbour": HonestEngine(by_leak),
    "prefix_cached": HonestEngine(lambda moment: OFF * (moment.cached > 0)),
    "chunked": HonestEngine(by_step),
    "replicas": HonestEngine(lambda moment: OFF * moment.replica),
}
"""By the check that has to find it, an engine that is wrong."""

TOO: dict[str, set[str]] = {
    "prefix_cached": {"sampled"},
    "steered_neighbour": {"prefix_cached", "chunked", "replicas"},
}
"""Other checks that may find it, because they do the same beside their own."""
COMMON = {"repeated", "batched", "replicas"}
"""What these find, others find as well."""


@pytest.mark.parametrize("name", WRONG)
def test_each_check_finds_what_it_is_there_for(name: str) -> None:
    checks = run(WRONG[name])
    found = checks[name]
    assert found.verdict == "failed", found.reason
    assert "differs by" in found.reason
    assert found.largest_difference is not None and found.largest_difference > 1e-4
    assert name in COMMON or failed(checks) - {name} <= TOO.get(name, set())


def test_a_result_cache_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def find(self: ResultCache, scope: bytes, jobs: Sequence[Job]) -> Any:
        known = await find_known(self, scope, jobs)
        moved = [
            (n, replace(one, columns={"logprob": one.columns["logprob"] + OFF}))
            for n, one in known.hits
        ]
        return replace(known, hits=moved)

    find_known = ResultCache.find
    monkeypatch.setattr(ResultCache, "find", find)
    assert failed(run(HonestEngine())) == {"batched"}


def test_steering_that_does_nothing_is_found() -> None:
    checks = run(HonestEngine(steer=ignore_plan))
    assert failed(checks) == {"steered_sampled"}
    assert "moves their scores by up to 0 nats" in checks["steered_sampled"].reason


def test_zero_steering_has_to_go_through_steering() -> None:
    checks = run(HonestEngine(traces=0.5))
    assert failed(checks) == {"zero_scale"}
    assert checks["zero_scale"].largest_difference == 0


class TestAgainst:
    def test_other_weights(self) -> None:
        other = HonestEngine(seed=1, info=replace(INFO, weights_digest="else"))
        checks = run(HonestEngine(), other, against="other")
        assert failed(checks) == {"against", "against_steered"}
        assert "of other weights" in checks["against"].reason

    def test_another_arithmetic_of_steering(self) -> None:
        def add_alone(_job: Job, site: Site, x_D: np.ndarray) -> np.ndarray:
            is_ablation = any(op.per_component == 0 for op in site.ops)
            return x_D if is_ablation else apply_site(site, x_D)

        checks = run(HonestEngine(), HonestEngine(steer=add_alone), against="other")
        assert failed(checks) == {"against_steered"}

    def test_the_coarser_dtype_counts(self) -> None:
        half = replace(INFO, dtype="bfloat16", logits_dtype="bfloat16")
        checks = run(HonestEngine(), HonestEngine(lambda _: OFF, half), against="other")
        assert failed(checks) == set()
        assert checks["against"].tolerance > 100 * checks["batched"].tolerance

    def test_a_model_that_cannot_be_steered(self) -> None:
        other = HonestEngine(info=replace(INFO, hooks=(), lacks={"steering": "no slots"}))
        checks = run(HonestEngine(), other, against="other")
        assert checks["against"].verdict == "passed"
        assert checks["against_steered"].verdict == "not_run"

    @pytest.mark.parametrize("against", ["any", "other", "third"])
    def test_refusals(self, against: str) -> None:
        other = HonestEngine(info=replace(INFO, vocab_size=INFO.vocab_size + 1))
        with pytest.raises(APIError, match=r"different vocabularies|No model 'third'"):
            run(HonestEngine(), other, against=against)


def test_what_an_engine_lacks_is_not_run_and_says_why() -> None:
    lacks: Any = {"steering": "this model takes no steering", "step_tokens": "one step"}
    columns = ("logprob", "logit_mean", "logit_std")
    checks = run(HonestEngine(info=replace(INFO, hooks=(), lacks=lacks, columns=columns)))
    reasons = {name: check.reason for name, check in checks.items() if check.verdict == "not_run"}
    assert set(reasons) == {
        "steered_sampled", "drawn", "zero_scale", "steered_neighbour", "chunked", "against",
        "against_steered",
    }  # fmt: skip
    assert (reasons["zero_scale"], reasons["chunked"]) == (lacks["steering"], "one step")
    assert "log_q" in reasons["drawn"]
    assert failed(checks) == set()


class TestNoise:
    def test_float32_is_held_to_1e_4_whatever_its_logits(self) -> None:
        assert measure_noise(1000.0, card())[1] == 1e-4
        assert measure_noise(8.0, card(num_layers=4)) == (8 * 2.0**-23, 1e-4)
        assert measure_noise(8.0, card(dtype="float64"))[1] == 1e-4

    @pytest.mark.parametrize(
        ("fields", "epsilon"),
        [
            ({"dtype": "bfloat16"}, EPSILON["bfloat16"]),
            ({"dtype": "float16"}, EPSILON["float16"]),
            ({"tf32": True}, 2.0**-10),
            ({"quantization": "compressed-tensors"}, 2.0**-7),
        ],
    )
    def test_the_coarsest_step_counts(self, fields: dict[str, Any], epsilon: float) -> None:
        noise = measure_noise(3.0, card(num_layers=16), card(**fields))
        assert noise == pytest.approx((epsilon * 3 * 2, 12 * epsilon * 3 * 2))

    def test_a_shift_of_all_values_fails_where_one_such_value_does_not(self) -> None:
        wanted = np.zeros(100)
        one = np.where(np.arange(100) == 3, 0.06, 0.0)
        for found, verdict in ((one, "passed"), (wanted + 0.06, "failed"), (2.1 * one, "failed")):
            assert judge(Compared([found], [wanted], ""), 0.12)["verdict"] == verdict

    def test_nothing_compared_is_nothing_shown_and_what_is_not_finite_fails(self) -> None:
        assert judge(Compared([], [], "why"), 1.0)["verdict"] == "not_run"
        judged = judge(Compared([[None, np.nan]], [[None, np.nan]], "why"), 1.0)
        assert (judged["verdict"], judged["num_compared"]) == ("failed", 2)
        assert judged["largest_difference"] is None


class TestTexts:
    def test_texts_of_the_caller_take_the_place_of_the_built_in_ones(self) -> None:
        engine = HonestEngine()
        answer = asyncio.run(collect(engine, token_ids=IDS))
        assert answer.num_texts == len(IDS) + 4
        alone = [call[0].tokens.tolist() for call in engine.calls if len(call) == 1]
        assert all(ids[:-1] in alone for ids in IDS)
        assert asyncio.run(collect(HonestEngine(), texts=["Once upon a time."])).num_texts == 5

    @pytest.mark.parametrize(
        ("fields", "code"),
        [
            ({"token_ids": [[5] * 97]}, "context_too_long"),
            ({"token_ids": [[5, INFO.vocab_size]]}, "invalid_request"),
            ({"texts": ["a " * 200], "token_ids": ()}, "context_too_long"),
        ],
    )
    def test_refusals(self, fields: dict[str, Any], code: str) -> None:
        with refused(code):
            run(HonestEngine(), **fields)

    def test_texts_or_ids(self) -> None:
        with pytest.raises(ValueError, match="not both"):
            SelftestRequest(texts=["a"], token_ids=[[1, 2]])


class TestEndpoint:
    async def test_a_key_for_it_needs_no_other_scope_and_no_second_request(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "keys"
        key = add_key(path, "root", "admin", concurrency=1)
        async with serve(HonestEngine(), key=key, key_file=path) as client:
            answer = await client.selftest("any", token_ids=IDS)
            assert answer.verdict == "passed" and answer.usage.generated_tokens > 0
            events = [event async for event in client.selftest_events("any", token_ids=IDS)]
            assert isinstance(events[0], StreamStart)
            assert events[-1].checks == events[1:-1] == answer.checks
            with refused("context_too_long"):
                await client.selftest("any", token_ids=[[5] * 97])
            with refused("forbidden", "score"):
                await client.tokenize(["a"])

    async def test_nobody_else_is_let_in_by_its_mark(self, tmp_path: Path) -> None:
        path = tmp_path / "keys"
        add_key(path, "root", "admin")
        async with serve(HonestEngine(), key_file=path) as client:
            with refused("unauthorized"):
                await client.tokenize(["a"])

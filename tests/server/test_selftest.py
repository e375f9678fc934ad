"""The self-test: it passes an engine that is right, and each check finds what it is there for."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from logsteer.errors import APIError, OverloadedError, api_error
from logsteer.schemas import SelftestAnswer, SelftestCheck, SelftestRequest
from logsteer_server.contract.jobs import GenerateJob, Job, Routing
from logsteer_server.contract.plan import Site
from logsteer_server.models.model import ResidentModel
from logsteer_server.settings import Settings
from logsteer_server.tasks import selftest
from logsteer_server.tasks.planning import Capacity
from logsteer_server.tasks.run import Run
from logsteer_server.tasks.selftest import SelftestTask, prove
from logsteer_server.tasks.selftest_checks import PROMISES
from logsteer_server.tasks.selftest_trial import EPSILON, Discrepancy, Noise
from tests.refusals import refused
from tests.server.honest_engine import INFO, HonestEngine, Moment, apply_site, steered
from tests.server.scripted_model import SETTINGS, make_model, register

OFF = 3e-3
"""Nats: 30 times what float32 is allowed."""


def run(
    engine: HonestEngine,
    *others: ResidentModel,
    settings: Settings = SETTINGS,
    **fields: Any,
) -> dict[str, SelftestCheck]:
    """The checks by name, as a caller gets them."""
    answer = finish(engine, *others, settings=settings, **fields)
    assert [check.name for check in answer.checks] == list(PROMISES)
    is_wrong = any(check.verdict == "failed" for check in answer.checks)
    assert answer.verdict == ("failed" if is_wrong else "passed")
    return {check.name: check for check in answer.checks}


def finish(
    engine: HonestEngine, *others: ResidentModel, settings: Settings = SETTINGS, **fields: Any
) -> SelftestAnswer:
    model = make_model(engine, max_tokens=100_000)
    task = SelftestTask(model, SelftestRequest(**fields), register(model, *others))
    return SelftestAnswer.model_validate(asyncio.run(Run(task, Capacity(settings)).finish()))


def failed(checks: dict[str, SelftestCheck]) -> set[str]:
    return {name for name, check in checks.items() if check.verdict == "failed"}


def other(engine: HonestEngine) -> ResidentModel:
    return make_model(engine, max_tokens=100_000, model_id="other")


def test_an_engine_that_is_right_passes_every_check() -> None:
    checks = run(HonestEngine(), other(HonestEngine()), against="other")
    for name, check in checks.items():
        assert check.verdict == "passed", (name, check.reason)
        assert check.num_compared > 0
        assert check.largest_difference is not None and check.largest_difference < 1e-5
        assert check.tolerance == 1e-4
    assert re.match(
        r"[2-9] of \d+ texts were read in several steps of 1500", checks["chunked"].reason
    )
    assert re.match(r"\d+ tokens of \d\d texts came from", checks["prefix_cached"].reason)


def by_batch(moment: Moment) -> float:
    return OFF * (len(moment.call) > 1)


def by_company(moment: Moment) -> float:
    """Wrong beside a text that is cut off in its middle."""
    cut = {len(job.tokens) for job in moment.call if not steered(job)}
    return OFF * (len(moment.call) > 5 and len(cut) > 9 and not has_plans(moment))


def has_plans(moment: Moment) -> bool:
    return any(job.plan is not None for job in moment.call)


def by_leak(moment: Moment) -> float:
    beside = any(steered(job) for job in moment.call)
    return OFF * (beside and moment.job.plan is None)


def by_row(moment: Moment) -> float:
    return OFF * (0 < moment.job.first_row <= 8)


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
    "chunked": HonestEngine(lambda moment: OFF * moment.was_split),
    "replicas": HonestEngine(lambda moment: OFF * (moment.replica == 1)),
}
"""By the check that has to find it, an engine that is wrong."""

TOO: dict[str, set[str]] = {
    "prefix_cached": {"sampled"},
    "steered_neighbour": {"prefix_cached", "chunked", "replicas"},
    "chunked": {"prefix_cached", "replicas"},
}
"""Other checks that find it, because they do the same beside their own."""
COMMON = {"repeated", "batched"}
"""What these find, nearly all others find as well."""


@pytest.mark.parametrize("name", WRONG)
def test_each_check_finds_what_it_is_there_for(name: str) -> None:
    checks = run(WRONG[name])
    found = checks[name]
    assert found.verdict == "failed", found.reason
    assert "differs by" in found.reason
    assert found.largest_difference is not None and found.largest_difference > 1e-4
    assert name in COMMON or failed(checks) - {name} == TOO.get(name, set())


def test_steering_that_does_nothing_is_found_and_hides_no_leak() -> None:
    checks = run(HonestEngine(steer=ignore_plan))
    assert failed(checks) == {"steered_sampled"}
    assert "moves no log-probability" in checks["steered_sampled"].reason
    assert checks["steered_neighbour"].verdict == "not_run"
    assert "could not show" in checks["steered_neighbour"].reason


def test_zero_steering_has_to_go_through_steering() -> None:
    checks = run(HonestEngine(traces=0.5))
    assert failed(checks) == {"zero_scale"}
    assert checks["zero_scale"].largest_difference == 0


def test_numbers_that_are_none_fail() -> None:
    checks = run(HonestEngine(lambda moment: np.nan if moment.was_split else 0.0))
    assert "chunked" in failed(checks)
    assert checks["chunked"].largest_difference is None
    assert "differs by inf" in checks["chunked"].reason


class TestAgainst:
    def test_other_weights(self) -> None:
        model = other(HonestEngine(seed=1, info=replace(INFO, weights_digest="else")))
        checks = run(HonestEngine(), model, against="other")
        assert failed(checks) == {"against", "against_steered"}
        assert "of other weights" in checks["against"].reason

    def test_another_arithmetic_of_steering(self) -> None:
        def add_alone(_job: Job, site: Site, x_D: np.ndarray) -> np.ndarray:
            is_ablation = any(op.per_component == 0 for op in site.ops)
            return x_D if is_ablation else apply_site(site, x_D)

        checks = run(HonestEngine(), other(HonestEngine(steer=add_alone)), against="other")
        assert failed(checks) == {"against_steered"}

    def test_the_coarser_dtype_counts(self) -> None:
        half = replace(INFO, dtype="bfloat16", logits_dtype="bfloat16")
        model = other(HonestEngine(lambda _: OFF, half))
        checks = run(HonestEngine(), model, against="other")
        assert failed(checks) == set()
        assert checks["against"].tolerance > 100 * checks["batched"].tolerance

    def test_a_model_that_cannot_be_steered(self) -> None:
        model = other(HonestEngine(info=replace(INFO, hooks=(), lacks={"steering": "no slots"})))
        checks = run(HonestEngine(), model, against="other")
        assert checks["against"].verdict == "passed"
        assert checks["against_steered"].verdict == "not_run"

    def test_refusals(self) -> None:
        with refused("invalid_request", "against itself", param="against"):
            run(HonestEngine(), against="any")
        with pytest.raises(APIError, match="these are: any"):
            run(HonestEngine(), against="other")
        model = other(HonestEngine(info=replace(INFO, vocab_size=INFO.vocab_size + 1)))
        with refused("invalid_request", "different vocabularies", param="against"):
            run(HonestEngine(), model, against="other")


def test_what_an_engine_lacks_is_not_run_and_says_why() -> None:
    lacks: Any = {"steering": "this model takes no steering; set steering_slots above 0"}
    plain = replace(INFO, hooks=(), lacks=lacks, step_tokens=None, columns=("logprob",))
    checks = run(HonestEngine(info=plain))
    reasons = {name: check.reason for name, check in checks.items() if check.verdict == "not_run"}
    assert set(reasons) == {
        "steered_sampled", "drawn", "zero_scale", "steered_neighbour", "chunked", "against",
        "against_steered",
    }  # fmt: skip
    assert reasons["zero_scale"] == lacks["steering"]
    assert "one step" in reasons["chunked"]
    assert "log_q" in reasons["drawn"]
    assert failed(checks) == set()


def test_a_step_that_cannot_be_filled_within_the_limit_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selftest, "MAX_TOKENS", 300)
    checks = run(HonestEngine())
    assert checks["chunked"].verdict == "not_run"
    assert "a self-test at most 300; lower max_num_batched_tokens" in checks["chunked"].reason


class TestTexts:
    def test_texts_of_the_caller_take_the_place_of_the_built_in_ones(self) -> None:
        engine = HonestEngine()
        ids = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [9, 8]]
        answer = finish(engine, token_ids=ids)
        assert answer.num_texts == 2 + 4
        first = [job.tokens.tolist() for call in engine.calls for job in call if len(call) == 1]
        assert first[1:3] == [ids[0][:-1], ids[1][:-1]]
        assert finish(HonestEngine(), texts=["Once upon a time."]).verdict == "passed"

    @pytest.mark.parametrize(
        ("fields", "code", "words"),
        [
            ({"token_ids": [[5] * 97]}, "context_too_long", "at most 96"),
            ({"token_ids": [[5, INFO.vocab_size]]}, "invalid_request", "vocabulary"),
            ({"token_ids": [[5] * 90] * 4}, "payload_too_large", "at most 300"),
            ({"texts": ["a " * 200]}, "context_too_long", "at most 96"),
        ],
    )
    def test_refusals(
        self, fields: dict[str, Any], code: str, words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(selftest, "MAX_TOKENS", 300)
        with refused(code, words):
            run(HonestEngine(), **fields)

    def test_texts_or_ids(self) -> None:
        with pytest.raises(ValueError, match="not both"):
            SelftestRequest(texts=["a"], token_ids=[[1, 2]])


def test_it_repeats_itself_and_asks_no_cache() -> None:
    first, second = HonestEngine(), HonestEngine()
    one, two = (finish(engine).model_dump()["checks"] for engine in (first, second))
    assert one == two
    for a, b in zip(first.calls, second.calls, strict=True):
        assert [job.tokens.tolist() for job in a] == [job.tokens.tolist() for job in b]


def test_over_the_budget_it_is_refused_before_it_runs_and_gives_its_room_back() -> None:
    engine = HonestEngine()
    model = make_model(engine, max_tokens=100_000)
    task = SelftestTask(model, SelftestRequest(), register(model))
    with model.admission.enter() as others:
        others.cover(100_000)
        with pytest.raises(OverloadedError):
            asyncio.run(Run(task, Capacity(SETTINGS)).finish())
    assert engine.calls == []
    task = SelftestTask(model, SelftestRequest(), register(model))
    asyncio.run(Run(task, Capacity(SETTINGS)).finish())
    assert model.admission.pending == 0


class TestNoise:
    def test_float32_is_held_to_1e_4_whatever_its_logits(self) -> None:
        assert Noise.measure(1000.0, INFO).tolerance == 1e-4
        assert Noise.measure(8.0, replace(INFO, num_layers=4)).floor == 8 * 2.0**-23
        assert Noise.measure(8.0, replace(INFO, dtype="float64")).tolerance == 1e-4

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
        noise = Noise.measure(3.0, replace(INFO, num_layers=16, **fields))
        assert noise.floor == pytest.approx(epsilon * 3 * 2)
        assert noise.tolerance == pytest.approx(12 * noise.floor)

    def test_a_shift_of_all_values_fails_where_one_such_value_does_not(self) -> None:
        noise = Noise(0.01, 0.12)
        wanted = np.zeros(100)
        one = np.where(np.arange(100) == 3, 0.06, 0.0)
        for found, verdict in ((one, "passed"), (wanted + 0.06, "failed"), (2.1 * one, "failed")):
            discrepancy = Discrepancy()
            discrepancy.add(found, wanted, "text 1")
            assert discrepancy.judge("batched", noise, "").verdict == verdict

    def test_equal_infinities_are_equal(self) -> None:
        discrepancy = Discrepancy()
        discrepancy.add([-np.inf, 1.0], [-np.inf, 1.0], "text 1")
        assert (discrepancy.largest, discrepancy.count) == (0.0, 2)


def prove_model(engine: HonestEngine) -> ResidentModel:
    """A model that was tested at its start."""
    model = make_model(engine, max_tokens=100_000)
    model.gate = ("testing", "its self-test has not ended")
    asyncio.run(prove(model, register(model), Capacity(SETTINGS)))
    return model


class TestAtStart:
    def test_a_model_answers_once_it_has_passed(self) -> None:
        model = make_model(HonestEngine(), max_tokens=100_000)
        model.gate = ("testing", "its self-test has not ended")
        assert (model.is_ready, model.describe().state) == (False, "testing")
        with refused("model_loading", "self-test has not ended", retry_after=5):
            model.require()
        asyncio.run(prove(model, register(model), Capacity(SETTINGS)))
        assert (model.is_ready, model.describe().state) == (True, "ready")
        model.require()

    def test_one_that_cannot_be_tested_does_not_answer(self) -> None:
        model = make_model(HonestEngine(), max_tokens=10)
        asyncio.run(prove(model, register(model), Capacity(SETTINGS)))
        assert model.status[0] == "failed"
        assert "could not be run: The request needs" in model.status[1]

    def test_one_whose_test_breaks_does_not_wait_for_ever(self) -> None:
        def wrong(_moment: Moment) -> float:
            raise ZeroDivisionError("no such number")

        model = prove_model(HonestEngine(wrong))
        assert model.status == ("failed", "its self-test broke: ZeroDivisionError: no such number")

    def test_an_engine_that_is_restarted_is_tested_again(self) -> None:
        class Restarted(HonestEngine):
            def run(self, jobs: Sequence[Job], routing: Routing | None = None) -> Any:
                if len(self.calls) == 3:
                    self.calls.append([])
                    raise api_error("engine_restarting", "It died.", retry_after=0.01)
                return super().run(jobs)

        engine = Restarted()
        model = prove_model(engine)
        assert model.is_ready
        assert sum(isinstance(call[0], GenerateJob) for call in engine.calls if call) == 2

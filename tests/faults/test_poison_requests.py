"""Requests that end engines: remembered by their content, and refused after a second death."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from logsteer_server.contract.jobs import GenerateJob, Job, Policy, ScoreJob
from logsteer_server.contract.plan import Direction, Override, Site, SteeringPlan
from logsteer_server.runtime import poison
from logsteer_server.runtime.poison import KEEP_S, PoisonMemory, fingerprint
from tests.conftest import Server, fake_model
from tests.faults.processes import (
    check_retryable,
    open_request,
    read_card,
    read_metric,
    running,
    score,
    wait_for,
    wait_for_jobs,
    wait_for_state,
)
from tests.held import HOLD_FILE, held

pytestmark = pytest.mark.full

EXIT, CRASH = 77, 78


def job(number: int) -> Job:
    return Job(np.array([1, number], np.int32))


def plan(value: float) -> SteeringPlan:
    return SteeringPlan((Site(1, "resid_post", np.full(4, value, np.float32)),))


SCORE = ScoreJob(np.array([1, 2, 3], np.int32), np.array([4], np.int32))
GENERATE = GenerateJob(np.array([1, 2, 3], np.int32), 5)


@pytest.mark.parametrize(
    "other",
    [
        replace(SCORE, tokens=np.array([1, 2, 4], np.int32)),
        replace(SCORE, targets=np.array([5], np.int32)),
        replace(SCORE, top=3),
        replace(SCORE, plan=plan(1.0)),
        replace(SCORE, plan=plan(2.0)),
        replace(SCORE, override=Override(Direction("p", "s"), 1.0)),
        replace(SCORE, policy=Policy(top_k=2**62)),
        GENERATE,
        replace(GENERATE, max_tokens=6),
        replace(GENERATE, stop=("a",)),
    ],
)
def test_other_work_has_another_name(other: Job) -> None:
    assert fingerprint(other) != fingerprint(SCORE)
    assert fingerprint(replace(other)) == fingerprint(other)


def test_a_request_sent_again_has_the_same_name() -> None:
    assert fingerprint(replace(GENERATE, seed=7)) == fingerprint(GENERATE), (
        "a seed may be drawn anew"
    )
    assert fingerprint(replace(SCORE, export="/tmp/a")) == fingerprint(SCORE)
    assert fingerprint(replace(SCORE, plan=plan(2.0))) == fingerprint(
        replace(SCORE, plan=plan(2.0))
    )


class TestMemory:
    @pytest.fixture(autouse=True)
    def _make(self) -> None:
        self.now = 1000.0
        self.memory = PoisonMemory(lambda: self.now)

    def die(self, *numbers: int) -> bool:
        return self.memory.record_death(job(number) for number in numbers)

    def refused(self, *numbers: int) -> list[int]:
        return [number for number in numbers if self.memory.is_poison(job(number))]

    def test_a_job_that_was_there_twice_at_one_death_has_died_once(self) -> None:
        assert not self.die(1, 1)

    def test_what_was_answered_is_free(self) -> None:
        self.die(1, 2)
        self.memory.forget([job(1)])
        assert self.die(1, 2)
        assert self.refused(1, 2) == [2] and not self.memory.remembers(job(3))

    def test_memory_ends(self) -> None:
        self.die(1)
        self.now += KEEP_S - 1
        self.die(1)
        self.now += KEEP_S - 1
        assert self.refused(1) == [1]
        self.now += 1
        assert self.refused(1) == []
        assert not self.memory.deaths

    def test_memory_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(poison, "MAX_FINGERPRINTS", 5)
        self.die(*range(12))
        assert self.refused(0) == []
        assert len(self.memory.deaths) == 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = {
        "models": [
            fake_model(exit_id=EXIT, crash_id=CRASH),
            fake_model("slow", exit_id=EXIT, delay_s=2.0, hold_file=HOLD_FILE),
        ],
        "cache_bytes": 0,
        "max_restarts": 50,
    }
    with running(config, tmp_path_factory.mktemp("server")) as server:
        server.wait_until_ready()
        yield server


@pytest.mark.parametrize("poison", [EXIT, CRASH])
def test_poison_is_refused_after_two_deaths_and_others_are_answered(
    server: Server, poison: int
) -> None:
    wait_for_state(server, "fake", "ready")
    before = read_card(server, "fake")["restarts"]
    for _ in range(2):
        first = score(server, "fake", poison)
        if first.status_code == 503:
            check_retryable(first)
        # Of one that broke, the answer comes before its process has ended.
        wait_for_state(server, "fake", "ready")
        wait_for(lambda: read_card(server, "fake")["restarts"] > before)
        wait_for_state(server, "fake", "ready")
    problem = first.json()
    assert (first.status_code, problem["code"], problem["retryable"]) == (500, "internal", False)
    assert "ended twice" in problem["detail"]
    again = score(server, "fake", poison)
    assert (again.status_code, again.json()["code"]) == (500, "internal")
    assert score(server, "fake", 100).status_code == 200
    assert read_card(server, "fake")["restarts"] == before + 2, "no third engine was given it"


@contextmanager
def asked(server: Server, *ids: int) -> Iterator[None]:
    """A request to the slow model, whose caller leaves with the block and half a second later."""
    item = {"context_ids": [5, *ids], "target_ids": [[6]]}
    content = json.dumps({"model": "slow", "items": [item]}).encode()
    with open_request(server, "POST /logprob", content):
        yield
        time.sleep(0.5)  # a quarter of the step that has begun


def has_one(server: Server, where: str) -> bool:
    """Whether one sequence for the slow model is there: `queued` before its engine, or `waiting`
    in it, for the end of a step."""
    return read_metric(server, f"engine_sequences_{where}", model="slow") == 1


def test_a_caller_that_leaves_does_not_leave_the_blame_to_others(server: Server) -> None:
    """The engine dies in a step with a job whose caller is gone, and with one whose is not."""
    poison, hold = (EXIT, 9), server.directory / HOLD_FILE
    with ThreadPoolExecutor(2) as pool, held(hold):
        first = pool.submit(score, server, "slow", 200)
        wait_for_jobs(server, "slow")
        wait_for(lambda: has_one(server, "waiting"))  # in the step that is held
        with asked(server, *poison):
            stays = pool.submit(score, server, "slow", 300)
            wait_for_jobs(server, "slow", 3)
            hold.unlink()
            assert first.result().status_code == 200, "the next step has the other two"
        check_retryable(stays.result())
    wait_for_state(server, "slow", "ready")
    with asked(server, *poison):
        wait_for_jobs(server, "slow")
    wait_for(lambda: read_card(server, "slow")["restarts"] == 2)
    wait_for_state(server, "slow", "ready")
    told = score(server, "slow", *poison)
    assert (told.status_code, told.json()["code"]) == (500, "internal")
    assert score(server, "slow", 300).status_code == 200

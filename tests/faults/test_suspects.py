"""Requests that end engines: found after a second death, without blame for their neighbours."""

import json
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import httpx
import numpy as np
import pytest

from logsteer_server.contract.engine import EngineRoom
from logsteer_server.contract.jobs import GenerateJob, Job, Policy, ScoreJob
from logsteer_server.contract.parameters import Direction, Override
from logsteer_server.contract.plan import Site, SteeringPlan
from logsteer_server.runtime.queue import EngineCall, FairQueue
from logsteer_server.runtime.suspects import (
    MAX_SUSPECTS,
    SETTLE_S,
    TRIAL_S,
    Quarantine,
    identify,
)
from tests.conftest import Server, fake_model
from tests.faults.processes import (
    check_retryable,
    read_card,
    running,
    score,
    wait_for,
    wait_for_jobs,
    wait_for_state,
)
from tests.held import HOLD_FILE, held

EXIT, CRASH = 77, 78
POISON_S = 100.0


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
    assert identify(other) != identify(SCORE)
    assert identify(replace(other)) == identify(other)


def test_a_request_sent_again_has_the_same_name() -> None:
    assert identify(replace(GENERATE, seed=7)) == identify(GENERATE), "a seed may be drawn anew"
    assert identify(replace(SCORE, export="/tmp/a")) == identify(SCORE)
    assert identify(replace(SCORE, plan=plan(2.0))) == identify(replace(SCORE, plan=plan(2.0)))


class TestQuarantine:
    @pytest.fixture(autouse=True)
    def _make(self) -> None:
        self.now = 1000.0
        self.quarantine = Quarantine(POISON_S, lambda: self.now)
        self.queue = FairQueue(EngineRoom(1000), self.quarantine)
        self.next_id = 0

    def ask(self, *numbers: int) -> int:
        """Put a call in; the id of its first job."""
        first, self.next_id = self.next_id, self.next_id + len(numbers)
        self.queue.put(EngineCall([job(number) for number in numbers], first))
        return first

    def take(self) -> list[int]:
        """The numbers of the jobs that the engine is sent now."""
        self.taken = self.queue.take()
        return [
            int(call.job(job_id).tokens[1])
            for sent in self.taken.by_replica.values()
            for call, own in sent.by_call.items()
            for job_id in own
        ]

    def die(self, *numbers: int) -> list[int]:
        """The engine dies with these jobs; the numbers of those that are convicted."""
        convicted = self.quarantine.accuse([job(number) for number in numbers])
        self.queue.clear()
        return [number for number in numbers if identify(job(number)) in convicted]

    def answer(self, job_id: int, number: int) -> None:
        self.queue.finish([job_id])
        self.quarantine.acquit(job(number))

    def test_the_second_death_convicts_one_of_many_neighbours(self) -> None:
        """The poison is 13; its forty neighbours come back together with it."""
        neighbours = list(range(40))
        assert self.die(*neighbours) == []
        for number in neighbours:
            self.ask(number)
        answered = []
        while (sent := self.take()) != [13]:
            assert len(sent) == 1, "one suspect at a time"
            self.answer(self.taken.order[0], sent[0])
            answered += sent
        assert answered == list(range(13))
        assert self.die(13) == [13]
        for number in range(20):
            self.ask(number)
        order = []
        while True:
            sent = self.take()
            if self.taken.refused:
                assert (self.taken.refused, order) == ([41 - 1 + 13], [])
            if not sent:
                break
            for job_id, number in zip(self.taken.order, sent, strict=True):
                self.answer(job_id, number)
                order.append(number)
        assert sorted(order) == [number for number in range(20) if number != 13]

    def test_new_jobs_wait_for_a_trial_and_no_longer_than_its_time(self) -> None:
        self.die(1)
        self.ask(1)
        assert self.take() == [1]
        self.ask(2)
        assert self.take() == []
        assert self.taken.wait_s == TRIAL_S
        self.now += TRIAL_S
        assert self.take() == [2]

    def test_a_suspect_waits_until_others_have_shown_to_be_harmless(self) -> None:
        self.die(1)
        two = self.ask(2)
        assert self.take() == [2]
        self.ask(1)
        self.ask(3)
        assert self.take() == [], "3 would else be suspected, too"
        assert self.taken.wait_s == SETTLE_S
        self.queue.finish([two])
        assert self.take() == [1], "it is alone now"

    def test_a_busy_engine_takes_a_suspect_once_its_jobs_have_run_for_a_while(self) -> None:
        self.die(1)
        self.ask(2)
        assert self.take() == [2]
        self.ask(1)
        self.now += SETTLE_S
        assert self.take() == [1]

    def test_a_second_suspect_waits_for_the_first_and_others_pass_it(self) -> None:
        self.die(1, 2)
        one = self.ask(1)
        self.ask(2)
        assert self.take() == [1]
        self.now += TRIAL_S
        self.ask(3)
        assert self.take() == [3]
        assert self.take() == []
        self.answer(one, 1)
        self.now += SETTLE_S
        assert self.take() == [2]

    def test_what_was_answered_is_free(self) -> None:
        self.die(1)
        self.answer(self.ask(1), 1)
        self.queue.clear()
        self.ask(1, 2)
        assert self.take() == [1, 2]
        assert self.die(1) == [], "its first death counts no more"

    def test_suspicion_ends(self) -> None:
        self.die(1, 2)
        assert self.die(1) == [1]
        self.ask(1)
        assert (self.take(), self.taken.refused) == ([], [0])
        self.now += POISON_S
        self.ask(1, 2)
        assert (self.take(), self.taken.refused) == ([1, 2], [])

    def test_the_list_is_bounded(self) -> None:
        self.die(*range(MAX_SUSPECTS + 10))
        assert len(self.quarantine._suspects) == MAX_SUSPECTS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = {
        "models": [
            fake_model(exit_id=EXIT, crash_id=CRASH, delay_s=0.3),
            fake_model("slow", exit_id=EXIT, delay_s=2.0, hold_file=HOLD_FILE),
        ],
        "cache_bytes": 0,
        "max_restarts": 50,
        "restart_window_s": 5.0,
    }
    with running(config, tmp_path_factory.mktemp("server")) as server:
        server.wait_until_ready()
        yield server


def ask_until_told(server: Server, *ids: int) -> tuple[httpx.Response, int]:
    """Send a request for as long as the answer says to; that answer, and the tries."""
    for tries in range(1, 100):
        response = score(server, "fake", *ids)
        if response.status_code != 503:
            return response, tries
        check_retryable(response)
        wait_for_state(server, "fake", "ready")
    raise AssertionError("it was never told")


@pytest.mark.parametrize("poison", [EXIT, CRASH])
def test_poison_is_refused_after_two_deaths_and_its_neighbours_are_answered(
    server: Server, poison: int
) -> None:
    wait_for_state(server, "fake", "ready")
    before = read_card(server, "fake")["restarts"]
    requests: Sequence[tuple[int, ...]] = [(100 + number,) for number in range(20)]
    with ThreadPoolExecutor(21) as pool:
        running_requests = [pool.submit(ask_until_told, server, *ids) for ids in requests]
        time.sleep(0.05)
        response, _ = pool.submit(ask_until_told, server, poison).result()
        answers = [request.result()[0] for request in running_requests]
    assert [answer.status_code for answer in answers] == [200] * 20
    problem = response.json()
    assert (response.status_code, problem["code"], problem["retryable"]) == (500, "internal", False)
    assert "ended twice" in problem["detail"]
    # Of one that broke, the answer comes before its process has ended.
    wait_for(lambda: read_card(server, "fake")["restarts"] == before + 2)
    wait_for_state(server, "fake", "ready")
    again = score(server, "fake", poison)
    assert (again.status_code, again.json()["code"]) == (500, "internal")
    assert read_card(server, "fake")["restarts"] == before + 2, "no third engine was given it"


@contextmanager
def asked(server: Server, *ids: int) -> Iterator[None]:
    """A request to the slow model, whose caller leaves with the block and half a second later."""
    url = httpx.URL(server.url)
    item = {"context_ids": [5, *ids], "target_ids": [[6]]}
    content = json.dumps({"model": "slow", "items": [item]}).encode()
    with socket.create_connection((url.host, url.port), 60) as connection:
        head = f"POST /logprob HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
        yield
        time.sleep(0.5)  # a quarter of the step that has begun


def test_a_caller_that_leaves_does_not_leave_the_blame_to_others(server: Server) -> None:
    """The engine dies in a step with a job whose caller is gone, and with one whose is not."""
    poison, hold = (EXIT, 9), server.directory / HOLD_FILE
    with ThreadPoolExecutor(2) as pool, held(hold):
        first = pool.submit(score, server, "slow", 200)
        wait_for_jobs(server, "slow")
        time.sleep(0.5)  # in which its step begins
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

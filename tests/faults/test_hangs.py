"""Engines that hang: stopped, or in a step that does not end; and those that only take long."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from logsteer_server.runtime.process import Beat
from logsteer_server.runtime.watchdog import RestartBudget, Watchdog, WatchLimits, lengthen
from tests.conftest import Server, fake_model
from tests.faults.processes import (
    check_retryable,
    find_engines,
    read_card,
    running,
    score,
    wait_for,
    wait_for_jobs,
    wait_for_state,
)
from tests.held import held

HANG = 77
SILENCE_S = 2.0
STEP_S = 5.0
LIMITS = WatchLimits(heartbeat_timeout_s=10.0, max_step_s=50.0, max_load_s=100.0)


class TestWatchdog:
    """Heartbeats as it sees them, one look a second."""

    @pytest.fixture
    def dog(self) -> Watchdog:
        return Watchdog(LIMITS)

    def look(self, dog: Watchdog, beats: Iterator[Beat | None], looks: int) -> tuple[int, str]:
        """The number of the look that finds a hang, and what it says; 0 where none does."""
        for number in range(1, looks + 1):
            if why := dog.look(next(beats), 1.0):
                return number, why
        return 0, ""

    def test_a_loop_that_turns_does_not_hang(self, dog: Watchdog) -> None:
        assert self.look(dog, (Beat(n, n, False) for n in range(1000)), 1000) == (0, "")

    def test_silence_is_a_hang_even_in_a_step(self, dog: Watchdog) -> None:
        beats = iter([Beat(1, 1, True)] * 100)
        assert self.look(dog, beats, 100) == (12, "it was silent for 10 s")

    def test_a_loop_that_stands_still_outside_of_the_engine_hangs(self, dog: Watchdog) -> None:
        beats = (Beat(n, 7, False) for n in range(100))
        assert self.look(dog, beats, 100) == (12, "its loop has stood still for 10 s")

    def test_a_long_step_is_no_hang_and_a_very_long_one_is(self, dog: Watchdog) -> None:
        beats = (Beat(n, 7, True) for n in range(100))
        assert self.look(dog, beats, 100) == (52, "one step took 50 s")
        endless = Watchdog(WatchLimits(10.0, None, None))
        assert self.look(endless, (Beat(n, 7, True) for n in range(10_000)), 10_000) == (0, "")

    def test_loading_may_take_long(self, dog: Watchdog) -> None:
        assert self.look(dog, iter([None] * 200), 200) == (101, "its model was not loaded in 100 s")

    def test_what_the_server_slept_through_is_no_silence(self, dog: Watchdog) -> None:
        assert dog.look(Beat(1, 1, False), 1.0) is None
        for _ in range(4):
            assert dog.look(Beat(1, 1, False), 3600.0) is None, "the machine was suspended"
        assert dog.look(Beat(2, 1, False), 3600.0) is None
        assert self.look(dog, (Beat(n, n, False) for n in range(3, 100)), 90) == (0, "")


class TestBudget:
    def test_waits_grow_and_the_budget_ends(self) -> None:
        budget = RestartBudget(8, window_s=600.0, delay_s=1.0)
        assert [budget.take(100.0) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, None]

    def test_an_engine_that_dies_now_and_then_is_restarted_for_ever(self) -> None:
        budget = RestartBudget(2, window_s=600.0, delay_s=1.0)
        assert [budget.take(1000.0 * hour) for hour in range(50)] == [1.0] * 50
        assert [budget.take(50_000.0 + s) for s in (0, 1, 2, 599, 600, 601)] == [
            1.0, 2.0, None, None, 2.0, 2.0,
        ]  # fmt: skip

    def test_a_wait_doubles_up_to_its_bound_however_often_it_was_in_vain(self) -> None:
        found = [lengthen(60.0, count, 960.0) for count in (1, 2, 3, 4, 5, 6, 5000)]
        assert found == [60, 120, 240, 480, 960, 960, 960]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Fakes that count as hung after two seconds of silence; `slow` takes five for a step."""
    config = {
        "models": [
            fake_model("quick", hang_id=HANG, hold_file="quick"),
            fake_model("slow", delay_s=STEP_S, hold_file="slow"),
        ],
        "heartbeat_timeout_s": SILENCE_S,
        "max_step_s": 8.0,
        "cache_bytes": 0,
    }
    with running(config, tmp_path_factory.mktemp("server")) as server:
        server.wait_until_ready()
        yield server


def find_engine_of(server: Server, model: str) -> int:
    """The engine of one of two models: they are started in order."""
    return find_engines(server)[["quick", "slow"].index(model)]


def test_a_long_step_is_no_hang(server: Server) -> None:
    assert score(server, "slow").status_code == 200
    assert read_card(server, "slow")["restarts"] == 0


def test_a_stopped_engine_is_killed_and_restarted(server: Server) -> None:
    engine = find_engine_of(server, "slow")
    before = read_card(server, "slow")["restarts"]
    stream = {"model": "slow", "prompt_ids": [[5, 6]], "max_tokens": 3, "stream": True}
    with ThreadPoolExecutor(2) as pool, held(server.directory / "slow"):
        plain = pool.submit(score, server, "slow")
        events = pool.submit(httpx.post, f"{server.url}/generate", json=stream, timeout=60)
        wait_for_jobs(server, "slow", 2)
        started = time.monotonic()
        os.kill(engine, signal.SIGSTOP)
        check_retryable(plain.result())
        found = time.monotonic() - started
        assert SILENCE_S - 1 < found < SILENCE_S + 30
        assert "event: error" in events.result().text
        assert '"code":"engine_restarting"' in events.result().text
        card = read_card(server, "slow")
        assert card["state"] == "restarting"
        assert "silent for 2 s" in card["detail"]
        assert httpx.get(f"{server.url}/readyz", timeout=60).status_code == 503
        assert score(server, "quick").status_code == 200, "the other model does not notice"
    wait_for_state(server, "slow", "ready")
    assert read_card(server, "slow")["restarts"] == before + 1
    assert not Path(f"/proc/{engine}").exists()
    assert score(server, "slow").status_code == 200


def test_an_idle_engine_that_is_stopped_is_found_without_a_request(server: Server) -> None:
    engine = find_engine_of(server, "slow" if read_card(server, "quick")["restarts"] else "quick")
    os.kill(engine, signal.SIGSTOP)
    wait_for(lambda: not Path(f"/proc/{engine}").exists())
    for model in ("quick", "slow"):
        wait_for_state(server, model, "ready")


def test_a_step_that_does_not_end_is_ended(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(score, server, "quick", HANG)
        wait_for_jobs(server, "quick")
        with held(server.directory / "quick"):
            check_retryable(hanging.result())
            assert "one step took 8 s" in read_card(server, "quick")["detail"]
    wait_for_state(server, "quick", "ready")
    assert score(server, "quick").status_code == 200

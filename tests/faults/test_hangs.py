"""Engines that hang: stopped, or in a step that does not end; and those that only take long."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from logsteer_server.runtime.process import Heartbeat
from logsteer_server.runtime.supervision import RestartBudget, SupervisionLimits, Watchdog
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

pytestmark = pytest.mark.full

HANG = 77
SILENCE_S = 2.0
STEP_S = 5.0
LIMITS = SupervisionLimits(heartbeat_timeout_s=10.0, max_step_s=50.0, max_load_s=300.0)


class TestWatchdog:
    """Heartbeats as it sees them, one look a second."""

    @pytest.fixture
    def dog(self) -> Watchdog:
        return Watchdog(LIMITS)

    def look(self, dog: Watchdog, heartbeats: Iterator[Heartbeat], looks: int) -> tuple[int, str]:
        """The number of the look that finds a hang, and what it says; 0 where none does."""
        for number in range(1, looks + 1):
            if why := dog.watch_work(next(heartbeats), 1.0):
                return number, why
        return 0, ""

    def test_a_loop_that_turns_does_not_hang(self, dog: Watchdog) -> None:
        assert self.look(dog, (Heartbeat(n, n, False) for n in range(1000)), 1000) == (0, "")

    def test_silence_is_a_hang_even_in_a_step(self, dog: Watchdog) -> None:
        heartbeats = iter([Heartbeat(1, 1, True)] * 100)
        assert self.look(dog, heartbeats, 100) == (12, "it was silent for 10 s")

    def test_a_loop_that_stands_still_outside_of_the_engine_hangs(self, dog: Watchdog) -> None:
        heartbeats = (Heartbeat(n, 7, False) for n in range(100))
        assert self.look(dog, heartbeats, 100) == (12, "its loop has stood still for 10 s")

    def test_a_long_step_is_no_hang_and_a_very_long_one_is(self, dog: Watchdog) -> None:
        heartbeats = (Heartbeat(n, 7, True) for n in range(100))
        assert self.look(dog, heartbeats, 100) == (52, "one step took 50 s")
        endless = Watchdog(SupervisionLimits(10.0, None, None))
        assert self.look(endless, (Heartbeat(n, 7, True) for n in range(10_000)), 10_000) == (0, "")

    @pytest.mark.parametrize(
        ("progress", "hang"),
        [
            (lambda s: 0.25 * s, (301, "its model was not loaded in 300 s")),
            (lambda s: 30.0 * (s // 30), (301, "its model was not loaded in 300 s")),
            (lambda s: min(s, 50) + s / 20, (151, "its load made no progress for 100 s")),
            (
                lambda _: None,
                (301, "its model was not loaded in 300 s"),
            ),
        ],
    )
    def test_a_load_may_take_long_while_it_makes_progress(
        self, dog: Watchdog, progress: Callable[[float], float | None], hang: tuple[int, str]
    ) -> None:
        """A fifth of a MiB a second is progress, and a twentieth is none."""
        found = (dog.watch_load(progress(float(second)), 1.0) for second in range(1, 1000))
        assert next((n, why) for n, why in enumerate(found, 1) if why) == hang

    def test_what_the_server_slept_through_is_no_silence(self, dog: Watchdog) -> None:
        assert dog.watch_work(Heartbeat(1, 1, False), 1.0) is None
        for _ in range(4):
            assert dog.watch_work(Heartbeat(1, 1, False), 3600.0) is None, (
                "the machine was suspended"
            )
        assert dog.watch_work(Heartbeat(2, 1, False), 3600.0) is None
        assert self.look(dog, (Heartbeat(n, n, False) for n in range(3, 100)), 90) == (0, "")


class TestBudget:
    def test_waits_grow_and_the_budget_ends(self) -> None:
        budget = RestartBudget(8, delay_s=1.0)
        assert [budget.spend(100.0) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, None]

    def test_an_engine_that_dies_now_and_then_is_restarted_for_ever(self) -> None:
        budget = RestartBudget(2, delay_s=1.0)
        assert [budget.spend(1000.0 * hour) for hour in range(50)] == [1.0] * 50
        assert [budget.spend(50_000.0 + s) for s in (0, 1, 2, 599, 600, 601)] == [
            1.0, 2.0, None, None, 2.0, 2.0,
        ]  # fmt: skip


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


def test_a_stopped_engine_is_killed_and_restarted(server: Server) -> None:
    engine = find_engine_of(server, "slow")
    before = read_card(server, "slow")["restarts"]
    stream = {"model": "slow", "prompt_ids": [[5, 6]], "max_tokens": 3, "stream": True}
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool, held(server.directory / "slow"):
        plain = pool.submit(score, server, "slow")
        events = pool.submit(httpx.post, f"{server.url}/generate", json=stream, timeout=60)
        wait_for_jobs(server, "slow", 2)
        os.kill(engine, signal.SIGSTOP)
        check_retryable(plain.result())
        found = time.monotonic() - started
        assert SILENCE_S - 1 < found < SILENCE_S + 30
        assert "event: error" in events.result().text
        assert '"code":"engine_restarting"' in events.result().text
        card = read_card(server, "slow")
        assert card["state"] == "restarting"
        # A slow machine stops it when the held step has lasted for a while.
        assert card["detail"].endswith(("silent for 2 s", "still for 2 s"))
        assert httpx.get(f"{server.url}/readyz", timeout=60).status_code == 503
        assert score(server, "quick").status_code == 200, "the other model does not notice"
    wait_for_state(server, "slow", "ready")
    assert read_card(server, "slow")["restarts"] == before + 1
    assert not Path(f"/proc/{engine}").exists()
    assert score(server, "slow").status_code == 200


def test_a_step_that_does_not_end_is_ended(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(score, server, "quick", HANG)
        wait_for_jobs(server, "quick")
        with held(server.directory / "quick"):
            check_retryable(hanging.result())
            assert "one step took 8 s" in read_card(server, "quick")["detail"]
    wait_for_state(server, "quick", "ready")
    assert score(server, "quick").status_code == 200


def test_a_load_that_hangs_is_ended_and_the_card_says_why(tmp_path: Path) -> None:
    """At the first start, and at a restart: it is killed, and the next one is watched anew."""
    config = {"models": [fake_model(hang_file="hang")], "heartbeat_timeout_s": 0.5}
    (tmp_path / "hang").touch()
    with running(config, tmp_path) as server:

        def detail() -> str:
            return str(read_card(server, "fake")["detail"])

        wait_for(lambda: "starting, without progress for" in detail())
        assert read_card(server, "fake")["state"] == "loading"
        wait_for(lambda: "its load made no progress for 5 s" in detail())
        assert "hangs and is killed: its load made no progress for 5 s" in server.output
        (tmp_path / "hang").unlink()
        wait_for_state(server, "fake", "ready")
        assert detail() == "answers"
        (tmp_path / "hang").touch()
        os.kill(find_engines(server)[0], signal.SIGKILL)
        wait_for(lambda: "starting, without progress for" in detail())
        assert "before that: its process was ended by SIGKILL" in detail()
        wait_for(lambda: "its load made no progress for 5 s" in detail())
        (tmp_path / "hang").unlink()
        wait_for_state(server, "fake", "ready")

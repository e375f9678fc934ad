"""Engines that die: how often they are started again, and what becomes of the server."""

import asyncio
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.runtime.handle import EngineHandle
from logsteer_server.runtime.supervision import TRANSITIONS, Replica, SupervisionLimits
from tests.conftest import DEMO_MODEL, VOCAB_SIZE, fake_model
from tests.faults.processes import (
    check_retryable,
    find_engine,
    find_engines,
    read_card,
    running,
    score,
    wait_for,
    wait_for_state,
)

SPEC = EngineSpec(
    "fake", "fake", str(DEMO_MODEL), engine_args={"vocab_size": VOCAB_SIZE, "context_length": 64}
)


LIMITS = SupervisionLimits(max_restarts=1)


class TestPhases:
    def test_only_what_the_table_names_leads_on(self) -> None:
        phases = {phase for phase, _ in TRANSITIONS} | set(TRANSITIONS.values())
        for phase in phases:
            for happening in ("loads", "fails", "ends", "restarts", "exhausts"):
                replica = Replica(0, SPEC, LIMITS)
                replica.phase = phase
                following = TRANSITIONS.get((phase, happening))  # type: ignore[arg-type]
                assert replica.apply(happening) == (following is not None)  # type: ignore[arg-type]
                assert replica.phase == (following or phase)

    def test_what_the_card_says_from_start_to_end(self) -> None:
        replica, found = Replica(0, SPEC, LIMITS), []

        def show() -> None:
            found.append((replica.phase, replica.state, replica.detail))

        show()
        for happening, reason in [("fails", "no room"), ("ends", "status 0")]:
            replica.apply(happening, reason)  # type: ignore[arg-type]
            show()
        replica.plan_restart()
        for happening in ("restarts", "loads", "fails", "ends"):
            replica.apply(happening, "it broke" if happening == "fails" else "")  # type: ignore[arg-type]
            show()
        assert replica.plan_restart() is None
        show()
        last = "it was given up after 1 restarts within 600 s; last: it broke"
        assert found == [
            ("starting", "loading", "starting"),
            ("silent", "loading", "no room"),
            ("ended", "loading", "no room"),
            ("starting", "restarting", "starting; before that: no room"),
            ("ready", "ready", "answers"),
            ("silent", "restarting", "it broke"),
            ("ended", "restarting", "it broke"),
            ("given up", "failed", last),
        ]


@pytest.mark.full
def test_a_load_that_fails_during_a_restart_is_tried_again(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    with running({"models": [fake_model() | {"path": str(model)}]}, tmp_path) as server:
        server.wait_until_ready()
        model.rename(tmp_path / "away")
        os.kill(find_engine(server), signal.SIGKILL)
        wait_for(lambda: "no such directory" in read_card(server, "fake")["detail"])
        check_retryable(score(server, "fake"))
        (tmp_path / "away").rename(model)
        wait_for_state(server, "fake", "ready")
        assert score(server, "fake").status_code == 200


def test_a_required_model_that_is_given_up_ends_the_server(tmp_path: Path) -> None:
    models = [fake_model("needed"), fake_model("other", delay_s=2.0)]
    config = {"models": models, "max_restarts": 0}
    with running(config, tmp_path) as server:
        server.wait_until_ready()
        os.kill(find_engines(server)[0], signal.SIGKILL)
        assert server.process.wait(60) == 3
        assert "The required model needed was given up" in server.lines[-1]
        assert "after 0 restarts within 600 s" in server.lines[-1]


@pytest.mark.parametrize("case", ["not required", "not wanted"])
def test_a_model_that_is_given_up_can_leave_the_server_up(tmp_path: Path, case: str) -> None:
    config = {
        "models": [fake_model("spare") | {"required": case != "not required"}],
        "max_restarts": 0,
        "exit_when_given_up": case != "not wanted",
    }
    with running(config, tmp_path) as server:
        server.wait_until_ready()
        os.kill(find_engine(server), signal.SIGKILL)
        wait_for_state(server, "spare", "failed")
        time.sleep(0.5)
        assert server.process.poll() is None
        answer = score(server, "spare")
        assert (answer.status_code, answer.json()["retryable"]) == (500, False)
        assert "given up" in answer.json()["detail"]


async def test_a_start_without_descriptors_is_tried_again() -> None:
    handle = EngineHandle(SPEC, SupervisionLimits(restart_delay_s=0.2))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1, limits[1]))
    try:
        handle.start()
        assert handle.state == "restarting"
        assert "Too many open files" in handle.detail
        async with asyncio.timeout(60):
            while handle.restarts < 2:
                await asyncio.sleep(0.05)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    try:
        await asyncio.wait_for(handle.ready.wait(), 60)
        assert handle.state == "ready"
    finally:
        await handle.close()


async def test_nothing_of_a_dead_engine_is_left() -> None:
    handle = EngineHandle(SPEC, SupervisionLimits(restart_delay_s=0.01, max_restarts=10))
    handle.start()
    most_files, most_threads = 10_000, 10_000

    def count() -> tuple[int, int]:
        # The event loop's own pool grows to a handful of threads, whoever asks it.
        threads = [own for own in threading.enumerate() if not own.name.startswith("asyncio_")]
        return len(list(Path("/proc/self/fd").iterdir())), len(threads)

    try:
        for start in range(4):
            async with asyncio.timeout(60):
                await handle.ready.wait()
                while (now := count())[0] > most_files or now[1] > most_threads:
                    await asyncio.sleep(0.05)
            if not start:
                await asyncio.sleep(0.1)
                most_files, most_threads = count()
            (replica,) = handle.replicas
            replica.process.kill()
            restarts = handle.restarts
            while handle.restarts == restarts:
                await asyncio.sleep(0.01)
    finally:
        await handle.close()

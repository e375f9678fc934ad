"""Engines that die: how often they are restarted, and when the server ends with them.

Where several replicas serve a model, one dies or hangs, and the others answer its requests.
"""

import asyncio
import os
import resource
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from logsteer_server.contract.batches import ResultPart
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import GenerateJob, ScoreJob
from logsteer_server.engines.fake import fake_generation, fake_logprobs
from logsteer_server.runtime.handle import EngineHandle
from logsteer_server.runtime.supervision import Replica, SupervisionLimits
from tests.conftest import DEMO_MODEL, VOCAB_SIZE, ServerFactory, fake_model
from tests.faults.callers import load
from tests.faults.processes import (
    check_retryable,
    find_engine,
    find_engines,
    read_card,
    running,
    score,
    wait_for,
    wait_for_jobs,
    wait_for_state,
)
from tests.refusals import refused

SPEC = EngineSpec(
    "fake", "fake", str(DEMO_MODEL), engine_args={"vocab_size": VOCAB_SIZE, "context_length": 64}
)


LIMITS = SupervisionLimits(max_restarts=1)


class TestPhases:
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
        assert not replica.apply("loads"), "one that was killed just after its load stays lost"
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


def test_a_start_that_lacks_memory_is_tried_again(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    config = {"models": [fake_model("waiting", memory_file=str(memory)), fake_model("other")]}
    with running(config, tmp_path) as server:
        wait_for_state(server, "waiting", "restarting")
        card = read_card(server, "waiting")
        assert "MemoryError: the fake engine was told to lack memory" in card["detail"]
        assert card["restarts"] >= 1
        check_retryable(score(server, "waiting"))
        memory.touch()
        wait_for_state(server, "waiting", "ready")
        assert score(server, "waiting").status_code == 200


def test_a_model_that_cannot_be_loaded_says_why(start_server: ServerFactory) -> None:
    broken = fake_model("broken") | {"path": "/nowhere"}
    with pytest.raises(RuntimeError, match="no such directory"):
        start_server({"models": [broken]})


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


# ------------------------------------------------------------------ replicas


EXIT, HANG = 77, 79
PATIENCE = SupervisionLimits(
    restart_delay_s=0.1, max_restarts=20, heartbeat_timeout_s=3.0, max_step_s=3.0
)


def make_spec(replicas: int = 2, **args: Any) -> EngineSpec:
    args = {"vocab_size": VOCAB_SIZE, "context_length": 128, "ahead_tokens": 60} | args
    return EngineSpec("fake", "fake", str(DEMO_MODEL), replicas=replicas, engine_args=args)


@asynccontextmanager
async def started(
    spec: EngineSpec, limits: SupervisionLimits = PATIENCE
) -> AsyncIterator[EngineHandle]:
    engine = EngineHandle(spec, limits)
    engine.start()
    try:
        await until(lambda: all(own.state == "ready" for own in engine.read()))
        yield engine
    finally:
        await engine.close()


async def until(is_so: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def make_jobs(count: int) -> list[ScoreJob]:
    return [
        ScoreJob(np.array([100 + n % 50, n // 50, 3], np.int32), np.array([7], np.int32))
        for n in range(count)
    ]


async def collect(engine: EngineHandle, jobs: list[Any]) -> dict[int, list[Any]]:
    """The results of each job, of which each is to have one."""
    found: dict[int, list[Any]] = {}
    async for part in engine.run(jobs):
        for number, result in zip(part.numbers, part.results, strict=True):
            found.setdefault(number, []).append(result)
    return found


def check_answers(jobs: list[ScoreJob], found: dict[int, list[Any]]) -> None:
    """Every job is answered once, with what it is to come to."""
    assert sorted(found) == list(range(len(jobs)))
    assert {len(results) for results in found.values()} == {1}
    for number, job in enumerate(jobs):
        assert np.array_equal(found[number][0].columns["logprob"], fake_logprobs(job))


def kill(engine: EngineHandle, number: int) -> None:
    process = engine.replicas[number].process
    os.kill(process._pid, signal.SIGKILL)


@pytest.mark.full
@pytest.mark.parametrize("poison", [EXIT, HANG])
async def test_poison_is_tried_on_a_second_replica_and_refused_then(poison: int) -> None:
    async with started(make_spec(replicas=3, exit_id=EXIT, hang_id=HANG)) as engine:
        bad = ScoreJob(np.array([poison, 3], np.int32), np.array([7], np.int32))
        for _ in range(2):
            with refused("internal", "ended twice"):
                await asyncio.wait_for(collect(engine, [bad]), 60)
        await until(lambda: engine.restarts == 2)
        assert engine.state == "ready", "the third one was not given it"
        jobs = make_jobs(20)
        assert not engine._poison.record_death(jobs)
        check_answers(jobs, await collect(engine, jobs))
        assert not engine._poison.record_death(jobs), "they were answered since the first death"


@pytest.mark.full
async def test_callers_of_jobs_that_two_replicas_lost_are_told_to_retry() -> None:
    """Killed by somebody, so the jobs are to blame for neither; the third one has its own."""

    async with started(make_spec(replicas=3, delay_s=600.0)) as engine:
        call = asyncio.create_task(collect(engine, make_jobs(1)))
        for _ in range(2):
            await until(lambda: any(own.jobs for own in engine._queue.replicas))
            (number,) = [own.number for own in engine._queue.replicas if own.jobs]
            kill(engine, number)
            await until(lambda n=number: not engine._queue.replicas[n].jobs)
        with refused("engine_restarting", retryable=True):
            await asyncio.wait_for(call, 60)


@pytest.mark.full
async def test_a_generation_that_has_streamed_pieces_is_not_run_again() -> None:
    """One that has shown nothing yet is run again, and comes whole."""

    async with started(make_spec(delay_s=0.5)) as engine:
        tokens = np.arange(5, dtype=np.int32)
        job = GenerateJob(tokens, 4, stream=True, seed=1)
        shown, hidden = (asyncio.create_task(collect(engine, [job])) for _ in range(2))
        await until(lambda: sum(len(own.jobs) for own in engine._queue.replicas) == 2)
        first = min(n for own in engine._queue.replicas for n in own.jobs)
        piece = fake_generation(job)[0]
        for number, own in enumerate(engine.replicas):
            if first in engine._queue.replicas[number].jobs:
                engine._deliver(own, ResultPart([first], [piece], 0.0))
                kill(engine, number)
        with refused("engine_restarting"):
            await asyncio.wait_for(shown, 60)
        found = await asyncio.wait_for(hidden, 60)
        assert len(found[0]) == 4


@pytest.mark.full
async def test_where_no_replica_is_left_callers_are_told_to_retry() -> None:
    async with started(make_spec(delay_s=0.05)) as engine:
        reading = asyncio.create_task(collect(engine, make_jobs(2000)))
        await until(lambda: all(own.jobs for own in engine._queue.replicas))
        kill(engine, 0)
        kill(engine, 1)
        with refused("engine_restarting", retryable=True):
            await asyncio.wait_for(reading, 60)
        assert not engine.ready.is_set()
        await until(lambda: engine.state == "ready")


@pytest.mark.full
async def test_each_replica_runs_on_its_share_of_the_cores() -> None:
    async with started(make_spec()) as engine:
        own = [os.sched_getaffinity(replica.process._pid) for replica in engine.replicas]
        cores = os.sched_getaffinity(0)
        assert own[0] | own[1] <= cores
        assert len(own[0]) == len(own[1]) == max(1, len(cores) // 2)
        if len(cores) > 1:
            assert own[0].isdisjoint(own[1])


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_answers_while_a_replica_is_killed_or_stopped(
    tmp_path: Path, how: signal.Signals
) -> None:
    """2,000 items over two replicas, one of which ends in the middle: nobody sees an error."""
    model = fake_model("many", delay_s=0.02, ahead_tokens=200) | {"replicas": 2}
    items = [{"context_ids": [5, n % 200], "target_ids": [[6]]} for n in range(2000)]
    config = {"models": [model], "cache_bytes": 0, "heartbeat_timeout_s": 3.0}
    with running(config, tmp_path) as server:
        server.wait_until_ready()

        def both_answer() -> bool:
            return [own["state"] for own in read_card(server, "many")["replicas"]] == ["ready"] * 2

        wait_for(both_answer)
        with load(server, "many", callers=2, items=items) as found:
            wait_for_jobs(server, "many", 2)
            os.kill(find_engines(server)[0], how)
            wait_for(lambda: "1 of 2 replicas answer" in read_card(server, "many")["detail"])
            assert read_card(server, "many")["state"] == "ready", "the other one answers"
            wait_for(lambda: read_card(server, "many")["restarts"])
        assert (set(found.statuses), found.wrong) == ({200}, [])
        wait_for(both_answer)
        assert read_card(server, "many")["restarts"] == 1
        assert score(server, "many").status_code == 200
        ready = httpx.get(f"{server.url}/readyz", timeout=60).json()
        assert ready["ready"]

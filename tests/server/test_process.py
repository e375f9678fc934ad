"""The loop of an engine's process: what it hands to the engine, and what it reports."""

import os
import queue
import re
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from logsteer_server.contract.engine import EngineInfo, EngineLoad, EngineReading, EngineSpec
from logsteer_server.contract.jobs import Job, JobFailure, JobResult, Output
from logsteer_server.engines import lifetime
from logsteer_server.engines.failures import describe_error, lacks_memory
from logsteer_server.engines.lifetime import LATELY_S, MemoryKills, find_kill_count
from logsteer_server.runtime.engine_process import Ended, EngineProcess
from logsteer_server.runtime.process import (
    Add,
    Cancel,
    Cancelled,
    Close,
    EngineLoop,
    Finished,
    FromEngine,
    Heartbeat,
    JobGroup,
    Ready,
)
from tests.conftest import DEMO_MODEL, VOCAB_SIZE

JOB = Job(np.zeros(1, np.int32))
FAILURE = JobFailure("invalid_request", "this one cannot run")


def add(*ids: int) -> Add:
    """The message that brings jobs of one call."""
    return Add([JobGroup(ids, [JOB] * len(ids))], ids)


class RefusingEngine:
    """Knows at once that every job fails, and says so in its next step, cancelled or not."""

    def __init__(self) -> None:
        self.failed: list[tuple[int, JobResult]] = []
        self.cancelled: list[int] = []
        self.load: EngineLoad | None = None

    @property
    def info(self) -> EngineInfo:
        raise AssertionError("nobody asks")

    @property
    def busy(self) -> bool:
        return bool(self.failed)

    def add(self, jobs: Sequence[tuple[int, Job]]) -> None:
        self.failed += [(job_id, FAILURE) for job_id, _ in jobs]

    def cancel(self, job_ids: Sequence[int]) -> None:
        self.cancelled += job_ids

    def step(self) -> list[tuple[int, JobResult]]:
        failed, self.failed = self.failed, []
        return failed

    def take_load(self) -> EngineLoad | None:
        load, self.load = self.load, None
        return load

    def read(self) -> EngineReading:
        return EngineReading(waiting=len(self.failed))

    def close(self) -> None:
        raise AssertionError("the loop does not close the engine")


class Piece(Output):
    """An output that another follows."""

    @property
    def is_last(self) -> bool:
        return False


@pytest.fixture
def ends() -> tuple[Connection, Connection]:
    here, there = Pipe()
    return here, there


def serve(engine: RefusingEngine, ends: tuple[Connection, Connection], *messages: object) -> list:
    """What the loop answers to messages that all lie there before it begins."""
    here, there = ends
    for message in messages:
        here.send(message)
    EngineLoop(there, engine).run(max_idle_s=1.0)
    there.close()
    answers = []
    while here.poll():
        try:
            answers.append(here.recv())
        except EOFError:
            break
    return answers


def test_cancelling_a_job_that_has_failed_leaves_the_engine_running(
    ends: tuple[Connection, Connection],
) -> None:
    engine = RefusingEngine()
    loop = EngineLoop(ends[1], engine)
    for message in (add(7, 8), Cancel([7])):
        loop._handle(message)
    loop._report(engine.step())
    assert engine.cancelled == [7]
    assert ends[0].recv() == Cancelled([7])
    finished = ends[0].recv()
    assert [(part.numbers, part.results) for part in finished.parts] == [([8], [FAILURE])]
    loop._handle(add(9))
    loop._handle(Cancel([9]))
    assert ends[0].recv() == Cancelled([9])
    loop._report(engine.step())
    assert not ends[0].poll(), "a report without results was sent"


def test_messages_are_taken_before_the_engine_steps(ends: tuple[Connection, Connection]) -> None:
    answers = serve(RefusingEngine(), ends, add(1), Cancel([5]), Close())
    assert [type(answer) for answer in answers] == [Cancelled, Finished]


def test_what_generation_holds_is_told_in_front_of_the_results_of_its_step(
    ends: tuple[Connection, Connection],
) -> None:
    engine = RefusingEngine()
    engine.load = EngineLoad([1], 17)
    answers = serve(engine, ends, add(1), Cancel([5]), Close())
    assert answers[1] == EngineLoad([1], 17)
    assert [type(answer) for answer in answers] == [Cancelled, EngineLoad, Finished]


def test_a_job_is_reported_until_its_last_result(ends: tuple[Connection, Connection]) -> None:
    loop = EngineLoop(ends[1], RefusingEngine())
    loop._handle(add(1))
    sent: list[Finished] = []
    for result in (Piece(), Output(), Output()):
        loop._report([(1, result)])
        if ends[0].poll():
            sent.append(ends[0].recv())
    assert [message.parts[0].results[0].is_last for message in sent] == [False, True]


class SlowEngine(RefusingEngine):
    """Takes its time for a step, and notes when it begins one."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping = threading.Event()
        self.go_on = threading.Event()

    def step(self) -> list[tuple[int, JobResult]]:
        self.stepping.set()
        assert self.go_on.wait(60)
        return super().step()


def test_heartbeats_say_how_far_the_loop_is_and_come_from_within_a_step(
    ends: tuple[Connection, Connection],
) -> None:
    here, there = ends
    engine = SlowEngine()
    loop = EngineLoop(there, engine)
    threads = [
        threading.Thread(target=loop.run, args=(0.01,)),
        threading.Thread(target=loop.send_heartbeats, args=(0.01,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    idle = [read_beat(here)]
    deadline = time.monotonic() + 60
    while idle[-1].turns == idle[0].turns:
        assert time.monotonic() < deadline, "the loop turns without work, too"
        idle.append(read_beat(here))
    assert idle[-1].turns > idle[0].turns
    assert not any(heartbeat.in_engine for heartbeat in idle)
    here.send(add(1))
    assert engine.stepping.wait(60)
    while not read_beat(here).in_engine:
        pass
    first = read_beat(here)  # the one before may have been made just as the step began
    later = [read_beat(here) for _ in range(5)]
    assert {(heartbeat.turns, heartbeat.in_engine) for heartbeat in later} == {(first.turns, True)}
    assert [heartbeat.serial - first.serial for heartbeat in later] == [1, 2, 3, 4, 5]
    engine.go_on.set()
    here.send(Close())
    threads[0].join(60)
    assert not threads[0].is_alive()
    here.close()
    threads[1].join(60)
    assert not threads[1].is_alive(), "heartbeats end with the other end"


def read_beat(connection: Connection) -> Heartbeat:
    """The next heartbeat, past other messages."""
    while not isinstance(message := connection.recv(), Heartbeat):
        pass
    return message


class OutOfMemoryError(RuntimeError):
    """As torch's class is called."""


def caused(error: Exception) -> Exception:
    """An error that came from another one."""
    found = RuntimeError("the model did not load")
    found.__cause__ = error
    return found


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("CUDA"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"), True),
        (ValueError("Free memory on device cuda:0 (1/80 GiB) on startup is less than 72"), True),
        (ValueError("Available memory on node 0 (1/8 GiB) on kv cache allocation is less"), True),
        (caused(MemoryError()), True),
        (ValueError("max_model_len: 64 needs more key-value cache than the 2 MiB given"), False),
        (caused(ValueError("no such directory")), False),
    ],
    ids=repr,
)
def test_an_error_that_tells_of_too_little_memory(error: Exception, lacks: bool) -> None:
    assert lacks_memory(error) == lacks


def test_a_file_that_went_with_its_request_is_no_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert "cancelled" in describe_error(FileNotFoundError(2, "no such file", "rows")).detail
    assert caplog.records == []
    describe_error(ValueError("else"))
    assert len(caplog.records) == 1


SPEC = EngineSpec(
    "fake", "fake", str(DEMO_MODEL), engine_args={"vocab_size": VOCAB_SIZE, "context_length": 64}
)
START_S = 60.0


@pytest.fixture
def vmstat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel counts, on a machine without control groups that killed three for memory."""
    monkeypatch.setattr(lifetime, "ROOT", tmp_path)
    return put(tmp_path, "proc/vmstat", "nr_free_pages 5\noom_kill 3\n")


def put(root: Path, name: str, text: str) -> Path:
    """A file of the kernel's below another root."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_an_engine_has_none_of_the_servers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are among them; what libraries read stays."""
    monkeypatch.setenv("LOGSTEER_API_KEY", "secret")
    monkeypatch.setenv("OF_LIBRARIES", "kept")
    messages: queue.SimpleQueue[FromEngine | Ended] = queue.SimpleQueue()
    process = EngineProcess(SPEC, 0.1, lambda _, message: messages.put(message))
    try:
        while not isinstance(messages.get(timeout=START_S), Ready):
            pass
        environ = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"LOGSTEER_" not in environ
        assert b"OF_LIBRARIES=kept" in environ
        assert os.environ["LOGSTEER_API_KEY"] == "secret"
    finally:
        process.kill()


def kill(vmstat: Path, counts: int | None, number: signal.Signals | None) -> Ended:
    """How the end of an engine is told that a signal ended, when the kernel counted so many.

    Without a signal of somebody else's it is the server that kills.
    """
    messages: queue.SimpleQueue[FromEngine | Ended] = queue.SimpleQueue()
    process = EngineProcess(SPEC, 0.1, lambda _, message: messages.put(message))
    try:
        while not isinstance(messages.get(timeout=START_S), Ready):
            pass
        if counts is None:
            vmstat.unlink()
        else:
            vmstat.write_text(f"oom_kill {counts}\n")
        if number is None:
            process.kill()
        else:
            os.kill(process.pid, number)
        while not isinstance(found := messages.get(timeout=START_S), Ended):
            pass
        return found
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("counts", "number", "told", "from_outside"),
    [
        (4, signal.SIGKILL, "SIGKILL, by the kernel.*ran out of memory.*fewer models.*", False),
        (3, signal.SIGKILL, "SIGKILL, not by this server, nor by the kernel.*", True),
        (3, None, "SIGKILL", False),
        (None, signal.SIGKILL, "SIGKILL", False),
        (4, signal.SIGABRT, "SIGABRT", False),
    ],
    ids=["the kernel, for memory", "somebody", "this server", "nobody counts", "another signal"],
)
def test_the_end_of_an_engine_says_who_killed_it_where_that_is_known(
    vmstat: Path, counts: int | None, number: signal.Signals | None, told: str, from_outside: bool
) -> None:
    found = kill(vmstat, counts, number)
    assert re.fullmatch(f"its process was ended by {told}", found.detail)
    assert found.from_outside == from_outside


def test_kills_of_long_ago_are_no_reason(vmstat: Path) -> None:
    now = 0.0
    kills = MemoryKills(lambda: now, vmstat.parents[1])
    vmstat.write_text("oom_kill 4\n")
    assert kills.have_risen, "as the process was at work"
    for _ in range(2):
        # What was told before the process died may be read later, all at once.
        kills.look()
        kills.look()
        assert kills.have_risen
        now += LATELY_S
    kills.look()
    assert kills.have_risen is False


V2 = "low 0\nhigh 0\nmax 9\noom 7\noom_kill 3\noom_group_kill 0\n"
OWN = "system.slice/docker-1a.scope"
HOST = "proc/vmstat"


@pytest.mark.parametrize(
    ("groups", "files", "counts"),
    [
        (f"0::/{OWN}\n", {f"{OWN}/memory.events": V2, "memory.events": V2}, f"{OWN}/memory.events"),
        ("0::/\n", {"memory.events": V2}, "memory.events"),  # a container's own view
        (f"0::/{OWN}\n", {"memory.events": V2}, "memory.events"),  # it sees the host's path
        (f"0::/{OWN}/a\n", {f"{OWN}/memory.events": V2}, f"{OWN}/memory.events"),
        ("0::/../b\n", {"memory.events": V2}, None),  # another's
        ("0::/\n", {}, None),
        ("", {"memory.events": V2}, None),
    ],
)
def test_kills_are_counted_in_the_nearest_control_group(
    tmp_path: Path, groups: str, files: dict[str, str], counts: str | None
) -> None:
    top = "sys/fs/cgroup"
    put(tmp_path, "proc/self/cgroup", groups)
    put(tmp_path, HOST, "nr_free_pages 5\noom_kill 3\n")
    for name, text in files.items():
        put(tmp_path, f"{top}/{name}", text)
    own = HOST if counts is None else f"{top}/{counts}"
    assert find_kill_count(tmp_path) == tmp_path / own
    kills = MemoryKills(root=tmp_path)
    for name in (*(f"{top}/{name}" for name in files), HOST):
        if name != own:
            put(tmp_path, name, "oom_kill 9\n")
    assert kills.have_risen is False, "another group's are none of ours"
    put(tmp_path, own, "oom_kill 4\n")
    assert kills.have_risen

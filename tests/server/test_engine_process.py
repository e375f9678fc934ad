"""How the end of an engine's process is told: who has killed it, as far as that can be known."""

import os
import queue
import signal
from pathlib import Path

import pytest

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.engines import lifetime
from logsteer_server.engines.lifetime import LATELY_S, MemoryKills, find_kill_count
from logsteer_server.runtime.engine_process import Ended, EngineProcess
from logsteer_server.runtime.process import FromEngine, Ready
from tests.conftest import DEMO_MODEL, VOCAB_SIZE

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


def kill(vmstat: Path, counts: int | None, number: signal.Signals = signal.SIGKILL) -> Ended:
    """How the end of an engine is told that a signal ended, when the kernel counted so many."""
    messages: queue.SimpleQueue[FromEngine | Ended] = queue.SimpleQueue()
    process = EngineProcess(SPEC, 0.1, lambda _, message: messages.put(message))
    try:
        while not isinstance(messages.get(timeout=START_S), Ready):
            pass
        if counts is None:
            vmstat.unlink()
        else:
            vmstat.write_text(f"oom_kill {counts}\n")
        assert process.pid is not None
        os.kill(process.pid, number)
        while not isinstance(found := messages.get(timeout=START_S), Ended):
            pass
        return found
    finally:
        process.kill()


def test_one_that_the_kernel_killed_for_memory_says_so_and_what_to_do(vmstat: Path) -> None:
    found = kill(vmstat, 4)
    assert not found.from_outside
    assert found.detail.startswith("its process was ended by SIGKILL, by the kernel")
    assert "ran out of memory" in found.detail
    assert "fewer models" in found.detail


def test_one_that_somebody_killed_says_that_nobody_here_has(vmstat: Path) -> None:
    found = kill(vmstat, 3)
    assert found.from_outside
    assert "not by this server, nor by the kernel" in found.detail


@pytest.mark.parametrize(("counts", "number"), [(None, signal.SIGKILL), (4, signal.SIGABRT)])
def test_where_nothing_is_known_nothing_is_said(
    vmstat: Path, counts: int | None, number: signal.Signals
) -> None:
    assert kill(vmstat, counts, number) == Ended(f"its process was ended by {number.name}")


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

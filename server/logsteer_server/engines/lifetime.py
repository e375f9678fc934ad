"""Lifetime of engine processes and their files: they end with the server, and not before it.

A terminal's Ctrl-C and a service manager's SIGTERM reach the whole process group. Engines ignore
both, because the server still needs them to finish its answers; the kernel kills them when the
server has ended, for whatever reason.

Temporary files are in directories that their process keeps locked: after a kill or a crash, the
next server removes the directories without a lock holder.
"""

import ctypes
import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

PR_SET_PDEATHSIG = 1
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
ROOT = Path("/")
LATELY_S = 10.0
"""Window of `MemoryKills`; longer than it takes to detect that an engine was killed."""


def follow_parent() -> None:
    """Ignore interrupts from now on, and die with the parent process.

    Do nothing in a process that multiprocessing did not start. The kernel kills the child when the
    thread that started it ends, so that thread must live as long as its process. Only Linux has
    this; elsewhere an engine ends at its next read from its parent.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # the parent ended before prctl
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Block interrupts for processes started in the block, until they call `follow_parent`."""
    resource_tracker.ensure_running()  # starting it later would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped a process; False if unknown."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "Tt"


class MemoryKills:
    """Detect whether the kernel's OOM killer has recently killed processes near this one.

    "Near" means in the same control group, or without one on the same machine. "Recently" means in
    the last one or two LATELY_S, if `look` is called regularly.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, root: Path | None = None
    ) -> None:
        self._clock = clock
        self._file = find_kill_count(root or ROOT)
        self._earlier = self._latest = self._count()
        self._looked_at = clock()

    def _count(self) -> int | None:
        try:
            lines = self._file.read_text().splitlines()
        except OSError:
            return None
        counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
        return counts[0] if counts else None

    def look(self) -> None:
        """Advance the window, so that older kills no longer count."""
        if (now := self._clock()) - self._looked_at >= LATELY_S:
            self._earlier, self._latest = self._latest, self._count()
            self._looked_at = now

    @property
    def have_risen(self) -> bool | None:
        """Whether there were recent kills; None if the machine does not report them."""
        count = self._count()
        if count is None or self._earlier is None:
            return None
        return count > self._earlier


def find_kill_count(root: Path) -> Path:
    """Return the file whose line `oom_kill` counts the OOM killer's kills near this process.

    It is `memory.events` of this process's control group (version 2), or of the nearest parent
    group that accounts for memory. A kill counts in the killed process's group, whichever group or
    machine ran out of memory. A container may see its own group as the root. Without groups it is
    `/proc/vmstat`, which counts for the whole machine.
    """
    lines = _read(root / "proc/self/cgroup").splitlines()
    group = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    parts = [part for part in (group or "").split("/") if part]
    # A group outside this process's view has no counts in it.
    for count in range(len(parts), -1, -1) if group and ".." not in parts else ():
        file = (root / "sys/fs/cgroup").joinpath(*parts[:count], "memory.events")
        if "\noom_kill " in f"\n{_read(file)}":
            return file
    return root / "proc/vmstat"


def _read(path: Path) -> str:
    """Return the content of a kernel file; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def measure_progress(sessions: Collection[int]) -> float | None:
    """Return the work done by the processes of these sessions, a number that only grows.

    It adds CPU time in hundredths of a second and MiB read and written. An engine leads a session,
    so its ranks and compilers are included. None without /proc.
    """
    if not (ROOT / "proc/self/stat").exists():
        return None
    total = 0.0
    for stat in (ROOT / "proc").glob("[0-9]*/stat"):
        fields = _read(stat).rpartition(")")[2].split()
        if len(fields) < 15 or int(fields[3]) not in sessions:
            continue
        total += 100 * sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        lines = (line.partition(": ") for line in _read(stat.with_name("io")).splitlines())
        counts = {name: int(count) for name, _, count in lines}
        names = ("rchar", "wchar", "read_bytes")
        total += sum(counts.get(name, 0) for name in names) / 2**20
    return total


PREFIX = "logsteer-run-"


class ScratchDirectory(AbstractContextManager[Path]):
    """Create a temporary directory; `close` removes it.

    Errors: OSError if it cannot be created.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the directory and its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep() -> list[Path]:
    """Remove this user's scratch directories that no process owns; return them."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is owned or no directory, or another server was faster
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    shutil.rmtree(path)
                    removed.append(path)
            finally:
                os.close(lock)
    return removed

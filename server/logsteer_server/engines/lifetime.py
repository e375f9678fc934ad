"""How long an engine's processes live: as long as the one that started them, and no shorter.

A terminal's Ctrl-C and a service manager's SIGTERM reach a whole group of processes. Engines ignore
both, because the server still needs them for what it is answering; the kernel kills them when it is
gone, however that came about and whatever they are doing.

Files that nobody needs once a process is gone stand in directories that it holds locked for so
long: after a kill or a crash the next server knows what nobody owns any more, and removes it.
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
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

PR_SET_PDEATHSIG = 1
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
ROOT = Path("/")
LATELY_S = 10.0
"""Longer than the detection of a killed engine takes."""


def follow_parent() -> None:
    """Ignore interrupts from now on, and die with the process that started this one.

    Does nothing in a process that no other of ours has started. The kernel tells a child when the
    thread that started it ends, so that must be one that lives as long as its process. Only Linux
    does; elsewhere an engine ends when it next reads from its parent.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it was gone before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Keep interrupts from a process that is started in the block, until it follows its parent."""
    resource_tracker.ensure_running()  # its own start would let them through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal, as SIGSTOP does; False where unknown."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "Tt"


class MemoryKills:
    """Tells whether the kernel has lately killed processes near this one for want of memory.

    Near are those of the same control group, or where there is none, of the same machine. Lately is
    within the last one or two LATELY_S, as long as `look` is called now and then.
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
        """Forget what happened earlier."""
        if (now := self._clock()) - self._looked_at >= LATELY_S:
            self._earlier, self._latest = self._latest, self._count()
            self._looked_at = now

    @property
    def have_risen(self) -> bool | None:
        """Whether there were any; None where the machine does not say."""
        count = self._count()
        if count is None or self._earlier is None:
            return None
        return count > self._earlier


def find_kill_count(root: Path) -> Path:
    """Return the file whose line `oom_kill` counts processes killed for memory near this one.

    That is `memory.events` of the control group (version 2) of this process, or of the nearest one
    above it that accounts for memory. A killed process counts in its group, whichever group or
    machine lacked the memory. A container may see its own group as the topmost one. Without groups
    it is `/proc/vmstat`, which counts for the whole machine.
    """
    lines = _read(root / "proc/self/cgroup").splitlines()
    group = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    parts = [part for part in (group or "").split("/") if part]
    # Where it is outside of what this process sees, so are its counts.
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
    """Return how far the processes of these sessions have come: a number that grows as they work.

    It counts hundredths of a second on a CPU, and MiB read and written. An engine leads a session,
    so its ranks and compilers count. None where the system does not tell.
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
LOCK = ".lock"
NEW_S = 60.0
"""A directory without a lock is left alone for so long: its owner may be about to lock it."""


class ScratchDirectory(AbstractContextManager[Path]):
    """A directory of its own below `parent` (None: the system's), until it is closed.

    Errors: OSError where it cannot be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        new = self.path / f"{LOCK}.new"
        self._lock = new.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / LOCK)  # so nobody finds one that is not locked yet

    def close(self) -> None:
        """Remove the directory and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep(parent: Path | None = None) -> list[Path]:
    """Remove this user's directories below `parent` that no process owns; return what they were."""
    removed = []
    for path in Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            facts = path.lstat()
            if facts.st_uid != os.geteuid() or path.is_symlink() or not path.is_dir():
                continue
            if not (path / LOCK).exists() and time.time() - facts.st_mtime < NEW_S:
                continue
            if _is_owned(path / LOCK):
                continue
            shutil.rmtree(path)
        except OSError:
            continue  # another server is faster, or it is not to be removed
        removed.append(path)
    return removed


def _is_owned(lock: Path) -> bool:
    if not lock.exists():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False

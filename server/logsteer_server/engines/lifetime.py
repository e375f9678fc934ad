"""How long an engine's processes live: as long as the one that started them, and no shorter.

A terminal's Ctrl-C and a service manager's SIGTERM reach a whole group of processes. Engines ignore
both, because the server still needs them for what it is answering; the kernel kills them when it is
gone, however that came about and whatever they are doing.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

PR_SET_PDEATHSIG = 1
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


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


def count_memory_kills() -> int | None:
    """Return how many processes this machine has killed for memory; None where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    return counts[0] if counts else None

"""Servers forked from a process that has imported the server already: 2 s of CPU less for each.

A test process has one template, which starts with the first server and ends with the test process:

    test process                     template                           server
      ask(order) ── JSON line ──►    fork ──────────────────────────►   runs `logsteer_server`
      read the pid ◄── a line ──     reaps it, writes EXIT when it ends

The template runs one thread and no event loop, so that a fork of it is as good as a new process.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

POLL_S = 0.02
UNKNOWN = 255
"""Status of a process whose template was gone before it."""


class ForkedProcess:
    """A process that a template has forked, with the part of Popen's interface that tests use.

    `exit_file` has its status once it has ended.
    """

    def __init__(self, pid: int, exit_file: Path) -> None:
        self.pid = pid
        self._exit_file = exit_file
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the status: the number of the signal that ended it as a negative one; or None."""
        if self.returncode is None:
            is_there = Path(f"/proc/{self.pid}").exists()
            with contextlib.suppress(FileNotFoundError):
                self.returncode = int(self._exit_file.read_text())
            if self.returncode is None and not is_there:
                self.returncode = UNKNOWN
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the status once there is one. Errors: subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the process to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


class Template:
    """The template of this process; `fork` starts it where there is none."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def fork(
        self, arguments: list[str], directory: Path, log: Path, environment: dict[str, str]
    ) -> ForkedProcess:
        """Run `python -m logsteer_server` with these arguments in a session of its own."""
        exit_file = log.with_name(f"{log.name}.exit")
        exit_file.unlink(missing_ok=True)
        log.write_bytes(b"")
        order = {
            "arguments": arguments, "directory": str(directory), "log": str(log),
            "environment": environment, "exit": str(exit_file),
        }  # fmt: skip
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.template"],
                    cwd=Path(__file__).resolve().parents[1],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return ForkedProcess(int(self._process.stdout.readline()), exit_file)

    def close(self) -> None:
        """End the template; what it has forked runs on."""
        if self._process is not None:
            self._process.communicate()  # closes its input, which is its end
            self._process = None


TEMPLATE = Template()


def serve(orders: IO[str]) -> None:
    """Fork a server for each order, and reap those that end, until the orders end."""
    exits: dict[int, Path] = {}
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    buffered = b""
    while True:
        ready, _, _ = select.select([orders.fileno(), wake], [], [])
        if wake in ready:
            os.read(wake, 1024)
            reap(exits)
        if orders.fileno() in ready:
            read = os.read(orders.fileno(), 65_536)
            if not read:
                return
            buffered += read
            while b"\n" in buffered:
                line, _, buffered = buffered.partition(b"\n")
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    run(order, [wake, waker])
                exits[pid] = Path(order["exit"])
                print(pid, flush=True)


def reap(exits: dict[int, Path]) -> None:
    """Write the status of each child that has ended into its file."""
    for pid in list(exits):
        look = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if look is None:
            continue
        status = look.si_status if look.si_code == os.CLD_EXITED else -look.si_status
        path = exits.pop(pid)
        new = path.with_suffix(".new")
        with contextlib.suppress(FileNotFoundError):  # the test has removed its directory
            new.write_text(str(status))
            new.rename(path)
        os.waitpid(pid, 0)  # only now does it vanish: who looks for it finds the file


def run(order: dict[str, Any], pipes: list[int]) -> None:
    """Be the server: the same module, arguments, directory and environment; then exit."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with Path(os.devnull).open() as nothing, Path(order["log"]).open("wb") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for pipe in pipes:
        os.close(pipe)
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["logsteer-server", *order["arguments"]]
    status = 1
    try:
        runpy.run_module("logsteer_server", run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Import what a server imports, then serve orders from standard input."""
    from logsteer_server import serving  # noqa: F401
    from logsteer_server.imports import import_tokenizers

    import_tokenizers()
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, threading.enumerate()
    serve(sys.stdin)


if __name__ == "__main__":
    main()

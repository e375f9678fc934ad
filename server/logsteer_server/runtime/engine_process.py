"""One engine's process, as the HTTP process sees it: start, messages both ways, its end."""

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.engines.lifetime import MemoryKills, hold_interrupts, is_stopped, sweep
from logsteer_server.observation.logs import LogStyle
from logsteer_server.runtime.process import Close, FromEngine, Heartbeat, ToEngine, run_engine

CLOSE_TIMEOUT_S = 20.0
END_TIMEOUT_S = 5.0
"""How long a process may take to exit after it closed its connection or was killed."""
OUT_OF_MEMORY = (
    "by the kernel, because the machine or its container ran out of memory; run fewer models or "
    "replicas there, lower their `memory`, or give it more"
)
FROM_OUTSIDE = (
    "not by this server, nor by the kernel for want of memory: somebody killed it, or a program "
    "that watches the machine"
)


PREFIX = "LOGSTEER_"
"""Prefix of environment variables that are server settings, keys included; engines read none."""
ENVIRONMENT = threading.Lock()
"""Held while settings are hidden from this process's environment, or read from it."""


@contextmanager
def hide_settings() -> Iterator[None]:
    """Hide the server's settings, and so its keys, from processes started in the block."""
    with ENVIRONMENT:
        hidden = {name: text for name, text in os.environ.items() if name.startswith(PREFIX)}
        for name in hidden:
            del os.environ[name]
        try:
            yield
        finally:
            os.environ.update(hidden)


@dataclass(frozen=True, slots=True)
class Ended:
    """The process has exited. `from_outside`: another program killed it, not the kernel."""

    detail: str
    from_outside: bool = False


class EngineProcess:
    """Run one engine process, with the threads that send to it and receive from it.

    Both directions have a thread of their own, because a pipe blocks when its reader is busy, and
    the event loop must not. The receiving thread calls `receive` with the process and each message;
    the last message is `Ended`, after the process has exited. `heartbeat` is the latest heartbeat,
    `heartbeat_at` its arrival (monotonic seconds). The process logs in `style`.

    Create it in a thread that lives as long as the server, because the process dies with it.
    Errors: OSError or RuntimeError where the machine lacks descriptors, processes or threads.
    """

    def __init__(
        self,
        spec: EngineSpec,
        heartbeat_every_s: float,
        receive: Callable[["EngineProcess", FromEngine | Ended], None],
        style: LogStyle | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.heartbeat: Heartbeat | None = None
        self.heartbeat_at = 0.0
        self._receive = receive
        self._pid: int | None = None
        self._killing = threading.Lock()
        self._was_killed = False
        self._memory_kills = MemoryKills()
        self._outbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._connection, remote = context.Pipe()
        self._process = context.Process(
            target=run_engine,
            args=(remote, spec, heartbeat_every_s, style or LogStyle()),
            name=f"engine-{spec.id}",
        )
        self._sender, self._receiver = (
            threading.Thread(target=work, name=f"{spec.id}-{work.__name__}", daemon=True)
            for work in (self._send_all, self._receive_all)
        )
        try:
            with remote, hold_interrupts(), hide_settings():
                self._process.start()
            self._pid = self._process.pid
            self._sender.start()
            self._receiver.start()
        except Exception:
            self._discard()
            raise

    def _discard(self) -> None:
        self._outbox.put(None)
        self._connection.close()
        if self._pid is not None:
            self.kill()
            self._process.join(END_TIMEOUT_S)

    def send(self, message: ToEngine) -> None:
        """Queue a message for the engine."""
        self._outbox.put(message)

    def _send_all(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return  # the process is gone; _receive_all reports it

    def _receive_all(self) -> None:
        while True:
            try:
                message: FromEngine = self._connection.recv()
            except (EOFError, OSError):
                break
            if isinstance(message, Heartbeat):
                self.heartbeat, self.heartbeat_at = message, time.monotonic()
                self._memory_kills.look()
            else:
                self._receive(self, message)
        self._receive(self, self._end())

    def _end(self) -> Ended:
        """Wait until the process has exited, kill the rest of its group, and free its resources.

        These include its files: a killed process removes none of them.
        """
        self._outbox.put(None)
        self._process.join(END_TIMEOUT_S)
        status = self._process.exitcode
        self._kill_group()
        self._process.join(END_TIMEOUT_S)
        self._sender.join(END_TIMEOUT_S)
        self._connection.close()
        with self._killing, suppress(ValueError):  # it cannot be killed, and is left to the kernel
            self._process.close()
            self._pid = None  # another process may have it from now on
        sweep()
        return self._describe_end(status)

    def _describe_end(self, status: int | None) -> Ended:
        if status is None or status >= 0:
            return Ended(f"its process ended with status {status}")
        detail = f"its process was ended by {signal.Signals(-status).name}"
        if status != -signal.SIGKILL or self._was_killed:
            return Ended(detail)
        match self._memory_kills.have_risen:
            case None:
                return Ended(detail)
            case True:
                return Ended(f"{detail}, {OUT_OF_MEMORY}")
            case False:
                return Ended(f"{detail}, {FROM_OUTSIDE}", from_outside=True)

    @property
    def pid(self) -> int | None:
        """The id of the process while it runs."""
        return self._pid

    @property
    def is_stopped(self) -> bool:
        """Whether a signal from outside has stopped the process."""
        return self._pid is not None and is_stopped(self._pid)

    def kill(self) -> None:
        """Kill the process and its children; return at once."""
        self._was_killed = True
        self._kill_group()

    def _kill_group(self) -> None:
        with self._killing:
            if self._pid is None:
                return
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            self._process.kill()  # before it leads a group

    def close(self) -> None:
        """Ask the process to exit, then kill it. Blocks for CLOSE_TIMEOUT_S or somewhat longer."""
        self.send(Close())
        self._receiver.join(CLOSE_TIMEOUT_S)
        if self._receiver.is_alive():
            self.kill()
            self._receiver.join(2 * END_TIMEOUT_S)

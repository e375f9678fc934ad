"""The engine's side of the process boundary: a loop that takes messages, steps, and reports."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import NamedTuple

from logsteer_server.contract.batches import ResultPart, find_first_failure, pack_results
from logsteer_server.contract.engine import (
    Engine,
    EngineInfo,
    EngineLoad,
    EngineReading,
    EngineSpec,
    StepCounts,
)
from logsteer_server.contract.jobs import Job, JobResult
from logsteer_server.engines.failures import lacks_memory
from logsteer_server.engines.lifetime import follow_parent
from logsteer_server.engines.machine import let_threads_sleep, take_share
from logsteer_server.engines.rounding import measure_rounding
from logsteer_server.imports import hold_collector, leave_out_unused
from logsteer_server.observation.logs import (
    CURRENT_REQUEST,
    LogStyle,
    configure_engine_logs,
    restyle_libraries,
)

log = logging.getLogger(__name__)

ENGINES = {
    "vllm": "logsteer_server.engines.vllm.engine:VllmEngine",
    "transformer_lens": "logsteer_server.engines.tlens.engine:TransformerLensEngine",
    "fake": "logsteer_server.engines.fake:FakeEngine",
}
"""Engine classes by name, imported only in the process that runs one."""
READ_EVERY_S = 1.0
SHOWN_REQUESTS = 8
"""Ids that one line of the log lists."""
ON_TRANSFORMERS = {"vllm", "transformer_lens"}
"""Engines that import transformers."""


class JobGroup(NamedTuple):
    """Jobs of one call, and the ids under which their results come back.

    `request_id` is the request's that made the call, for the log; empty where there is none.
    """

    ids: Sequence[int]
    jobs: Sequence[Job]
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Add:
    """Jobs for the engine, which takes them in this `order` of their ids."""

    groups: Sequence[JobGroup]
    order: Sequence[int]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Jobs whose results nobody waits for any more."""

    job_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Close:
    """The order to free the model and end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Finished:
    """Results of one step, in parts of one call's each; the numbers of jobs are their ids."""

    parts: Sequence[ResultPart]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The engine no longer has these jobs, which were cancelled."""

    job_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life: its number, how far the loop has got, whether a call of the engine runs.

    It brings along what the engine was at when it was last asked, and how long its steps took.
    """

    serial: int
    turns: int
    in_engine: bool
    reading: EngineReading | None = None
    steps: StepCounts | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not start, or broke; its process ends after this message."""

    detail: str
    out_of_memory: bool = False
    can_restart: bool = True


ToEngine = Add | Cancel | Close
FromEngine = Ready | Finished | EngineLoad | Cancelled | Heartbeat | Failed


def build_engine(spec: EngineSpec) -> Engine:
    """Build the engine that the specification names, with its model loaded."""
    module, _, name = ENGINES[spec.engine].partition(":")
    with hold_collector():
        if spec.engine in ON_TRANSFORMERS:
            leave_out_unused()
        kind = getattr(import_module(module), name)
    engine: Engine = kind(spec)
    return engine


def run_engine(
    connection: Connection, spec: EngineSpec, heartbeat_every_s: float, style: LogStyle
) -> None:
    """Serve one engine until it is told to close, breaks, or its parent is gone; then exit.

    It leads a session of its own, so that all of its processes can be killed together. The process
    exits as a forked one does: finalizers run and children end, and the interpreter is not taken
    down. That would free vLLM's modules and its model object by object, for 4 s.
    """
    os.setsid()
    follow_parent()
    let_threads_sleep()
    configure_engine_logs(style)
    _serve(connection, spec, heartbeat_every_s, style)
    util._exit_function()  # type: ignore[attr-defined]  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(
    connection: Connection, spec: EngineSpec, heartbeat_every_s: float, style: LogStyle
) -> None:
    try:
        take_share(spec)
        engine = build_engine(spec)
        info = replace(engine.info, rounding=measure_rounding(engine, spec))
        restyle_libraries(style)
    except Exception as error:
        log.exception("engine %s did not start", spec.id)
        lacking = lacks_memory(error)  # which another process may give back
        connection.send(Failed(f"{type(error).__name__}: {error}", lacking, can_restart=lacking))
        return
    loop = EngineLoop(connection, engine, heartbeat_every_s)
    try:
        loop.send(Ready(info))
        threading.Thread(
            target=loop.send_heartbeats, args=(heartbeat_every_s,), name="heartbeats", daemon=True
        ).start()
        loop.run(heartbeat_every_s)
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone, and with it everyone who waits for results
    except Exception as error:
        log.exception("engine %s failed while it ran requests %s", spec.id, loop.list_requests())
        loop.send(Failed(f"{type(error).__name__}: {error}", lacks_memory(error)))
    finally:
        engine.close()


@dataclass(frozen=True, slots=True, eq=False)
class _TakenGroup:
    """Jobs that came together; `at`: when, by `time.monotonic`; `request_id`: for whom."""

    request_id: str = ""
    at: float = field(default_factory=time.monotonic)


class EngineLoop:
    """Take messages whenever there are any, and step the engine as long as it has work.

    Every `read_every_s` seconds it asks the engine what it is at, for the heartbeats to tell.
    """

    def __init__(
        self, connection: Connection, engine: Engine, read_every_s: float = READ_EVERY_S
    ) -> None:
        self._connection = connection
        self._read_every_s = read_every_s
        self._read_at = 0.0
        self._reading: EngineReading | None = None
        self._steps = StepCounts()
        self._engine = engine
        self._groups: dict[int, _TakenGroup] = {}
        self._open = True
        self._sending = threading.Lock()
        self._turns = 0
        self._in_engine = False

    def send(self, message: FromEngine) -> None:
        """Send a message, from any thread. Errors: OSError when the other end is gone."""
        with self._sending:
            self._connection.send(message)

    def send_heartbeats(self, every_s: float) -> None:
        """Send signs of life until the other end is gone; to be run in a thread of its own."""
        serial = 0
        with suppress(OSError):
            while True:
                serial += 1
                self.send(
                    Heartbeat(serial, self._turns, self._in_engine, self._reading, self._steps)
                )
                time.sleep(every_s)

    def run(self, max_idle_s: float) -> None:
        """Loop until a Close message, and turn that often without work.

        Errors: EOFError when the other end is gone.
        """
        while self._open:
            self._turns += 1
            while self._open and self._connection.poll(0 if self._engine.busy else max_idle_s):
                self._handle(self._connection.recv())
            if self._engine.busy:
                if self._reading is None or self._reading.is_idle:
                    self._read(0.0)  # so that a step that never ends is one with work
                began = time.monotonic()
                with self._call():
                    stepped = self._engine.step()
                self._steps.record(time.monotonic() - began)
                if (load := self._engine.take_load()) is not None:
                    self.send(load)
                self._report(stepped)
            self._read(self._read_every_s)

    def _read(self, every_s: float) -> None:
        """Ask the engine what it is at, where that was so long ago."""
        now = time.monotonic()
        if now - self._read_at >= every_s:
            self._read_at, self._reading = now, self._engine.read()

    def list_requests(self) -> str:
        """Return the ids of the requests whose jobs the engine has, some of them, for the log."""
        ids = {group.request_id: None for group in self._groups.values() if group.request_id}
        shown = list(ids)[:SHOWN_REQUESTS]
        rest = f" and {len(ids) - len(shown)} more" if len(ids) > len(shown) else ""
        return (", ".join(shown) or "unknown") + rest

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Let heartbeats say for as long as the block runs that the engine has been called."""
        self._turns, self._in_engine = self._turns + 1, True
        yield
        self._turns, self._in_engine = self._turns + 1, False

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Add(groups, order):
                added: dict[int, Job] = {}
                for ids, jobs, request_id in groups:
                    added.update(zip(ids, jobs, strict=True))
                    self._groups |= dict.fromkeys(ids, _TakenGroup(request_id))
                with self._call():
                    self._engine.add([(job_id, added[job_id]) for job_id in order])
            case Cancel(job_ids):
                with self._call():
                    self._engine.cancel(job_ids)
                for job_id in job_ids:
                    self._groups.pop(job_id, None)
                self.send(Cancelled(job_ids))
            case Close():
                self._open = False

    def _report(self, stepped: Sequence[tuple[int, JobResult]]) -> None:
        """Send the results of a step, without those of jobs that were cancelled."""
        found: dict[_TakenGroup, tuple[list[int], list[JobResult]]] = {}
        for job_id, result in stepped:
            group = self._groups.get(job_id)
            if group is None:
                continue
            ids, results = found.setdefault(group, ([], []))
            ids.append(job_id)
            results.append(result)
            if result.is_last:
                del self._groups[job_id]
        for group, (_, results) in found.items():
            if (failure := find_first_failure(results)) is not None:
                CURRENT_REQUEST.set(group.request_id)
                log.warning("request %s failed in the engine: %s", group.request_id, failure.code)
                CURRENT_REQUEST.set("")
        if found:
            parts = [
                ResultPart(ids, pack_results(results), group.at)
                for group, (ids, results) in found.items()
            ]
            self.send(Finished(parts))

"""The engine's side of the process boundary: a loop that reads messages, steps, and reports."""

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
"""Request ids listed in one log line, at most."""
ON_TRANSFORMERS = {"vllm", "transformer_lens"}
"""Engines that import transformers."""


class JobGroup(NamedTuple):
    """Jobs of one call, and the ids of their results.

    `request_id`: the request that made the call, for the log; empty without one.
    """

    ids: Sequence[int]
    jobs: Sequence[Job]
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Add:
    """Jobs for the engine, to be added in this `order` of ids."""

    groups: Sequence[JobGroup]
    order: Sequence[int]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Jobs to cancel."""

    job_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Close:
    """Free the model and exit."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Finished:
    """Results of one step, grouped by call; jobs are numbered by id."""

    parts: Sequence[ResultPart]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """These jobs were cancelled."""

    job_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat: its number, the loop's turns so far, and whether the engine is in a call.

    It carries the engine's latest reading and the durations of its steps.
    """

    serial: int
    turns: int
    in_engine: bool
    reading: EngineReading | None = None
    steps: StepCounts | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine failed to start or broke; its process exits after this message."""

    detail: str
    out_of_memory: bool
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
    """Serve one engine until it closes, breaks, or loses its parent; then exit.

    The process leads a session, so that it and its children can be killed together. It exits as a
    forked process does: finalizers run and children end, but the interpreter is not torn down,
    which would free vLLM's modules and its model object by object, for 4 s.
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
    """Jobs that arrived together, `at` a time of `time.monotonic`, for the request `request_id`."""

    request_id: str = ""
    at: float = field(default_factory=time.monotonic)


class EngineLoop:
    """Process messages as they arrive, and step the engine while it has work.

    Every `read_every_s` seconds it takes a reading of the engine, which heartbeats publish.
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
        """Send a message, from any thread. Errors: OSError when the other end is closed."""
        with self._sending:
            self._connection.send(message)

    def send_heartbeats(self, every_s: float) -> None:
        """Send heartbeats until the other end is closed; run it in a thread of its own."""
        serial = 0
        with suppress(OSError):
            while True:
                serial += 1
                self.send(
                    Heartbeat(serial, self._turns, self._in_engine, self._reading, self._steps)
                )
                time.sleep(every_s)

    def run(self, max_idle_s: float) -> None:
        """Loop until a Close message; poll at this interval while idle.

        Errors: EOFError when the other end is closed.
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
        """Take a new reading of the engine if the last one is old."""
        now = time.monotonic()
        if now - self._read_at >= every_s:
            self._read_at, self._reading = now, self._engine.read()

    def list_requests(self) -> str:
        """Return some ids of requests with jobs in the engine, for the log."""
        ids = {group.request_id: None for group in self._groups.values() if group.request_id}
        shown = list(ids)[:SHOWN_REQUESTS]
        rest = f" and {len(ids) - len(shown)} more" if len(ids) > len(shown) else ""
        return (", ".join(shown) or "unknown") + rest

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Mark the engine as in a call, for heartbeats, while the block runs."""
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
        """Send the results of a step, except those of cancelled jobs."""
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

"""The engine's side of the process boundary: a loop that takes messages, steps, and reports."""

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import util
from multiprocessing.connection import Connection

from logsteer_server.contract.engine import Engine, EngineInfo, EngineSpec
from logsteer_server.contract.jobs import Job, JobResult
from logsteer_server.engines.failures import lacks_memory

log = logging.getLogger(__name__)

ENGINES = {
    "vllm": "logsteer_server.engines.vllm.engine:VllmEngine",
    "transformer_lens": "logsteer_server.engines.tlens.engine:TransformerLensEngine",
    "fake": "logsteer_server.engines.fake:FakeEngine",
}
"""Engine classes by name, imported only in the process that runs one."""

MAX_IDLE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Add:
    """Jobs for the engine, with the ids under which their results come back."""

    jobs: Sequence[tuple[int, Job]]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Jobs whose results nobody waits for any more."""

    job_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Ping:
    """A question whether the engine's loop turns."""

    serial: int


@dataclass(frozen=True, slots=True)
class Close:
    """The order to free the model and end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Finished:
    """Results of one step: id, result, and when the engine took the job (monotonic seconds)."""

    results: Sequence[tuple[int, JobResult, float]]


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a ping."""

    serial: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not start, or broke; its process ends after this message."""

    detail: str
    out_of_memory: bool = False
    can_restart: bool = True


ToEngine = Add | Cancel | Ping | Close
FromEngine = Ready | Finished | Pong | Failed


def build_engine(spec: EngineSpec) -> Engine:
    """Build the engine that the specification names, with its model loaded."""
    module, _, name = ENGINES[spec.engine].partition(":")
    engine: Engine = getattr(import_module(module), name)(spec)
    return engine


def run_engine(connection: Connection, spec: EngineSpec) -> None:
    """Serve one engine until it is told to close, breaks, or its parent is gone; then exit.

    The process exits as a forked one does: finalizers run and children end, and the interpreter is
    not taken down. That would free vLLM's modules and its model object by object, for 4 s.
    """
    _serve(connection, spec)
    util._exit_function()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(connection: Connection, spec: EngineSpec) -> None:
    try:
        engine = build_engine(spec)
    except Exception as error:
        log.exception("engine %s did not start", spec.id)
        lacking = lacks_memory(error)  # which another process may give back
        connection.send(Failed(f"{type(error).__name__}: {error}", lacking, can_restart=lacking))
        return
    try:
        connection.send(Ready(engine.info))
        EngineLoop(connection, engine).run()
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the parent is gone, and with it everyone who waits for results
    except Exception as error:
        log.exception("engine %s broke", spec.id)
        connection.send(Failed(f"{type(error).__name__}: {error}", lacks_memory(error)))
    finally:
        engine.close()


class EngineLoop:
    """Take messages whenever there are any, and step the engine as long as it has work."""

    def __init__(self, connection: Connection, engine: Engine) -> None:
        self._connection = connection
        self._engine = engine
        self._taken_at: dict[int, float] = {}
        self._open = True

    def run(self) -> None:
        """Loop until a Close message. Errors: EOFError when the other end is gone."""
        while self._open:
            while self._open and self._connection.poll(0 if self._engine.busy else MAX_IDLE_S):
                self._handle(self._connection.recv())
            if self._engine.busy:
                self._report(self._engine.step())

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Add(jobs):
                now = time.monotonic()
                self._taken_at |= dict.fromkeys((job_id for job_id, _ in jobs), now)
                self._engine.add(jobs)
            case Cancel(job_ids):
                self._engine.cancel(job_ids)
                for job_id in job_ids:
                    self._taken_at.pop(job_id, None)
            case Ping(serial):
                self._connection.send(Pong(serial))
            case Close():
                self._open = False

    def _report(self, stepped: Sequence[tuple[int, JobResult]]) -> None:
        """Send the results of a step, without those of jobs that were cancelled."""
        results = [
            (job_id, result, self._taken_at[job_id])
            for job_id, result in stepped
            if job_id in self._taken_at
        ]
        for job_id, result, _ in results:
            if result.is_last:
                del self._taken_at[job_id]
        if results:
            self._connection.send(Finished(results))

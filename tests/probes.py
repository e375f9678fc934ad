"""Processes in which tests try vLLM: it leaves none as it was. They print JSON and end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from logsteer_server.contract.engine import Engine, EngineSpec
from logsteer_server.contract.jobs import JobResult

if TYPE_CHECKING:
    from logsteer_server.engines.vllm.engine import VllmEngine

ROOT = Path(__file__).resolve().parents[1]


def run_probe(module: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """What the `main` of a module of the tests finds, in a process of its own."""
    return _run(["-m", module, *arguments], environment)


def run_script(code: str, *arguments: str, **environment: str) -> Any:
    """What a script prints last, as JSON, in a process of its own."""
    return _run(["-c", code, *arguments], environment)


def _run(arguments: list[str], environment: dict[str, str]) -> Any:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        cwd=ROOT,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def start_vllm(spec: EngineSpec) -> "VllmEngine":
    """An engine, built as in the process of one."""
    from logsteer_server.engines.vllm.engine import VllmEngine
    from logsteer_server.runtime.process import build_engine

    engine = build_engine(spec)
    assert isinstance(engine, VllmEngine)
    return engine


def drain(engine: Engine, steps: int = 10**9) -> dict[int, JobResult]:
    """The last result of each job that an engine gives in so many steps, or until none is left."""
    found: dict[int, JobResult] = {}
    while engine.busy and steps:
        found |= dict(engine.step())
        steps -= 1
    return found


def finish(found: dict[str, Any], engine: "VllmEngine | None" = None) -> NoReturn:
    """Print what was found, and end: to free vLLM's modules one by one takes seconds."""
    print(json.dumps(found), flush=True)
    if engine is not None:
        engine.close()
    os._exit(0)

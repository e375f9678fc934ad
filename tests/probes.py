"""Processes in which tests try vLLM: it leaves none as it was. They print JSON and end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from logsteer_server.contract.engine import Engine, EngineSpec
from logsteer_server.contract.jobs import (
    CaptureJob,
    CaptureOutput,
    GenerateOutput,
    Job,
    JobResult,
    Output,
)

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


def recapture(engine: Engine, jobs: dict[int, Job]) -> float:
    """The largest difference, relative to numbers beyond 1, between what jobs capture in flight and
    what a job captures that reads their finished texts, but for a token that was drawn last.
    """
    engine.add(list(jobs.items()))
    worst, again, found = 0.0, dict[int, Job](), drain(engine)
    for number, job in jobs.items():
        tokens = job.tokens
        if isinstance(drawn := found[number], GenerateOutput):
            tokens = np.concatenate([tokens, drawn.token_ids[:-1]])
        shared = {"capture": job.capture, "plan": job.plan, "override": job.override}
        again[number] = CaptureJob(tokens, job.prompt_len, adapter=job.adapter, **shared)
    engine.add(list(again.items()))
    for number, finished in drain(engine).items():
        inflight = found[number]
        assert isinstance(inflight, Output) and isinstance(finished, CaptureOutput), inflight
        ours, theirs = inflight.activations, finished.activations
        assert ours is not None and theirs is not None
        assert ours.places.tolist() == theirs.places.tolist()
        assert ours.sinks == theirs.sinks
        assert ours.activations_LTD.shape == theirs.activations_LTD.shape
        off = np.abs(ours.activations_LTD - theirs.activations_LTD)
        limits = np.maximum(1, np.abs(theirs.activations_LTD))
        worst = max(worst, float((off / limits).max(initial=0)))
    return worst


def finish(found: dict[str, Any], engine: "VllmEngine | None" = None) -> NoReturn:
    """Print what was found, and end: to free vLLM's modules one by one takes seconds."""
    print(json.dumps(found), flush=True)
    if engine is not None:
        engine.close()
    os._exit(0)

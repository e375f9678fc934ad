"""In which order the vLLM engine begins steps and makes results, without vLLM."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from logsteer_server.contract.jobs import GenerateJob, ScoreJob, ScoreOutput
from logsteer_server.contract.plan import Probe, SteeringPlan
from logsteer_server.engines.vllm.engine import VllmEngine
from logsteer_server.engines.vllm.requests import RunningJob
from logsteer_server.engines.vllm.slots import SteeringSlot

JOB = ScoreJob(np.arange(3, dtype=np.int32), np.ones(1, np.int32))
PLAIN, STEERED = 1, 2


class RecordedCore:
    """In the place of `VllmCore`: notes what is called; each step ends all that runs."""

    def __init__(self, overlaps: bool, calls: list[str]) -> None:
        self.overlaps, self.has_step, self.split_ids = overlaps, False, set[str]()
        self.running: list[str] = []
        self._calls = calls

    def begin_step(self) -> None:
        self._calls.append("begin")
        self.has_step = bool(self.running)

    def end_step(self) -> list[Any]:
        self._calls.append("end")
        if not self.has_step:
            return []
        self.has_step = False
        ended, self.running = self.running, []
        return [SimpleNamespace(request_id=request_id, finished=True) for request_id in ended]


class RecordedRequests:
    """In the place of `ScoreRequests`: notes whose results are made."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def collect(self, outputs: Sequence[tuple[RunningJob, Any]]) -> list[Any]:
        self._calls.extend(f"collect {running.job_id}" for running, _ in outputs)
        scores = {"logprob": np.zeros(1, np.float32)}
        return [(running, ScoreOutput(scores, None, None)) for running, _ in outputs]


def make_engine(overlaps: bool, calls: list[str]) -> VllmEngine:
    """An engine in which a plain job and a steered one run."""
    engine = object.__new__(VllmEngine)
    core = RecordedCore(overlaps, calls)
    slots = SimpleNamespace(
        read_traces=lambda _: {}, release=lambda _: None, load_plans=lambda: None
    )
    vars(engine).update(_vllm=core, _slots=slots, _known=[], _waiting={}, _running={})
    engine._by_request_id = {}
    for job_id, slot in (
        (PLAIN, SteeringSlot()),
        (STEERED, SteeringSlot((1,), SteeringPlan(()))),
    ):
        running = RunningJob(job_id, JOB, RecordedRequests(calls), slot, None)  # type: ignore[arg-type]
        running.request_id = str(job_id)
        engine._running[job_id] = engine._by_request_id[str(job_id)] = running
        core.running.append(str(job_id))
    return engine


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_needs_the_workers_is_read_before_the_next_step(overlaps: bool) -> None:
    calls: list[str] = []
    engine = make_engine(overlaps, calls)
    found: list[int] = []
    while engine.busy:
        found += [job_id for job_id, _ in engine.step()]
    assert sorted(found) == [PLAIN, STEERED]
    if overlaps:
        assert calls == ["end", "begin", "end", "collect 2", "begin", "collect 1"]
    else:
        assert calls == ["begin", "end", "collect 1", "collect 2"]


HELD = SteeringSlot((1,), SteeringPlan(()))
READ = SteeringPlan((), probes=(Probe(0, "resid_post", np.ones(1, np.float32)),), kept="all")


@pytest.mark.parametrize(
    ("job", "slot", "is_last", "waits"),
    [
        (JOB, SteeringSlot(), True, True),
        (JOB, HELD, True, False),
        (GenerateJob(JOB.tokens, 9), SteeringSlot(), True, True),
        (GenerateJob(JOB.tokens, 9, stop=("x",)), SteeringSlot(), False, True),
        (GenerateJob(JOB.tokens, 9), HELD, False, True),
        (GenerateJob(JOB.tokens, 9), HELD, True, False),
        (GenerateJob(JOB.tokens, 9, stop=("x",)), HELD, False, False),
        (GenerateJob(JOB.tokens, 9, plan=READ), HELD, False, False),
        (GenerateJob(JOB.tokens, 9), SteeringSlot(rows=range(2)), True, False),
    ],
)
def test_a_result_waits_unless_the_workers_or_other_jobs_have_a_part_in_it(
    job: Any, slot: SteeringSlot, is_last: bool, waits: bool
) -> None:
    running = RunningJob(0, job, RecordedRequests([]), slot, None)  # type: ignore[arg-type]
    assert running.can_wait(SimpleNamespace(finished=is_last)) is waits


def test_a_step_whose_jobs_were_all_cancelled_is_still_ended() -> None:
    calls: list[str] = []
    engine = make_engine(True, calls)
    engine.step()
    engine._running.clear()
    engine._by_request_id.clear()
    assert engine.busy
    assert engine.step() == []
    assert not engine.busy

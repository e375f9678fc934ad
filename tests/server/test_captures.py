"""Which activations a step captures, in which rows: in every chunking and after preemption."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.contract.batches import find_failure
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import CaptureJob, CaptureOutput, CaptureRead, Job, ScoreJob
from logsteer_server.contract.plan import Positions, Site, SteeringPlan
from logsteer_server.engines.vllm.captures import RowPool
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.engine import VllmEngine
from logsteer_server.engines.vllm.extra_args import describe_capture
from logsteer_server.engines.vllm.requests import RunningJob
from logsteer_server.engines.vllm.steering import StepSteering
from logsteer_server.tasks.activations import CaptureSite, plan_captures
from tests.refusals import refused
from tests.server.plan_steps import finish
from tests.server.steering_cases import INFO

LAYERS, WIDTH, ROWS = 4, 3, 60
READS: list[CaptureRead] = ["each", "last", "mean"]
WHERE = [Positions(), Positions("slices", ((2, 4), (7, 9))), Positions("slices", ((0, 1),))]


def stream(name: str, layer: int, position: int) -> np.ndarray:
    """An activation [D] that no other token has."""
    return np.array([ord(name), layer, position + 1], dtype=np.float32)


class Rank:
    """One rank that is told of requests and runs steps of them, as the model runner does."""

    def __init__(self) -> None:
        size = SteeringSize(1, 0, 1, 4 * WIDTH * ROWS)
        self.steering = StepSteering(size, LAYERS, 64, WIDTH, torch.empty(0))
        self.pool = RowPool(ROWS)
        self.jobs: dict[str, tuple[CaptureJob, range]] = {}

    def begin(self, name: str, job: CaptureJob) -> None:
        rows = self.pool.take(job.num_rows * len(job.layers))
        assert rows is not None
        self.jobs[name] = job, rows
        self.steering.begin(name, describe_capture(job, rows), 0)

    def step(self, parts: dict[str, tuple[int, int]]) -> None:
        """Run tokens [begin, end) of each request."""
        starts = np.cumsum([0, *(end - begin for begin, end in parts.values())])
        computed = np.array([begin for begin, _ in parts.values()])
        self.steering.mark(list(parts), starts, computed)
        if self.steering.tables.is_idle:
            return
        for layer in range(LAYERS):
            hidden = [stream(n, layer, t) for n, part in parts.items() for t in range(*part)]
            self.steering.tables.apply(torch.from_numpy(np.stack(hidden)), None, layer)
        self.steering.record()

    def end(self, name: str) -> np.ndarray:
        """What a request has captured, [L, T, D]."""
        job, rows = self.jobs.pop(name)
        self.steering.end(name)
        found = self.steering.tables.captures.take(rows)
        self.pool.release(rows)
        return found.reshape(len(job.layers), job.num_rows, WIDTH)


def expect(name: str, job: CaptureJob) -> np.ndarray:
    read = np.array([[stream(name, layer, t) for t in job.places] for layer in job.layers])
    return read.sum(1, keepdims=True) if job.read == "mean" else read


def make_job(read: CaptureRead, where: Positions = WHERE[0], length: int = 10) -> CaptureJob:
    return CaptureJob(np.zeros(length, np.int32), (3, 1), read=read, positions=where)


@given(
    read=st.sampled_from(READS),
    where=st.sampled_from(WHERE),
    cuts=st.lists(st.integers(1, 9), max_size=4),
    thrown_out=st.integers(0, 9),
)
def test_chunks_and_preemption_capture_what_the_whole_would(
    read: CaptureRead, where: Positions, cuts: list[int], thrown_out: int
) -> None:
    rank = Rank()
    job = make_job(read, where)
    rank.begin("a", job)
    rank.begin("b", make_job("each", length=4))
    rank.step({"b": (0, 3), "a": (0, thrown_out), "c": (0, 5)} if thrown_out else {"b": (0, 3)})
    for begin, end in pairwise(sorted({0, 10, *cuts})):
        rank.step({"c": (5, 7), "a": (begin, end), "d": (0, 1)})
    rank.step({"c": (7, 8), "b": (3, 4)})
    assert np.array_equal(rank.end("a"), expect("a", job))
    assert np.array_equal(rank.end("b"), expect("b", make_job("each", length=4)))


def test_rows_that_are_used_again_are_empty() -> None:
    rank = Rank()
    for name in "abcabcabc":
        rank.begin(name, make_job("each"))
        rank.step({name: (0, 10)})
        assert np.array_equal(rank.end(name), expect(name, make_job("each")))


def test_a_step_that_captures_nothing_marks_nothing() -> None:
    rank = Rank()
    rank.begin("a", make_job("last"))
    rank.step({"a": (0, 9), "b": (0, 4)})
    assert rank.steering.tables.is_idle
    rank.step({"a": (9, 10), "b": (4, 5)})
    assert not rank.steering.tables.is_idle
    rank.end("a")
    rank.step({"b": (5, 6)})
    assert rank.steering.tables.is_idle
    assert rank.steering.tables.captures.find(3) is None
    rank.steering.tables.captures.fill_rows()
    assert not rank.steering.tables.captures.rows_LT.any()


def test_a_capture_is_of_the_steered_stream() -> None:
    rank = Rank()
    offset = np.array([5.0, 0.0, 0.0], dtype=np.float32)
    rank.steering.tables.load({1: SteeringPlan((Site(1, "resid_post", offset),))})
    job = make_job("each")
    rows = rank.pool.take(20)
    assert rows is not None
    steered = {"logsteer_steer": (((1, Positions("slices", ((2, 4),))),), 10)}
    rank.steering.begin("a", steered | describe_capture(job, rows), 0)
    rank.jobs["a"] = job, rows
    rank.step({"a": (0, 10)})
    wanted = expect("a", job)
    wanted[1, 2:4] += offset
    assert np.array_equal(rank.end("a"), wanted)


def test_a_capture_that_waits_for_room_keeps_back_captures_alone() -> None:
    engine = VllmEngine.__new__(VllmEngine)
    small, large = make_job("last", length=2), make_job("each", length=9)
    score = ScoreJob(np.zeros(2, np.int32), np.zeros(1, np.int32))
    engine._waiting = {1: score, 2: large, 3: small, 4: score}
    started: list[int] = []

    def start(job_id: int, job: Job, _: list[RunningJob]) -> bool:
        if job is large:
            return False
        started.append(job_id)
        return True

    engine._start = start  # type: ignore[method-assign]
    engine._slots = SimpleNamespace(load_plans=lambda: None)  # type: ignore[assignment]
    engine._admit()
    assert started == [1, 4]
    assert list(engine._waiting) == [2, 3]


@given(st.lists(st.integers(1, 12), max_size=60))
def test_no_row_is_given_out_twice(counts: list[int]) -> None:
    pool, held = RowPool(20), list[range]()
    for count in counts:
        found = pool.take(count)
        if found is not None:
            assert (len(found), found.start >= 1, found.stop <= 21) == (count, True, True)
            assert not set(found) & {row for other in held for row in other}
            held.append(found)
        elif held:
            pool.release(held.pop(count % len(held)))
    for run in held:
        pool.release(run)
    assert pool.take(20) == range(1, 21)
    assert pool.take(1) is None


def test_a_buffer_holds_one_activation_of_each_layer_at_least() -> None:
    assert SteeringSize(1, 0, 1, 0).count_rows(32, 4096) == 32
    assert SteeringSize(1, 0, 1, 128 * 2**20).count_rows(32, 4096) == 8192


def info(**changes: object) -> EngineInfo:
    return replace(INFO, **changes)  # type: ignore[arg-type]


def plan(length: int = 9, site: CaptureSite | None = None, **changes: object) -> list[CaptureJob]:
    site = site or CaptureSite("resid_post", [2, 0], "each")
    texts, places = [list(range(length))], ["items[0]"]
    policy = changes.pop("on_overflow", "error")
    found = finish(plan_captures(texts, places, site, info(**changes), policy))  # type: ignore[arg-type]
    assert all(entry.truncated == max(0, length - INFO.context_length) for entry in found)
    return [entry.job for entry in found]


def test_a_text_that_the_buffer_cannot_hold_is_refused_with_what_to_do() -> None:
    assert plan(9, capture_rows=18)[0].num_rows == 9
    with refused("payload_too_large", r"items\[0\]: 18 activations .* capture_bytes"):
        plan(9, capture_rows=17)
    assert plan(9, CaptureSite("resid_post", [2, 0], "mean"), capture_rows=17)
    some = CaptureSite("resid_post", None, "each", Positions("slices", ((1, 3),)))
    assert plan(9, some, capture_rows=8)[0].layers == (0, 1, 2, 3)


def test_what_is_too_long_loses_its_beginning_where_that_is_wanted() -> None:
    (job,) = plan(INFO.context_length + 2, on_overflow="truncate_left")
    assert job.tokens.tolist() == list(range(2, INFO.context_length + 2))
    with refused("context_too_long", r"items\[0\] has"):
        plan(INFO.context_length + 2)


def test_activations_of_a_changed_model_that_are_not_finite_fail_the_job() -> None:
    steered = SteeringPlan((Site(1, "resid_post", np.ones(WIDTH, np.float32)),))
    output = CaptureOutput(np.full((1, 1, WIDTH), np.nan, np.float32))
    job = make_job("last")
    assert find_failure(job, output) is None
    changed = CaptureJob(job.tokens, (1,), plan=steered)
    failure = find_failure(changed, output)
    assert failure is not None and failure.code == "non_finite"

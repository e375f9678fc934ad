"""Which tokens of a step are captured and steered: in every chunking and after preemption."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.contract.batches import find_failure
from logsteer_server.contract.captures import Capture, CapturedActivations, CaptureRead
from logsteer_server.contract.jobs import CaptureJob, CaptureOutput, Job, ScoreJob
from logsteer_server.contract.plan import Positions, ResidualOp, Site, SteeringPlan
from logsteer_server.engines.vllm.captures import CaptureWish, RowPool
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.engine import VllmEngine
from logsteer_server.engines.vllm.extra_args import CAPTURE, STEER
from logsteer_server.engines.vllm.requests import RunningJob
from logsteer_server.engines.vllm.steering import MeasureWish, StepSteering
from logsteer_server.engines.vllm.tables import TraceSums
from logsteer_server.tasks.activations import CaptureSite, plan_captures
from tests.refusals import refused
from tests.server.scripted_model import free
from tests.server.steering_cases import INFO

LAYERS, WIDTH, ROWS = 4, 3, 60
READS: list[CaptureRead] = ["each", "last", "mean"]
WHERE = [Positions(), Positions("slices", ((2, 4), (7, 9))), Positions("slices", ((0, 1),))]


def stream(name: str, layer: int, position: int) -> np.ndarray:
    """An activation [D] that no other token has."""
    return np.array([ord(name), layer, position + 1], dtype=np.float32)


def describe_capture(job: CaptureJob, rows: range) -> dict[str, CaptureWish]:
    return {CAPTURE: CaptureWish(rows.start, job.capture.layers, job.places, job.capture.before)}


class CaptureRank:
    """One rank that is told of requests and runs steps of them, as the model runner does."""

    def __init__(self) -> None:
        size = SteeringSize(1, 0, 1, 4 * WIDTH * ROWS)
        self.steering = StepSteering(size, LAYERS, 64, WIDTH, torch.empty(0))
        self.pool = RowPool(ROWS)
        self.jobs: dict[str, tuple[CaptureJob, range]] = {}

    def begin(self, name: str, job: CaptureJob) -> None:
        rows = self.pool.take(job.num_captured)
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
        return found.reshape(len(job.places), len(job.capture.layers), WIDTH).swapaxes(0, 1)


def expect(name: str, job: CaptureJob) -> np.ndarray:
    return np.array([[stream(name, layer, t) for t in job.places] for layer in job.capture.layers])


def make_job(read: CaptureRead, where: Positions = WHERE[0], length: int = 10) -> CaptureJob:
    return CaptureJob(
        np.zeros(length, np.int32), capture=Capture((3, 1), read=read, positions=where)
    )


@given(
    read=st.sampled_from(READS),
    where=st.sampled_from(WHERE),
    cuts=st.lists(st.integers(1, 9), max_size=4),
    thrown_out=st.integers(0, 9),
)
def test_chunks_and_preemption_capture_what_the_whole_would(
    read: CaptureRead, where: Positions, cuts: list[int], thrown_out: int
) -> None:
    rank = CaptureRank()
    job = make_job(read, where)
    rank.begin("a", job)
    rank.begin("b", make_job("each", length=4))
    rank.step({"b": (0, 3), "a": (0, thrown_out), "c": (0, 5)} if thrown_out else {"b": (0, 3)})
    for begin, end in pairwise(sorted({0, 10, *cuts})):
        rank.step({"c": (5, 7), "a": (begin, end), "d": (0, 1)})
    rank.step({"c": (7, 8), "b": (3, 4)})
    assert np.array_equal(rank.end("a"), expect("a", job))
    assert np.array_equal(rank.end("b"), expect("b", make_job("each", length=4)))


def test_decoding_captures_a_window_of_it() -> None:
    rank, job = CaptureRank(), make_job("each", WHERE[1])
    rank.begin("a", job)
    for n in range(10):
        rank.step({"a": (n, n + 1)})
    assert np.array_equal(rank.end("a"), expect("a", job))


def test_a_step_that_captures_nothing_marks_nothing() -> None:
    rank = CaptureRank()
    rank.begin("a", make_job("last"))
    rank.step({"a": (0, 9), "b": (0, 4)})
    assert rank.steering.tables.is_idle
    rank.step({"a": (9, 10), "b": (4, 5)})
    assert not rank.steering.tables.is_idle
    rank.end("a")
    rank.step({"b": (5, 6)})
    assert rank.steering.tables.is_idle


def test_a_capture_is_of_the_steered_stream() -> None:
    rank = CaptureRank()
    offset = np.array([5.0, 0.0, 0.0], dtype=np.float32)
    rank.steering.tables.load({1: SteeringPlan((Site(1, "resid_post", offset),))})
    job = make_job("each")
    rows = rank.pool.take(20)
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


def plan(capture_rows: int, site: CaptureSite | None = None) -> CaptureJob:
    """The job of a text of nine tokens, by an engine with room for so many activations."""
    site = site or CaptureSite.resolve("resid_post", [2, 0], "each", INFO)
    info = replace(INFO, capture_rows=capture_rows)
    (found,), _ = plan_captures([list(range(9))], ["items[0]"], site, info, free)
    return found


def test_a_text_that_the_buffer_cannot_hold_is_refused_with_what_to_do() -> None:
    assert plan(18).num_rows == 9
    with refused("payload_too_large", r"items\[0\]: 18 activations .* capture_bytes"):
        plan(17)
    assert plan(17, CaptureSite.resolve("resid_post", [2, 0], "last", INFO))
    some = CaptureSite.resolve("resid_post", None, "each", INFO, Positions("slices", ((1, 3),)))
    assert plan(8, some).capture.layers == (0, 1, 2, 3)


def test_activations_of_a_changed_model_that_are_not_finite_fail_the_job() -> None:
    steered = SteeringPlan((Site(1, "resid_post", np.ones(WIDTH, np.float32)),))
    output = CaptureOutput(
        activations=CapturedActivations(np.full((1, 1, WIDTH), np.nan, np.float32), np.arange(1))
    )
    job = make_job("last")
    assert find_failure(job, output) is None
    changed = replace(job, plan=steered)
    failure = find_failure(changed, output)
    assert failure is not None and failure.code == "non_finite"


KINDS = st.sampled_from(
    [
        Positions("all"),
        Positions("prompt"),
        Positions("completion"),
        Positions("predicting"),
        Positions("last_prompt"),
        Positions("slices", ((2, 4), (7, 9))),
        Positions("slices", ((3, 5),)),
        Positions("window", ((1, 3),)),
        Positions("last", number=2),
        Positions("every", number=3),
        Positions("all", within=(Positions("every", number=2),)),
        Positions("completion", without=(Positions("every", number=2),)),
    ]
)


class TraceRank:
    """One rank where at layer 1 every steered token is doubled, so that it changes by its norm."""

    def __init__(self, *, lags: bool = False) -> None:
        size = SteeringSize(2, 1, 1, 64)
        self.steering = StepSteering(size, 3, 64, 1, torch.empty(0), lags=lags)
        one = np.ones(1, np.float32)
        site = Site(1, "resid_post", None, (ResidualOp(one, per_component=2.0),))
        self.steering.tables.load({slot: SteeringPlan((site,)) for slot in (1, 2)})

    def begin(
        self, name: str, slot: int, positions: Positions, prompt_len: int, num_cached: int
    ) -> None:
        extra_args = {STEER: (((slot, positions),), prompt_len)}
        self.steering.begin(name, extra_args, num_cached)

    def run(self, steps: list[dict[str, tuple[int, int]]]) -> dict[str, set[int]]:
        """The steered positions of each request, over steps of [begin, end) by request."""
        found: dict[str, set[int]] = {}
        for step in steps:
            names = list(step)
            starts = np.cumsum([0, *(end - begin for begin, end in step.values())])
            computed = np.array([begin for begin, _ in step.values()])
            self.steering.mark(names, starts, computed)
            hidden = torch.ones(int(starts[-1]), 1)
            self.steering.tables.apply(hidden, None, 1)
            self.steering.record()
            for place in np.flatnonzero(hidden.ravel().numpy() == 2.0):
                row = int(np.searchsorted(starts, place, side="right")) - 1
                found.setdefault(names[row], set()).add(int(computed[row] + place - starts[row]))
        return found

    def read(self, name: str, end: int = 2**31) -> dict[int, tuple[int, float, float]]:
        """By layer, how many tokens changed, their ratios' sum, and the first token's ratio."""
        wishes = {name: MeasureWish(end, True, False, None)}
        return self.steering.measure(wishes)[name].sums


def expect_sums(positions: set[int]) -> dict[int, tuple[int, float, float]]:
    count = len(positions)
    return {1: (count, float(count), float(0 in positions))} if count else {}


@given(
    positions=KINDS,
    prompt_len=st.integers(1, 9),
    cuts=st.lists(st.integers(1, 11), max_size=4),
    cached=st.integers(0, 5),
)
def test_chunks_steer_what_the_whole_would(
    positions: Positions, prompt_len: int, cuts: list[int], cached: int
) -> None:
    rank = TraceRank()
    rank.begin("a", 2, positions, prompt_len, cached)
    edges = sorted({cached, 12, *(cut for cut in cuts if cut > cached)})
    steps = [
        {"other": (0, 3), "a": (first, last), "last": (4, 5)} for first, last in pairwise(edges)
    ]
    wanted = set(np.nonzero(positions.mask(0, 12, prompt_len))[0].tolist())
    new = {position for position in wanted if position >= cached}
    assert rank.run(steps).get("a", set()) == new
    assert rank.read("a") == expect_sums(new)


@given(positions=KINDS, prompt_len=st.integers(1, 6), steps=st.integers(1, 150))
def test_decoding_step_by_step_records_every_token(
    positions: Positions, prompt_len: int, steps: int
) -> None:
    rank = TraceRank()
    rank.begin("a", 2, positions, prompt_len, 0)
    rank.begin("b", 1, Positions(), 3, 0)
    decoding = [
        {"a": (prompt_len + n, prompt_len + n + 1), "b": (3 + n, 4 + n)} for n in range(steps)
    ]
    found = rank.run([{"a": (0, prompt_len), "b": (0, 3)}, *decoding])
    wanted = set(np.nonzero(positions.mask(0, prompt_len + steps, prompt_len))[0].tolist())
    assert found.get("a", set()) == wanted
    assert found["b"] == set(range(3 + steps))
    assert rank.read("a") == expect_sums(wanted)
    assert rank.read("b") == expect_sums(set(range(3 + steps)))


def test_a_request_that_begins_again_a_token_at_a_time_counts_nothing_twice() -> None:
    rank = TraceRank()
    rank.begin("a", 1, Positions(), 2, 0)
    rank.run([{"a": (n, n + 1)} for n in (0, 1, 2, 0, 1, 2, 3, 4)])
    assert rank.read("a") == expect_sums(set(range(5)))


def test_a_token_after_the_end_is_left_out() -> None:
    rank = TraceRank(lags=True)
    for name in "ab":
        rank.begin(name, 2, Positions(), 2, 0)
    rank.run([{"a": (n, n + 1), "b": (n, n + 1)} for n in range(3)])
    assert rank.read("a", 2) == expect_sums({0, 1})
    assert rank.read("b", 3) == expect_sums({0, 1, 2})


def test_entries_are_empty_when_they_are_given_out_again() -> None:
    sums = TraceSums(3, 2, torch.empty(0))
    first = [sums.acquire() for _ in range(3)]
    assert sorted(first) == [1, 2, 3]
    sums.add(1, np.array(first), torch.tensor([[np.nan, 0.0, np.inf]]), np.array([0, 0, 1]) > 0)
    sums.decided_E[first[1]] = 5
    counts, totals, firsts = sums.fetch(first)[:, 1].T
    assert counts.tolist() == [1, 0, 1]
    assert np.isnan(totals[0])
    assert totals[1:].tolist() == [0, np.inf]
    assert firsts.tolist() == [0, 0, np.inf]
    for entry in first:
        sums.release(entry)
    assert sorted(sums.acquire() for _ in range(3)) == [1, 2, 3]
    assert not sums.fetch(first).any()
    assert not sums.decided_E.any()

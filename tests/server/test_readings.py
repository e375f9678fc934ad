"""Which tokens of a step are read, what of it is kept, and what conditions decide: by hand."""

import numpy as np
import torch

from logsteer_server.contract.plan import (
    MAX_CONDITIONS,
    Condition,
    Positions,
    Probe,
    ResidualOp,
    Site,
    SteeringPlan,
)
from logsteer_server.engines.readings import ReadRequest
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.extra_args import READ, STEER
from logsteer_server.engines.vllm.layout import CLOSED, DECIDED, ReadTokens
from logsteer_server.engines.vllm.steering import MeasureWish, StageMeasurements, StepSteering
from logsteer_server.numerics.residual_ops import hold_all

HIGH = Condition(0, above=0.5)
OF_PROMPT = Condition(0, above=0.5, of="prompt")


def values(*components: float) -> np.ndarray:
    """Readings of one probe: these components of activations of norm 2, moved by 1."""
    return np.array([[[c, 2.0, c + 1, 2.0]] for c in components], dtype=np.float32)


def request(
    prompt_len: int,
    *conditions: Condition,
    first_kept: int | None = 0,
    positions: Positions | None = None,
) -> ReadRequest:
    where = ((positions or Positions("all"),),) * len(conditions)
    return ReadRequest(prompt_len, 1, first_kept, where, conditions)


def test_conditions_hold_strictly_between_their_bounds() -> None:
    cosine = Condition(0, above=0.2, below=0.6, relative=True)
    readings = values(0.4, 0.5, 0.6, 1.2, 1.1)
    assert hold_all([HIGH, cosine], readings).tolist() == [
        [False, False], [False, True], [True, True], [True, False], [True, True],
    ]  # fmt: skip
    lost = readings.copy()
    lost[0, 0, 0] = np.nan
    assert not hold_all([HIGH, Condition(0, below=9.0)], lost)[0].any()


SIZE = SteeringSize(2, MAX_CONDITIONS, MAX_CONDITIONS, 64)


class Rank:
    """One rank whose probe reads given components, in place of a model's activations."""

    def __init__(self) -> None:
        self.steering = StepSteering(SIZE, 1, 8, 2, torch.empty(0))

    def begin(self, name: str, slot: int, read: ReadRequest) -> None:
        self.steering.begin(name, {READ: (slot, read)}, 0)

    def step(self, names: list[str], starts: list[int], computed: list[int]) -> ReadTokens:
        """Mark a step."""
        self.steering.mark(names, np.array(starts), np.array(computed))
        return self.steering.tables.step.read

    def record(self, *components: float) -> None:
        """Read these components, one for each token that probes read."""
        probes = self.steering.tables.probes
        index_r = torch.from_numpy(probes.step.index_r)
        probes.readings_TGR[index_r, :1] = torch.from_numpy(values(*components))
        self.steering.record()

    def measure(self, name: str, end: int = 99, reads: bool = True) -> StageMeasurements:
        return self.steering.measure({name: MeasureWish(end, False, reads, None)})[name]


def test_the_example_of_step_steering() -> None:
    """What probes read in it; and further steps alike cost no new arrays."""
    rank = Rank()
    rank.begin("a", 2, request(2, OF_PROMPT))
    read = rank.step(["b", "a"], [0, 1, 3], [5, 0])
    assert read.index_r.tolist() == [1, 2]
    assert read.slots_r.tolist() == [2, 2]
    assert read.sources_r.tolist() == [CLOSED, 2]
    assert read.is_end_r.tolist() == [False, True]
    assert read.is_kept_r.tolist() == [True, True]
    rank.record(0.1, 0.9)
    steps = []
    for step in range(3):
        read = rank.step(["a"], [0, 1], [2 + step])
        assert read.sources_r.tolist() == [DECIDED]
        assert not read.is_end_r.any()
        steps.append(read)
        rank.record(0.2 + step)
    assert steps[0] is steps[1] is steps[2]
    found = rank.measure("a")
    assert np.allclose(components(found), [0.1, 0.9, 0.2, 1.2, 2.2])
    assert found.passed == (4,)


def test_readings_are_returned_once_and_those_beyond_the_end_later() -> None:
    """A step begun before the end was known reads one token more; a preemption reads all again."""
    rank = Rank()
    rank.begin("a", 1, request(2, HIGH))
    rank.step(["a"], [0, 2], [0])
    rank.record(0.1, 0.9)
    rank.step(["a"], [0, 1], [2])
    rank.record(0.7)
    first = rank.measure("a", 2)
    assert (first.passed, components(first)) == ((1,), [np.float32(0.1), np.float32(0.9)])
    rank.step(["a"], [0, 4], [0])
    rank.record(0.1, 0.9, 0.7, 0.3)
    second = rank.measure("a", 4)
    assert second.readings is not None and second.readings.first == 2
    assert (second.passed, components(second)) == ((2,), [np.float32(0.7), np.float32(0.3)])


def test_a_preempted_request_counts_once_whenever_it_is_asked_for() -> None:
    """The steps differ, as another request comes and goes; one fetches after each, one at last."""
    steps = [(0, 2), (2, 1), (3, 1), (0, 3), (3, 1), (4, 1)]
    results = []
    for asks_often in (True, False):
        rank = Rank()
        rank.begin("a", 1, request(3, HIGH, OF_PROMPT))
        for number, (position, count) in enumerate(steps):
            names = ["a", "b"][: 1 + number % 2]
            rank.step(names, [0, count, count + 1][: 1 + len(names)], [position, 9][: len(names)])
            rank.record(*[[0.9, 0.1, 0.8, 0.7, 0.2][t] for t in range(position, position + count)])
            if asks_often:
                rank.measure("a", reads=False)
        found = rank.measure("a")
        results.append((found.passed, components(found)))
    assert results[0] == results[1]
    assert results[0] == ((3, 3), [np.float32(c) for c in (0.9, 0.1, 0.8, 0.7, 0.2)])


def test_what_waits_on_the_device_is_fetched_when_somebody_asks() -> None:
    rank = Rank()
    rank.begin("a", 1, request(1))
    rank.begin("b", 1, request(1, HIGH, first_kept=None))
    for step in range(3):
        rank.step(["a", "b"], [0, 1, 2], [step, step])
        rank.record(step, step)
    rank.steering.end("a")  # nobody asked for what it had read
    rank.begin("c", 1, request(2, first_kept=1))  # it has its entry
    read = rank.step(["b", "c"], [0, 1, 3], [3, 0])
    assert read.is_kept_r.tolist() == [True, False, True]
    rank.record(0.0, 5.0, 7.0)
    assert rank.measure("b").passed == (2,)
    found = rank.measure("c")
    assert found.readings is not None and found.readings.first == 1
    assert components(found) == [7.0]
    assert rank.measure("b").readings is None


def components(found: StageMeasurements) -> list[float]:
    """The components that one probe has read."""
    assert found.readings is not None
    values_T: list[float] = found.readings.values_TGR[:, 0, 0].tolist()
    return values_T


def test_the_last_of_as_many_conditions_as_there_may_be_is_kept() -> None:
    """What the prompt's last token decides stands in the request's entry, for later steps."""
    never = Condition(0, above=9.0, of="prompt")
    conditions = (*[never] * (MAX_CONDITIONS - 1), OF_PROMPT)
    rank = Rank()
    ahead, aside = np.eye(2, dtype=np.float32)
    ops = tuple(
        ResidualOp(aside, base=2.0**n, per_component=1, condition=n) for n in range(MAX_CONDITIONS)
    )
    probes = (Probe(0, "resid_post", ahead),)
    site = Site(0, "resid_post", None, ops)
    plan = SteeringPlan((site,), probes=probes, conditions=conditions)
    rank.steering.tables.load({1: plan})
    read = (1, ReadRequest.of(plan, 1))
    rank.steering.begin("a", {STEER: (((1, Positions()),), 1), READ: read}, 0)
    for step, component in enumerate([0.9, -5.0]):
        rank.step(["a"], [0, 1], [step])
        hidden = torch.tensor([[component, 0.0]])
        rank.steering.tables.apply(hidden, None, 0)
        rank.steering.record()
        assert hidden.tolist() == [[np.float32(component), 2.0 ** (MAX_CONDITIONS - 1)]]

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
from logsteer_server.engines.vllm.layout import CLOSED, DECIDED, SteeredTokens, Step
from logsteer_server.engines.vllm.readings import ReadingRecorder
from logsteer_server.engines.vllm.tables import SteeringTables
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


def test_the_example_of_the_recorder() -> None:
    """Of the class `ReadingRecorder`; and further steps alike cost no new arrays."""
    recorder = ReadingRecorder()
    recorder.begin("a", 1, 2, request(2, OF_PROMPT), 0)
    read = recorder.find(["b", "a"], np.array([0, 1, 3]), np.array([5, 0]))
    assert read.index_r.tolist() == [1, 2]
    assert read.slots_r.tolist() == [2, 2]
    assert read.sources_r.tolist() == [CLOSED, 2]
    assert read.is_end_r.tolist() == [False, True]
    assert read.is_kept_r.tolist() == [True, True]
    recorder.record(torch.from_numpy(values(0.1, 0.9)))
    steps = []
    for step in range(3):
        read = recorder.find(["a"], np.array([0, 1]), np.array([2 + step]))
        assert read.sources_r.tolist() == [DECIDED]
        assert not read.is_end_r.any()
        steps.append(read)
        recorder.record(torch.from_numpy(values(0.2 + step)))
    assert steps[0] is steps[1] is steps[2]
    taken = recorder.pop("a")
    assert np.allclose(taken.values_TGR[:, 0, 0], [0.1, 0.9, 0.2, 1.2, 2.2])
    assert recorder.count_passed("a", 99) == (4,)
    recorder.end("a")
    assert len(recorder) == 0


def test_a_preempted_request_counts_once_whenever_it_is_asked_for() -> None:
    """The steps differ, as another request comes and goes; one fetches after each, one at last."""
    steps = [(0, 2), (2, 1), (3, 1), (0, 3), (3, 1), (4, 1)]
    results = []
    for asks_often in (True, False):
        recorder = ReadingRecorder()
        recorder.begin("a", 1, 1, request(3, HIGH, OF_PROMPT), 0)
        for number, (position, count) in enumerate(steps):
            names = ["a", "b"][: 1 + number % 2]
            starts = np.array([0, count, count + 1])[: 1 + len(names)]
            recorder.find(names, starts, np.array([position, 9])[: len(names)])
            read = [[0.9, 0.1, 0.8, 0.7, 0.2][t] for t in range(position, position + count)]
            recorder.record(torch.from_numpy(values(*read)))
            if asks_often:
                recorder.count_passed("a", 99)
        taken = recorder.pop("a")
        results.append((recorder.count_passed("a", 99), taken.first, components(taken.values_TGR)))
    assert results[0] == results[1]
    assert results[0][0] == (3, 3)
    assert results[0][2] == [np.float32(c) for c in (0.9, 0.1, 0.8, 0.7, 0.2)]


def test_what_waits_on_the_device_is_fetched_when_somebody_asks() -> None:
    recorder = ReadingRecorder()
    recorder.begin("a", 1, 1, request(1), 0)
    recorder.begin("b", 2, 1, request(1, HIGH, first_kept=None), 0)
    for step in range(3):
        recorder.find(["a", "b"], np.array([0, 1, 2]), np.array([step, step]))
        recorder.record(torch.from_numpy(values(step, step)))
    recorder.end("a")  # nobody asked for what it had read
    recorder.begin("c", 1, 1, request(2, first_kept=1), 0)  # it has its entry
    read = recorder.find(["b", "c"], np.array([0, 1, 3]), np.array([3, 0]))
    assert read.is_kept_r.tolist() == [True, False, True]
    recorder.record(torch.from_numpy(values(0.0, 7.0)))
    assert recorder.count_passed("b", 99) == (2,)
    taken = recorder.pop("c")
    assert (taken.first, components(taken.values_TGR)) == (1, [7.0])
    assert recorder.pop("b") is None


def components(values_TGR: np.ndarray) -> list[float]:
    """The components that one probe has read."""
    return values_TGR[:, 0, 0].tolist()


def test_the_last_of_as_many_conditions_as_there_may_be_is_kept() -> None:
    """What the prompt's last token decides stands in the request's entry, for later steps."""
    never = Condition(0, above=9.0, of="prompt")
    conditions = (*[never] * (MAX_CONDITIONS - 1), OF_PROMPT)
    recorder = ReadingRecorder()
    recorder.begin("a", 1, 1, request(1, *conditions), 0)
    size = SteeringSize(1, MAX_CONDITIONS, MAX_CONDITIONS, 64)
    tables = SteeringTables(size, 1, 4, 2, torch.empty(0))
    ahead, aside = np.eye(2, dtype=np.float32)
    ops = tuple(
        ResidualOp(aside, base=2.0**n, per_component=1, condition=n) for n in range(MAX_CONDITIONS)
    )
    probes = (Probe(0, "resid_post", ahead),)
    site = Site(0, "resid_post", None, ops)
    tables.load({1: SteeringPlan((site,), probes=probes, conditions=conditions)})
    for step, component in enumerate([0.9, -5.0]):
        read = recorder.find(["a"], np.array([0, 1]), np.array([step]))
        one = np.array([0])
        tables.write(Step(SteeredTokens(one, one + 1, one + 1, one == 0, one == 0), read=read))
        hidden = torch.tensor([[component, 0.0]])
        tables.apply(hidden, None, 0)
        tables.probes.decide_prompts()
        assert hidden.tolist() == [[np.float32(component), 2.0 ** (MAX_CONDITIONS - 1)]]

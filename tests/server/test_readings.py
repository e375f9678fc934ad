"""Which tokens of a step are read, what of it is kept, and what conditions decide: by hand."""

import numpy as np
import torch

from logsteer_server.contract.plan import MAX_CONDITIONS, Condition, Positions, Probe
from logsteer_server.engines.readings import ReadRequest, SequenceReadings
from logsteer_server.engines.vllm.probe_tables import CLOSED, DECIDED, ProbeTables
from logsteer_server.engines.vllm.readings import ReadingRecorder
from logsteer_server.numerics.probes import hold_all, read_components

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
    return ReadRequest(prompt_len, 1, first_kept, positions or Positions("all"), conditions)


def components_of(sequence: SequenceReadings) -> list[float]:
    taken = sequence.take()
    return [] if taken is None else taken.values_TGR[:, 0, 0].tolist()


def test_components_are_those_of_the_docstring() -> None:
    read = read_components(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]))
    assert read.tolist() == [[3.0, 5.0]]


def test_conditions_hold_strictly_between_their_bounds() -> None:
    cosine = Condition(0, above=0.2, below=0.6, relative=True)
    readings = values(0.4, 0.5, 0.6, 1.2, 1.1)
    assert hold_all([HIGH, cosine], readings).tolist() == [
        [False, False], [False, True], [True, True], [True, False], [True, True],
    ]  # fmt: skip
    lost = readings.copy()
    lost[0, 0, 0] = np.nan
    assert not hold_all([HIGH, Condition(0, below=9.0)], lost)[0].any()


def test_tokens_that_are_read_again_count_once() -> None:
    sequence = SequenceReadings(request(2, HIGH), counted=1)
    sequence.add(1, values(0.9, 0.1, 0.8))
    assert sequence.passed == (2,)
    sequence.add(0, values(0.7, 0.9, 0.1, 0.8, 0.6))  # preempted: from the start once more
    assert sequence.passed == (3,)
    taken = sequence.take()
    assert taken is not None
    assert taken.first == 0
    assert np.allclose(taken.values_TGR[:, 0, 0], [0.7, 0.9, 0.1, 0.8, 0.6])
    assert sequence.take() is None


def test_the_prompts_last_token_decides_for_what_follows() -> None:
    for last, passed in ((0.9, 4), (0.1, 0)):
        sequence = SequenceReadings(request(3, OF_PROMPT))
        sequence.add(0, values(0.9, 0.9))
        assert (sequence.decided, sequence.passed) == (None, (0,))
        sequence.add(2, values(last, 0.1))
        sequence.add(4, values(0.2))
        sequence.add(5, values(0.2))
        assert sequence.passed == (passed,)
        assert sequence.decided == (1 if passed else 0)


def test_steered_positions_alone_count_and_wanted_tokens_alone_are_kept() -> None:
    asked = request(2, HIGH, first_kept=1, positions=Positions("completion"))
    sequence = SequenceReadings(asked)
    sequence.add(0, values(0.9, 0.9, 0.9, 0.1))
    assert sequence.passed == (1,)
    assert np.allclose(components_of(sequence), [0.9, 0.9, 0.1])
    nothing = SequenceReadings(request(2, HIGH, first_kept=None))
    nothing.add(0, values(0.9))
    assert (nothing.passed, nothing.take()) == ((1,), None)


def test_the_example_of_the_recorder() -> None:
    """Of the class `ReadingRecorder`; and further steps alike cost no new arrays."""
    recorder = ReadingRecorder()
    recorder.begin("a", 2, request(2, OF_PROMPT), 0)
    read = recorder.find(["b", "a"], np.array([0, 1, 3]), np.array([5, 0]))
    assert read.index_r.tolist() == [1, 2]
    assert read.slots_r.tolist() == [2, 2]
    assert read.sources_r.tolist() == [CLOSED, 2]
    recorder.record(values(0.1, 0.9))
    steps = []
    for step in range(3):
        read = recorder.find(["a"], np.array([0, 1]), np.array([2 + step]))
        assert (read.sources_r.tolist(), read.decided_r.tolist()) == ([DECIDED], [1])
        steps.append(read)
        recorder.record(values(0.2 + step))
    assert steps[0] is steps[1] is steps[2]
    taken = recorder.take("a")
    assert taken is not None
    assert np.allclose(taken.values_TGR[:, 0, 0], [0.1, 0.9, 0.2, 1.2, 2.2])
    assert recorder.read_passed("a") == (4,)
    recorder.end("a")
    assert len(recorder) == 0


def test_a_prompt_in_parts_is_closed_until_its_end_is_read() -> None:
    recorder = ReadingRecorder()
    recorder.begin("a", 1, request(5, OF_PROMPT, first_kept=4), 0)
    first = recorder.find(["a"], np.array([0, 3]), np.array([0]))
    assert first.sources_r.tolist() == [CLOSED] * 3
    recorder.record(values(0.9, 0.9, 0.9))
    second = recorder.find(["b", "a"], np.array([0, 2, 6]), np.array([0, 3]))
    assert second.index_r.tolist() == [2, 3, 4, 5]
    assert second.sources_r.tolist() == [CLOSED, 3, 3, 3]
    recorder.record(values(0.9, 0.1, 0.9, 0.9))
    third = recorder.find(["a"], np.array([0, 1]), np.array([7]))
    assert (third.sources_r.tolist(), third.decided_r.tolist()) == ([DECIDED], [0])
    taken = recorder.take("a")
    assert taken is not None
    assert (taken.first, len(taken.values_TGR)) == (4, 3)
    assert recorder.read_passed("a") == (0,)


def test_the_last_of_as_many_conditions_as_there_may_be_is_kept() -> None:
    never = Condition(0, above=9.0, of="prompt")
    conditions = (*[never] * (MAX_CONDITIONS - 1), OF_PROMPT)
    recorder = ReadingRecorder()
    recorder.begin("a", 1, request(1, *conditions), 0)
    recorder.find(["a"], np.array([0, 1]), np.array([0]))
    recorder.record(values(0.9))
    read = recorder.find(["a"], np.array([0, 1]), np.array([1]))
    tables = ProbeTables(2, MAX_CONDITIONS, 4, 2, torch.empty(0))
    direction = np.array([1.0, 0.0], dtype=np.float32)
    tables.load(1, [Probe(0, "resid_post", direction)], conditions)
    tables.write(read)
    number = torch.arange(MAX_CONDITIONS)[None]
    acts = tables.decide(torch.tensor([0]), torch.tensor([1]), number)
    assert acts[0].tolist() == [False] * (MAX_CONDITIONS - 1) + [True]

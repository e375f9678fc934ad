"""In which order steps of vLLM are begun and ended, without vLLM."""

from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from logsteer_server.engines.vllm.steps import StepQueue


class Scheduler:
    """In the place of vLLM's: each step has the next of so many, and the last ones are empty."""

    def __init__(self, calls: list[str], steps: list[str]) -> None:
        self._calls, self._steps = calls, deque(steps)

    def has_unfinished_requests(self) -> bool:
        return bool(self._steps)

    def schedule(self) -> Any:
        kind = self._steps.popleft()
        self._calls.append(f"schedule {kind}")
        return SimpleNamespace(
            kind=kind,
            total_num_scheduled_tokens=0 if kind == "empty" else 1,
            pending_structured_output_tokens=kind == "form",
        )

    def get_grammar_bitmask(self, scheduled: Any) -> str:
        return f"grammar of {scheduled.kind}"

    def update_from_output(self, scheduled: Any, output: str) -> dict[int, Any]:
        self._calls.append(f"update {scheduled.kind}")
        return {0: SimpleNamespace(outputs=[output])}


class Executor:
    """In the place of vLLM's: what it gives of a step is its kind."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def execute_model(self, scheduled: Any, *, non_block: bool) -> Future[Any]:
        assert non_block
        if scheduled.kind == "broken":
            raise MemoryError(scheduled.kind)
        self._calls.append(f"run {scheduled.kind}")
        return done("nothing" if scheduled.kind == "empty" else None)

    def sample_tokens(self, grammar: str, *, non_block: bool) -> Future[Any]:
        assert non_block
        self._calls.append(f"draw by {grammar}")
        return done(grammar)


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def make_queue(depth: int, steps: list[str]) -> tuple[StepQueue, list[str]]:
    calls: list[str] = []
    return StepQueue(Scheduler(calls, steps), Executor(calls), depth), calls


def end_all(queue: StepQueue) -> list[Any]:
    """Begin and end steps until none is left; return what they gave."""
    found = []
    queue.begin()
    while queue:
        found += queue.end()
        queue.begin()
    return found


def test_one_step_at_a_time_ends_before_the_next_is_scheduled() -> None:
    queue, calls = make_queue(1, ["a", "b"])
    assert end_all(queue) == ["grammar of a", "grammar of b"]
    assert [call for call in calls if call.startswith(("schedule", "update"))] == [
        "schedule a", "update a", "schedule b", "update b",
    ]  # fmt: skip


def test_the_next_step_is_on_the_device_before_the_one_before_it_is_waited_for() -> None:
    queue, calls = make_queue(2, ["a", "b", "c"])
    queue.begin()
    queue.begin()
    assert calls[-1] == "draw by grammar of b", "no third one"
    assert queue.end() == ["grammar of a"]
    queue.begin()
    assert [call for call in calls if not call.startswith("draw")] == [
        "schedule a", "run a", "schedule b", "run b", "update a", "schedule c", "run c",
    ]  # fmt: skip
    assert end_all(queue) == ["grammar of b", "grammar of c"]


def test_an_empty_step_ends_the_round_and_draws_nothing() -> None:
    queue, calls = make_queue(3, ["a", "empty", "b"])
    queue.begin()
    assert calls == ["schedule a", "run a", "draw by grammar of a", "schedule empty", "run empty"]
    assert end_all(queue) == ["grammar of a", "nothing", "grammar of b"]


def test_a_draw_by_a_grammar_waits_for_the_tokens_before_it() -> None:
    queue, calls = make_queue(3, ["a", "form", "b"])
    queue.begin()
    assert calls[-1] == "run form", "neither drawn nor followed by another one"
    assert queue.end() == ["grammar of a"]
    assert calls[-2:] == ["update a", "draw by grammar of form"]


def test_a_step_that_cannot_be_launched_fails_in_its_turn() -> None:
    queue, _ = make_queue(2, ["a", "broken"])
    queue.begin()
    assert queue.end() == ["grammar of a"]
    with pytest.raises(MemoryError, match="broken"):
        queue.end()

"""Begin and end steps of vLLM's scheduler, so that several are under way at once; free of vLLM."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Step:
    """A step that was handed to the device: what was scheduled, and what will say what came of it.

    `sampled` is None while its draw waits for tokens of the step before it, as that of a reply of a
    given form does.
    """

    scheduled: Any
    executed: Future[Any]
    sampled: Future[Any] | None = None


class StepQueue:
    """Step vLLM's scheduler and executor as its `EngineCore.step_with_batch_queue` does.

    `depth`: how many steps are under way at once. With two, the next one is on the device while
    this process ends the one before it. A request whose end is seen then may be in one step more,
    whose token is dropped. Of three steps:

        begin()     steps 1 and 2 are handed to the device
        end()       waits for step 1
        begin()     step 3 is handed to the device, which works on step 2
    """

    def __init__(self, scheduler: Any, executor: Any, depth: int) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._under_way: deque[_Step] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self) -> None:
        """Schedule steps and hand them to the device, as many as may be under way at once."""
        while len(self) < self._depth and self._scheduler.has_unfinished_requests():
            step = self._hand_over(self._scheduler.schedule())
            self._under_way.append(step)
            if step.sampled is None or not step.scheduled.total_num_scheduled_tokens:
                return  # the next one waits for what comes of those under way

    def end(self) -> list[Any]:
        """Wait for the first step that was begun; return an `EngineCoreOutput` a request.

        Errors: whatever the model raises.
        """
        if not self._under_way:
            return []
        step = self._under_way.popleft()
        assert step.sampled is not None, "the step before this one has ended"
        output = step.sampled.result()
        if output is None:
            step.executed.result()  # raises
            raise RuntimeError("vLLM gave no output of a step")
        outputs = self._scheduler.update_from_output(step.scheduled, output)
        if self._under_way and self._under_way[-1].sampled is None:
            self._sample(self._under_way[-1])
        return [output for batch in outputs.values() for output in batch.outputs]

    def _hand_over(self, scheduled: Any) -> _Step:
        executed: Future[Any]
        try:
            executed = self._executor.execute_model(scheduled, non_block=True)
        except Exception as error:  # of this step, and not of whoever reports the one before
            executed = Future()
            executed.set_exception(error)
            return _Step(scheduled, executed, executed)
        if not scheduled.total_num_scheduled_tokens:
            return _Step(scheduled, executed, executed)
        step = _Step(scheduled, executed)
        if not scheduled.pending_structured_output_tokens:
            self._sample(step)
        return step

    def _sample(self, step: _Step) -> None:
        allowed = self._scheduler.get_grammar_bitmask(step.scheduled)
        step.sampled = self._executor.sample_tokens(allowed, non_block=True)

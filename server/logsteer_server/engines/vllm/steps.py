"""Pipeline the steps of vLLM's scheduler; does not import vLLM."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Step:
    """A pending step: the scheduler's output, and the futures of its execution and sampling.

    `sampled` is None while sampling waits for tokens of the step before, as for structured outputs.
    """

    scheduled: Any
    executed: Future[Any]
    sampled: Future[Any] | None = None


class StepQueue:
    """Step vLLM's scheduler and executor as its `EngineCore.step_with_batch_queue` does.

    `depth`: the most pending steps. With two, the device computes the next step while this process
    ends the one before. If that ends a request, the next step may have one more token of it, which
    is dropped. For three steps:

        begin()     submits steps 1 and 2 to the device
        end()       waits for step 1
        begin()     submits step 3, while the device computes step 2
    """

    def __init__(self, scheduler: Any, executor: Any, depth: int) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._pending: deque[_Step] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def begin(self) -> None:
        """Schedule steps and submit them to the device, until `depth` steps are pending."""
        while len(self) < self._depth and self._scheduler.has_unfinished_requests():
            step = self._submit(self._scheduler.schedule())
            self._pending.append(step)
            if step.sampled is None or not step.scheduled.total_num_scheduled_tokens:
                return  # the next step needs the outputs of the pending ones

    def end(self) -> list[Any]:
        """Wait for the oldest pending step; return an `EngineCoreOutput` per request.

        Errors: whatever the model raises.
        """
        if not self._pending:
            return []
        step = self._pending.popleft()
        assert step.sampled is not None, "the step before this one has ended"
        output = step.sampled.result()
        if output is None:
            step.executed.result()  # raises
            raise RuntimeError("vLLM gave no output of a step")
        outputs = self._scheduler.update_from_output(step.scheduled, output)
        if self._pending and self._pending[-1].sampled is None:
            self._sample(self._pending[-1])
        return [output for batch in outputs.values() for output in batch.outputs]

    def _submit(self, scheduled: Any) -> _Step:
        executed: Future[Any]
        try:
            executed = self._executor.execute_model(scheduled, non_block=True)
        except Exception as error:  # raised at this step's end, not while an earlier one ends
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

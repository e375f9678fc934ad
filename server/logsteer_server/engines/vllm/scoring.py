"""Scored rows from the hidden states of steps, over chunked and preempted prefills.

The module does not import vLLM; the model runner passes in the chunks of prompts in a step.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.jobs import Policy
from logsteer_server.engines.failures import lacks_memory
from logsteer_server.engines.vllm.extra_args import RowRequest
from logsteer_server.numerics.adjustments import TokenHistory, place_targets
from logsteer_server.numerics.hidden_rows import HiddenRows, RowBounds, read_hidden
from logsteer_server.numerics.rows import POLICY_COLUMNS, RowFiles, RowSpec

log = logging.getLogger(__name__)


class PartialRows:
    """Collect the rows of one request over the steps of a chunked or preempted prefill.

    They stay on the device of `like`, so that no step waits for a copy.
    """

    def __init__(self, num_rows: int, like: Tensor) -> None:
        self.values_RW = like.new_zeros((num_rows, like.shape[1]))
        self.present_R = np.zeros(num_rows, dtype=bool)

    def put(self, first: int, values_rW: Tensor) -> None:
        """Store rows from `first` on; a row computed again replaces its equal."""
        self.values_RW[first : first + len(values_rW)] = values_rW
        self.present_R[first : first + len(values_rW)] = True


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A chunk [begin, end) of a request's prompt, at `offset` in the step's tokens."""

    req_id: str
    request: RowRequest
    begin: int
    end: int
    prompt_len: int
    offset: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """A request's rows from `first` on, at `index_R` in the step's tokens."""

    req_id: str
    request: RowRequest
    first: int
    index_R: np.ndarray
    ends_prompt: bool

    @classmethod
    def find(cls, part: PromptPart) -> "StepRows":
        """Locate the rows of a prompt's chunk."""
        first, positions_R = part.request.find_rows(part.begin, part.end, part.prompt_len)
        index_R = positions_R + (part.offset - part.begin)
        return cls(part.req_id, part.request, first, index_R, part.end == part.prompt_len)

    @property
    def count(self) -> int:
        """The number of the request's rows in this step."""
        return len(self.index_R)

    @property
    def group(self) -> tuple[Any, ...]:
        """The key of requests whose rows are computed together; one with files is alone."""
        alone = self.request.export or self.request.reference
        return (self.request.spec, self.req_id if alone else None)

    @property
    def targets(self) -> np.ndarray:
        """The targets of these rows."""
        return self.request.targets[self.first : self.first + self.count]

    @property
    def alternatives(self) -> np.ndarray:
        """The alternatives of these rows."""
        return self.request.alternatives[self.first : self.first + self.count]

    def place(self, device: torch.device) -> list[tuple[TokenHistory, int]]:
        """Return the token history before each target, for a policy with adjustments."""
        request = self.request
        if request.spec.policy.adjustments is None:
            return []
        places = place_targets(request.prompt, request.targets, request.shares_row, device)
        return places[self.first : self.first + self.count]


HIDDEN = torch.empty(0)
"""Returned instead of rows if a prefix-cache hit skipped some of them."""
NO_MEMORY = torch.empty((0, 1))
"""Returned instead of rows if memory ran out."""
NO_FILE = torch.empty((0, 2))
"""Returned instead of rows if a file could not be read or written: a disk failed, or the request
was cancelled."""


class RowReader:
    """Compute the rows of score requests, step by step.

    `bounds` limit the memory used at once. `rank`: index among the `ranks` with the same logits;
    only the first writes files. If memory runs out or a file fails, only the requests of these rows
    fail. With several ranks, running out of memory is raised: they compute logits together, and the
    others would wait forever.
    """

    def __init__(self, bounds: RowBounds, vocab_size: int, rank: int, ranks: int) -> None:
        self._bounds = bounds
        self._vocab_size = vocab_size
        self._writes_exports = rank == 0
        self._is_alone = ranks == 1
        self._partial: dict[str, PartialRows] = {}
        self._finished: dict[str, Tensor] = {}
        self._failed: dict[str, Tensor] = {}

    def begin_step(self) -> None:
        """Drop finished rows that were not collected."""
        self._finished = {}

    def pop_finished(self) -> dict[str, Tensor]:
        """Return the flattened rows of the requests whose prompt ended in this step.

        Their copy to the host completes when the device has computed the step. Where rows could not
        be computed, HIDDEN, NO_MEMORY or NO_FILE says why.
        """
        finished, self._finished = self._finished, {}
        return finished

    def read(
        self, parts: Sequence[PromptPart], hidden_TD: Tensor, project: Callable[[Tensor], Tensor]
    ) -> None:
        """Compute the rows of a step's prompts; `project` maps hidden states to logits.

        Groups are computed in order of appearance, so that all tensor-parallel ranks call `project`
        in the same order.
        """
        steps = [StepRows.find(part) for part in parts]
        for group in dict.fromkeys(step.group for step in steps):
            members = [step for step in steps if step.group == group]
            if not self._try_compute(members, hidden_TD, project) and len(members) > 1:
                for member in members:
                    self._try_compute([member], hidden_TD, project)

    def _try_compute(
        self, steps: list[StepRows], hidden_TD: Tensor, project: Callable[[Tensor], Tensor]
    ) -> bool:
        """Compute the rows of a group; return False if that failed. A single request then fails."""
        try:
            self._compute(steps, hidden_TD, project)
        except Exception as error:
            if not isinstance(error, OSError) and not (self._is_alone and lacks_memory(error)):
                raise
            if not isinstance(error, FileNotFoundError):  # the request was cancelled
                log.exception("the rows of %d requests could not be read", len(steps))
            reason = NO_FILE if isinstance(error, OSError) else NO_MEMORY
        else:
            return True
        if len(steps) == 1:
            self._failed[steps[0].req_id] = reason
            if steps[0].ends_prompt:
                self._finish(steps[0])
        return False

    def read_costliest(self, hidden_TD: Tensor, project: Callable[[Tensor], Tensor]) -> None:
        """Compute rows of the largest step in the way that uses the most memory.

        vLLM measures it, and leaves that memory free beside the key-value cache. Rows beyond one
        product with the head use no more. With states of zeros all tokens are equally probable, so
        that the cut of top_p is not among the most probable tokens, the costliest case.
        """
        spec = RowSpec(tuple(POLICY_COLUMNS), 1, Policy(top_p=0.9), eos_ids=(0,))
        count = self._bounds.rows_per_product(self._vocab_size, spec, hidden_TD.device)
        tokens = len(hidden_TD)
        rows = HiddenRows.take(hidden_TD, np.arange(tokens), np.zeros(tokens, np.int32))
        some = HiddenRows.of(rows.hidden_RD[:count], rows.targets_T[:count])
        read_hidden(some, project, self._vocab_size, spec, self._bounds)

    def keep_only(self, req_ids: Collection[str]) -> None:
        """Drop the partial rows of all requests except these."""
        for req_id in self._partial.keys() - req_ids:
            del self._partial[req_id]
        for req_id in self._failed.keys() - req_ids:
            del self._failed[req_id]

    def _compute(
        self, steps: list[StepRows], hidden_TD: Tensor, project: Callable[[Tensor], Tensor]
    ) -> None:
        """Compute the rows of a group's requests together, and store them by request."""
        with_rows = [step for step in steps if step.count]
        if with_rows:
            index_R = np.concatenate([step.index_R for step in with_rows])
            targets_R = np.concatenate([step.targets for step in with_rows])
            before = [place for step in with_rows for place in step.place(hidden_TD.device)]
            spec = with_rows[0].request.spec
            others = [step.alternatives for step in with_rows] if spec.alternatives else ()
            values_RW = read_hidden(
                HiddenRows.take(hidden_TD, index_R, targets_R, before, others),
                project,
                self._vocab_size,
                spec,
                self._bounds,
                self._find_files(with_rows[0], hidden_TD.shape[-1]),
            )
            host_RW = values_RW.to("cpu", non_blocking=True)
            start = 0
            for step in with_rows:
                own = slice(start, start + step.count)
                self._store(step, values_RW[own], host_RW[own])
                start += step.count
        for step in steps:
            if step.ends_prompt and step.req_id not in self._finished:
                self._finish(step)

    def _find_files(self, step: StepRows, hidden_size: int) -> RowFiles:
        request, sizes = step.request, (self._vocab_size, hidden_size)
        export = request.export if self._writes_exports else None
        return RowFiles.open(export, request.reference, request.exchange, sizes, step.first)

    def _store(self, step: StepRows, values_rW: Tensor, host_rW: Tensor) -> None:
        if step.req_id in self._failed:
            return
        if step.ends_prompt and step.count == len(step.request.targets):
            self._finished[step.req_id] = host_rW.flatten()
            self._partial.pop(step.req_id, None)
            return
        partial = self._partial.get(step.req_id)
        if partial is None:
            partial = PartialRows(len(step.request.targets), values_rW)
            self._partial[step.req_id] = partial
        partial.put(step.first, values_rW)

    def _finish(self, step: StepRows) -> None:
        """Move a request's collected rows, or its failure, to the finished ones."""
        partial = self._partial.pop(step.req_id, None)
        if step.req_id in self._failed:
            self._finished[step.req_id] = self._failed.pop(step.req_id)
        elif partial is not None and partial.present_R.all():
            self._finished[step.req_id] = partial.values_RW.flatten().to("cpu", non_blocking=True)
        else:
            self._finished[step.req_id] = HIDDEN

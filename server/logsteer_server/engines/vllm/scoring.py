"""Scored rows out of the hidden states of steps, over chunked and preempted prefills.

Free of vLLM, whose model runner says here which parts of prompts a step reads.
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
from logsteer_server.numerics.adjustments import TokenHistory, place_targets
from logsteer_server.numerics.hidden_rows import HiddenRows, RowBounds, read_hidden
from logsteer_server.numerics.rows import POLICY_COLUMNS, RowFiles, RowSpec

log = logging.getLogger(__name__)


class PartialRows:
    """Gather the rows of one request over the steps of a chunked or preempted prefill.

    They stay on the device of `like`, so that no step waits for them.
    """

    def __init__(self, num_rows: int, like: Tensor) -> None:
        self.values_RW = like.new_zeros((num_rows, like.shape[1]))
        self.present_R = np.zeros(num_rows, dtype=bool)

    def put(self, first: int, values_rW: Tensor) -> None:
        """Store rows `first` onward; a row that is read again replaces its equal."""
        self.values_RW[first : first + len(values_rW)] = values_rW
        self.present_R[first : first + len(values_rW)] = True


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What one request wants: the targets of its last rows, and what is read from them.

    `alternatives`: the further tokens of each [R, K]. `prompt`: the tokens in front of the targets,
    for a policy with adjustments.
    """

    targets: np.ndarray
    alternatives: np.ndarray
    shares_row: bool
    spec: RowSpec
    prompt: np.ndarray
    export: str | None
    reference: str | None
    exchange: str = "rows"

    @classmethod
    def parse(cls, wanted: dict[str, Any]) -> "RowRequest":
        """Parse what `describe_rows` put into the request's extra arguments."""
        return cls(
            targets := np.frombuffer(wanted["targets"], dtype=np.int32),
            np.frombuffer(wanted["alternatives"], dtype=np.int32).reshape(len(targets), -1),
            wanted["shares_row"],
            wanted["spec"],
            np.frombuffer(wanted["prompt"], dtype=np.int32),
            wanted["export"],
            wanted["reference"],
            wanted["exchange"],
        )

    def find_rows(self, begin: int, end: int, prompt_len: int) -> tuple[int, np.ndarray]:
        """Return which rows lie in [begin, end): the first one's place, and each one's position.

        For the 3 targets of a prompt of 8 tokens, which follow the tokens at positions 5, 6 and 7,
        [4, 7) has the rows at 5 and 6: the first one's place is 0. [7, 8) has the one at 7: place
        2. Targets that share a row have their R rows all at position 7.
        """
        if self.shares_row:
            count = len(self.targets) if end == prompt_len else 0
            return 0, np.full(count, prompt_len - 1)
        first_row = prompt_len - len(self.targets)
        first = max(begin, first_row)
        return first - first_row, np.arange(first, max(first, end))


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens [begin, end) of a request's prompt, which lie from `offset` on in a step's tokens.

    `wanted`: what `describe_rows` says of the request.
    """

    req_id: str
    wanted: dict[str, Any]
    begin: int
    end: int
    prompt_len: int
    offset: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows from `first` on of a request, which lie at `index_R` in a step's tokens."""

    req_id: str
    wanted: RowRequest
    first: int
    index_R: np.ndarray
    ends_prompt: bool

    @classmethod
    def find(cls, part: PromptPart) -> "StepRows":
        """Locate the rows of a part of a prompt."""
        wanted = RowRequest.parse(part.wanted)
        first, positions_R = wanted.find_rows(part.begin, part.end, part.prompt_len)
        index_R = positions_R + (part.offset - part.begin)
        return cls(part.req_id, wanted, first, index_R, part.end == part.prompt_len)

    @property
    def count(self) -> int:
        """How many rows of the request this step has."""
        return len(self.index_R)

    @property
    def group(self) -> tuple[Any, ...]:
        """What requests that are read together have in common; one with files is read alone."""
        alone = self.wanted.export or self.wanted.reference
        return (self.wanted.spec, self.req_id if alone else None)

    @property
    def targets(self) -> np.ndarray:
        """The targets of these rows."""
        return self.wanted.targets[self.first : self.first + self.count]

    @property
    def alternatives(self) -> np.ndarray:
        """The alternatives of these rows."""
        return self.wanted.alternatives[self.first : self.first + self.count]

    def place(self, device: torch.device) -> list[tuple[TokenHistory, int]]:
        """Return the tokens before each target, for a policy with adjustments."""
        wanted = self.wanted
        if wanted.spec.policy.adjustments is None:
            return []
        places = place_targets(wanted.prompt, wanted.targets, wanted.shares_row, device)
        return places[self.first : self.first + self.count]


HIDDEN = torch.empty(0)
"""In place of rows of which the prefix cache has hidden some."""
NO_MEMORY = torch.empty((0, 1))
"""In place of rows over which memory ran out."""
NO_FILE = torch.empty((0, 2))
"""In place of rows whose file could not be read or written: a disk failed, or its request ended."""


class RowReader:
    """Compute the rows of score requests, step by step.

    `bounds` are of the memory that this takes at once. `rank`: of the `ranks` that have the same
    logits, of which the first one alone writes files. Where memory runs out over rows, or a file is
    at fault, the requests whose rows they are fail and no others. Memory of one of several ranks is
    another matter: they compute logits together, and the others would wait for ever.
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

    def take_finished(self) -> dict[str, Tensor]:
        """Return the rows of the requests whose prompt ended in this step, each flattened.

        They are copied to the host, and are there once the device has computed the step. A request
        has none where the prefix cache has hidden some of its rows.
        """
        finished, self._finished = self._finished, {}
        return finished

    def read(
        self, parts: Sequence[PromptPart], hidden_TD: Tensor, project: Callable[[Tensor], Tensor]
    ) -> None:
        """Read the rows of a step's prompts; `project` maps hidden states to logits.

        Every tensor-parallel rank calls `project` alike: groups are read in order of appearance.
        """
        steps = [StepRows.find(part) for part in parts]
        for group in dict.fromkeys(step.group for step in steps):
            members = [step for step in steps if step.group == group]
            if not self._try(members, hidden_TD, project) and len(members) > 1:
                for member in members:
                    self._try([member], hidden_TD, project)

    def _try(
        self, steps: list[StepRows], hidden_TD: Tensor, project: Callable[[Tensor], Tensor]
    ) -> bool:
        """Read the rows of a group; return whether that could be done. One alone fails if not."""
        try:
            self._read(steps, hidden_TD, project)
        except Exception as error:
            if not isinstance(error, OSError) and not (self._is_alone and lacks_memory(error)):
                raise
            if not isinstance(error, FileNotFoundError):  # as where the request was cancelled
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
        """Read rows of a step as large as steps get, in the way that takes the most memory.

        vLLM measures it, and leaves that much free beside the key-value cache. More rows than go
        through the head at once take no more; states of zeros have rows whose tokens are all
        equally probable, of which no cut is found among the most probable ones.
        """
        spec = RowSpec(tuple(POLICY_COLUMNS), 1, Policy(top_p=0.9), eos_ids=(0,))
        count = self._bounds.rows_per_product(self._vocab_size, spec, hidden_TD.device)
        tokens = len(hidden_TD)
        rows = HiddenRows.take(hidden_TD, np.arange(tokens), np.zeros(tokens, np.int32))
        some = HiddenRows.of(rows.hidden_RD[:count], rows.targets_T[:count])
        read_hidden(some, project, self._vocab_size, spec, self._bounds)

    def keep_only(self, req_ids: Collection[str]) -> None:
        """Drop the rows of requests that are no longer there."""
        for req_id in self._partial.keys() - req_ids:
            del self._partial[req_id]
        for req_id in self._failed.keys() - req_ids:
            del self._failed[req_id]

    def _read(
        self, steps: list[StepRows], hidden_TD: Tensor, project: Callable[[Tensor], Tensor]
    ) -> None:
        """Read the rows of all requests of a group together, and store them by request."""
        with_rows = [step for step in steps if step.count]
        if with_rows:
            index_R = np.concatenate([step.index_R for step in with_rows])
            targets_R = np.concatenate([step.targets for step in with_rows])
            before = [place for step in with_rows for place in step.place(hidden_TD.device)]
            spec = with_rows[0].wanted.spec
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
        wanted, sizes = step.wanted, (self._vocab_size, hidden_size)
        export = wanted.export if self._writes_exports else None
        return RowFiles.open(export, wanted.reference, wanted.exchange, sizes, step.first)

    def _store(self, step: StepRows, values_rW: Tensor, host_rW: Tensor) -> None:
        if step.req_id in self._failed:
            return
        if step.ends_prompt and step.count == len(step.wanted.targets):
            self._finished[step.req_id] = host_rW.flatten()
            self._partial.pop(step.req_id, None)
            return
        partial = self._partial.get(step.req_id)
        if partial is None:
            partial = PartialRows(len(step.wanted.targets), values_rW)
            self._partial[step.req_id] = partial
        partial.put(step.first, values_rW)

    def _finish(self, step: StepRows) -> None:
        """Return and clear a request's rows, or its failure."""
        partial = self._partial.pop(step.req_id, None)
        if step.req_id in self._failed:
            self._finished[step.req_id] = self._failed.pop(step.req_id)
        elif partial is not None and partial.present_R.all():
            self._finished[step.req_id] = partial.values_RW.flatten().to("cpu", non_blocking=True)
        else:
            self._finished[step.req_id] = HIDDEN

"""Queues of jobs that wait, one class for each kind of work, and the batches taken from them.

A queue owns all that is special to its kind: which jobs it accepts, which of them share a batch,
and how a batch is run. The engine only gives queues their turns. Most batches are read in one
forward pass: sequences are padded on the right, where no token looks, so padding needs no mask and
changes nothing. Axis letters: B sequences, T tokens, D hidden size.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.batches import find_failure
from logsteer_server.contract.jobs import Job, JobResult, Output
from logsteer_server.contract.plan import SteeringTrace
from logsteer_server.engines.tlens.captures import CapturedRow, hook_captures
from logsteer_server.engines.tlens.causal import CausalModel
from logsteer_server.engines.tlens.model import BridgeModel
from logsteer_server.engines.tlens.parameters import DeltaCache
from logsteer_server.engines.tlens.points import HookFunction, Point
from logsteer_server.engines.tlens.steering import BatchSteering, SteeredRow
from logsteer_server.engines.tlens.tokens import PassTokens

Results = list[tuple[int, JobResult]]


@dataclass(slots=True)
class Entry:
    """A job that was accepted, and what its queue has found out about it.

    `steered`: how its row is steered; `points`: the activations that are differentiated by;
    `captured`: those that are captured. One that is `alone` shares no batch: it was in one that
    broke.
    """

    job_id: int
    job: Any
    steered: SteeredRow | None = None
    points: tuple[Point, ...] = ()
    alone: bool = False
    captured: CapturedRow | None = None

    @property
    def trace(self) -> SteeringTrace | None:
        """What was measured of the steering, once all tokens were read."""
        return self.steered.trace(len(self.job.tokens)) if self.steered else None

    def conclude(self, output: Output) -> tuple[int, JobResult]:
        """Return the job's result: the output with activations, or why that is not to be given."""
        if self.captured is not None:
            output = replace(output, activations=self.captured.finish())
        return self.job_id, find_failure(self.job, output) or output


E = TypeVar("E", bound=Entry)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one batch holds at most: tokens with their padding, and rows.

    `max_held_tokens`: of all jobs that the engine has, with those that they may generate: memory
    of running continuations is taken until they end.
    `override_cache_bytes`: of directions that stay in memory for the next request, and as many of
    parameters with a direction or adapter added.
    """

    max_batch_tokens: int = 4096
    max_batch_rows: int = 64
    max_held_tokens: int = 65_536
    override_cache_bytes: int = 2**30

    @classmethod
    def parse(cls, engine_args: dict[str, Any]) -> "EngineLimits":
        """Return the limits among an engine's arguments. Errors: ValueError for anything else."""
        known = tuple(cls.__slots__)
        for name, value in engine_args.items():
            if name not in known:
                raise ValueError(f"engine_args: unknown {name!r}; known are {', '.join(known)}")
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"engine_args: {name} must be a whole number from 1 on")
        return cls(**engine_args)


class JobQueue(ABC, Generic[E]):
    """Jobs of one kind that wait: longest first within those that came since the last were taken.

    So neighbours in a batch are of like length, and still none waits for ever. The longest job
    says how many rows a batch has. With at most 100 tokens a batch, jobs of 10, 40, 25 and 30
    tokens are taken as

        40 30     100 // 40 = 2 rows
        25 10     100 // 25 = 4 rows, and no more are there

    A job of another group than the first one's is passed over and keeps its place.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._arrived: list[E] = []
        self._sorted: deque[E] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a job waits that may start now."""
        return bool(self._sorted or self._arrived)

    @property
    def num_waiting(self) -> int:
        """Jobs that wait."""
        return len(self._sorted) + len(self._arrived)

    @property
    def _first(self) -> E:
        """The job that the next batch begins with; one must wait."""
        return self._sorted[0] if self._sorted else max(self._arrived, key=_count_tokens)

    def add(self, job_id: int, job: Any, alone: bool = False) -> None:
        """Take a job of the queue's kind in, to be run `alone` where it was in a batch that broke.

        Errors: RefusedJobError where it cannot run.
        """
        entry = self._accept(job_id, job)
        entry.alone = alone
        self._arrived.append(entry)

    def take(self) -> list[E]:
        """Take the next batch out: jobs of one group, within the limits."""
        if not self._sorted:
            self._sorted.extend(sorted(self._arrived, key=_count_tokens, reverse=True))
            self._arrived = []
        batch: list[E] = []
        passed: list[E] = []
        first = self._sorted[0]
        group = self._group(first)
        limit = max(1, self._limits.max_batch_tokens // max(1, _count_tokens(first)))
        limit = 1 if first.alone else min(limit, self._limits.max_batch_rows)
        while self._sorted and len(batch) < limit:
            entry = self._sorted.popleft()
            is_like = self._group(entry) == group and not entry.alone
            (batch if is_like or entry is first else passed).append(entry)
        self._sorted.extendleft(reversed(passed))
        return batch

    def drop(self, job_ids: frozenset[int]) -> None:
        """Forget jobs."""
        self._arrived = [entry for entry in self._arrived if entry.job_id not in job_ids]
        self._sorted = deque(entry for entry in self._sorted if entry.job_id not in job_ids)

    @abstractmethod
    def _accept(self, job_id: int, job: Any) -> E:
        """Return the entry of a job. Errors: RefusedJobError where it cannot run."""

    def _group(self, entry: E) -> object:
        """Return what all jobs of a batch have in common: equal values share one."""
        return entry.job.delta

    @abstractmethod
    def run(self, batch: list[E]) -> Results:
        """Return the results of a batch's jobs. Errors: RefusedJobError, for all of them."""


def _count_tokens(entry: Entry) -> int:
    return len(entry.job.tokens)


def accept_row(model: CausalModel, job: Job) -> SteeredRow | None:
    """Return how a job's row is steered, None for a job without a plan.

    Errors: RefusedJobError where tokens, plan or parameter delta do not fit the model.
    """
    model.check_tokens(job.tokens)
    steered = None
    if job.plan is not None:
        steered = SteeredRow.place(job.plan, job.prompt_len, model.points)
    if job.delta:
        model.check_delta(steered.points if steered else [], job.delta.cast)
    return steered


class ModelQueue(JobQueue[Entry]):
    """Jobs that are read by the model in batches, under the parameters that they have in common."""

    def __init__(self, model: BridgeModel, deltas: DeltaCache, limits: EngineLimits) -> None:
        super().__init__(limits)
        self._model = model
        self._deltas = deltas

    def run(self, batch: list[Entry]) -> Results:
        """Return the results of a batch's jobs. Errors: RefusedJobError, for all of them."""
        parameters = self._deltas.apply(batch[0].job.delta)
        return self._model.parameters.call_with(parameters, lambda: self._compute(batch))

    @abstractmethod
    def _compute(self, batch: Sequence[Entry]) -> Results:
        """Return the results of a batch, whose parameters the model has now."""


def pad_right(sequences: Sequence[np.ndarray]) -> Tensor:
    """Return the sequences as rows of one int64 tensor [B, T], zeros behind the shorter ones."""
    tokens_BT = torch.zeros((len(sequences), max(map(len, sequences))), dtype=torch.int64)
    for b, tokens in enumerate(sequences):
        tokens_BT[b, : len(tokens)] = torch.from_numpy(tokens)
    return tokens_BT


@contextmanager
def hooked(
    model: CausalModel,
    rows: Sequence[Entry],
    steering: BatchSteering,
    tokens: PassTokens,
    hooks: Sequence[tuple[Point, HookFunction]] = (),
) -> Iterator[None]:
    """Steer, probe and capture a batch's rows in the one forward pass of this context.

    `hooks` act after the steering. Captures are taken before or after both.
    """
    captured = [row.captured for row in rows]
    before, after = (hook_captures(captured, tokens, before=b) for b in (True, False))
    with model.hooked([*before, *steering.hooks(tokens), *hooks, *after]):
        yield
    steering.end_pass()


def read_batch(
    model: CausalModel,
    batch: Sequence[Entry],
    hooks: Sequence[tuple[Point, HookFunction]] = (),
) -> Tensor:
    """Return the hidden states [B, T, D] of a batch, steered, with `hooks` after the steering.

    The jobs have one parameter delta, which is applied. Afterwards the traces of the batch's
    steered rows have their measurements. Errors: as `CausalModel.read`.
    """
    tokens_BT = pad_right([entry.job.tokens for entry in batch])
    lengths_B = np.array([len(entry.job.tokens) for entry in batch])
    tokens = PassTokens.of(np.zeros_like(lengths_B), lengths_B, tokens_BT.shape[1])
    steering = BatchSteering([entry.steered for entry in batch])
    with hooked(model, batch, steering, tokens, hooks):
        hidden_BTD = model.read(tokens_BT, cast=batch[0].job.delta.cast)
    steering.collect()
    return hidden_BTD

"""Queues of waiting jobs, one class for each kind of job, and their batches.

A queue decides which jobs it accepts, which of them share a batch, and how to run a batch. The
engine only gives the queues their turns. Most batches take one forward pass: sequences are padded
on the right, which no token attends to, so padding needs no mask and changes nothing. Axis letters:
B sequences, T tokens, D hidden size.
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
from logsteer_server.engines.tlens.parameters import DeltaCache
from logsteer_server.engines.tlens.points import HookFunction, PassTokens, Point
from logsteer_server.engines.tlens.steering import BatchSteering, SteeredRow

Results = list[tuple[int, JobResult]]


@dataclass(slots=True)
class Entry:
    """An accepted job with its parts resolved in the model.

    `steered`: its steering; `points`: the activations to differentiate with respect to;
    `captured`: its captures. An entry that is `alone` shares no batch: its last batch raised.
    """

    job_id: int
    job: Any
    steered: SteeredRow | None = None
    points: tuple[Point, ...] = ()
    alone: bool = False
    captured: CapturedRow | None = None

    @property
    def trace(self) -> SteeringTrace | None:
        """The measurements of the steering, once all tokens were read."""
        return self.steered.trace(len(self.job.tokens)) if self.steered else None

    def conclude(self, output: Output) -> tuple[int, JobResult]:
        """Return the job's result: the output with its captures, or the reason for a failure."""
        if self.captured is not None:
            output = replace(output, activations=self.captured.take())
        return self.job_id, find_failure(self.job, output) or output


E = TypeVar("E", bound=Entry)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The most tokens, padding included, and rows of one batch.

    `max_held_tokens`: the most tokens of all jobs in the engine, generated ones included: running
    continuations hold memory until they end.
    `override_cache_bytes`: the most memory for directions that later requests may use again, and
    as much for parameters with a direction or adapter added.
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
    """Waiting jobs of one kind. Jobs that arrive together are sorted, longest first.

    So the jobs of a batch have similar lengths, and none waits for ever. The longest job sets the
    number of rows. With at most 100 tokens a batch, jobs of 10, 40, 25 and 30 tokens make the
    batches

        40 30     100 // 40 = 2 rows
        25 10     100 // 25 = 4 rows, of which 2 are filled

    Jobs of another group than the first one's keep their places.
    """

    def __init__(self, model: CausalModel, deltas: DeltaCache, limits: EngineLimits) -> None:
        self._model = model
        self._deltas = deltas
        self._limits = limits
        self._arrived: list[E] = []
        self._sorted: deque[E] = deque()

    @property
    def has_work(self) -> bool:
        """Whether there is a batch to run."""
        return bool(self._sorted or self._arrived)

    @property
    def num_waiting(self) -> int:
        """The number of waiting jobs."""
        return len(self._sorted) + len(self._arrived)

    @property
    def num_running(self) -> int:
        """The number of jobs that have begun and not ended."""
        return 0

    @property
    def _first(self) -> E:
        """The first job of the next batch; there must be one."""
        return self._sorted[0] if self._sorted else max(self._arrived, key=_count_tokens)

    def add(self, job_id: int, job: Any, alone: bool = False) -> None:
        """Accept a job, which runs `alone` after its batch has raised.

        Errors: RefusedJobError where it cannot run.
        """
        entry = self._accept(job_id, job)
        entry.alone = alone
        self._arrived.append(entry)

    def take(self) -> list[E]:
        """Remove and return the next batch: jobs of one group, within the limits."""
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
        """Drop waiting jobs."""
        self._arrived = [entry for entry in self._arrived if entry.job_id not in job_ids]
        self._sorted = deque(entry for entry in self._sorted if entry.job_id not in job_ids)

    @abstractmethod
    def _accept(self, job_id: int, job: Any) -> E:
        """Return a job's entry. Errors: RefusedJobError where it cannot run."""

    def _group(self, entry: E) -> object:
        """Return the key of a job's group: jobs with equal keys may share a batch."""
        return entry.job.delta

    @abstractmethod
    def run(self, batch: list[E]) -> Results:
        """Run a batch and return its results. Errors: RefusedJobError, for all its jobs."""


def _count_tokens(entry: Entry) -> int:
    return len(entry.job.tokens)


def accept_row(model: CausalModel, job: Job) -> SteeredRow | None:
    """Return a job's steering in the model, None for a job without a plan.

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
    """Jobs that take one forward pass a batch, under the batch's parameter delta."""

    def _accept(self, job_id: int, job: Any) -> Entry:
        steered = accept_row(self._model, job)
        return Entry(job_id, job, steered, captured=CapturedRow.place(self._model, job))

    def run(self, batch: list[Entry]) -> Results:
        """Run a batch and return its results. Errors: RefusedJobError, for all its jobs."""
        parameters = self._deltas.apply(batch[0].job.delta)
        return self._model.parameters.call_with(parameters, lambda: self._compute(batch))

    @abstractmethod
    def _compute(self, batch: Sequence[Entry]) -> Results:
        """Return the results of a batch whose parameter delta is applied."""


def pad_right(sequences: Sequence[np.ndarray]) -> Tensor:
    """Return the sequences as rows of an int64 tensor [B, T], shorter ones padded with zeros."""
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

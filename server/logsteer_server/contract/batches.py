"""Score jobs of one call and their outputs, packed into a few arrays instead of an object per job.

Jobs that differ only in their tokens are concatenated, and so are their outputs:

    tokens         5 6 7 | 5 6 | 9 3 8       three jobs
    token_starts   0       3     5       8

Both are sequences, so that code for single jobs can index them.

A model changed for a job (steered, or with other parameters) may exceed the range of its dtype. The
result is then NaN, and the job fails. An unchanged model may exceed it, too, on some texts; its
scores stay NaN, and become null with a flag.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple, Self, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.gradients import GradientOutput
from logsteer_server.contract.jobs import (
    GenerateOutput,
    Ids,
    Job,
    JobFailure,
    JobResult,
    Output,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.contract.plan import Readings, SteeringTrace

T = TypeVar("T")

Starts = npt.NDArray[np.int64]
"""[N + 1]: the start of each of N entries, then the end of the last."""
Indices = npt.NDArray[np.int64]


def find_starts(lengths: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Starts:
    """Return the starts of concatenated entries with these lengths."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def gather(values: npt.NDArray[Any], starts: Starts, indices: Indices) -> npt.NDArray[Any]:
    """Return the entries at `indices` of concatenated `values`, concatenated again."""
    lengths = (starts[1:] - starts[:-1])[indices]
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    places = np.arange(total) + np.repeat(starts[:-1][indices] - (ends - lengths), lengths)
    found: npt.NDArray[Any] = values[places]
    return found


class _Entries(Sequence[T]):
    """Entries packed into arrays, and built on access."""

    __slots__ = ()

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> T | Self:
        """Return the entry at an index, whose arrays are views, or the entries of a slice."""
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._make(index % len(self))

    def select(self, indices: Indices) -> Self:
        """Return the entries at these indices."""
        in_order = len(indices) == len(self) and (indices == np.arange(len(self))).all()
        return self if in_order else self._gather(indices)

    @abstractmethod
    def _make(self, index: int) -> T: ...

    @abstractmethod
    def _gather(self, indices: Indices) -> Self: ...


@dataclass(frozen=True, slots=True, eq=False)
class ScoreJobs(_Entries[ScoreJob]):
    """N score jobs that differ only in their tokens and targets.

    `like` has all other fields; its tokens, targets, alternatives and `shares_row` are unused.
    `shares_row`: [N]. `alternatives`: [targets of all jobs, K].
    """

    like: ScoreJob
    tokens: Ids
    token_starts: Starts
    targets: Ids
    target_starts: Starts
    shares_row: npt.NDArray[np.bool_]
    alternatives: Ids | None = None

    @classmethod
    def of(cls, jobs: Sequence[ScoreJob]) -> "ScoreJobs":
        """Pack jobs, at least one, that differ from the first only in tokens and targets."""
        others = [job.alternatives for job in jobs if job.alternatives is not None]
        return cls(
            jobs[0],
            np.concatenate([job.tokens for job in jobs]),
            find_starts([len(job.tokens) for job in jobs]),
            np.concatenate([job.targets for job in jobs]),
            find_starts([len(job.targets) for job in jobs]),
            np.array([job.shares_row for job in jobs]),
            np.concatenate(others) if others else None,
        )

    def __len__(self) -> int:
        """Return N."""
        return len(self.shares_row)

    def _make(self, index: int) -> ScoreJob:
        read = slice(self.token_starts[index], self.token_starts[index + 1])
        scored = slice(self.target_starts[index], self.target_starts[index + 1])
        return replace(
            self.like,
            tokens=self.tokens[read],
            targets=self.targets[scored],
            shares_row=bool(self.shares_row[index]),
            alternatives=None if self.alternatives is None else self.alternatives[scored],
        )

    def _gather(self, indices: Indices) -> "ScoreJobs":
        others = self.alternatives
        return replace(
            self,
            tokens=gather(self.tokens, self.token_starts, indices),
            token_starts=find_starts(np.diff(self.token_starts)[indices]),
            targets=gather(self.targets, self.target_starts, indices),
            target_starts=find_starts(np.diff(self.target_starts)[indices]),
            shares_row=self.shares_row[indices],
            alternatives=None if others is None else gather(others, self.target_starts, indices),
        )

    def make_fingerprints(self) -> list[bytes | None]:
        """Return each job's `fingerprint`."""
        like = self.like
        options = like.write_options()
        if options is None:
            return [None] * len(self)
        if like.plan is not None or self.alternatives is not None:
            return [job.fingerprint for job in self]
        tokens, targets = self.tokens.tobytes(), self.targets.tobytes()
        read, scored = (4 * self.token_starts).tolist(), (4 * self.target_starts).tolist()
        return [
            like.digest(options, tokens[first:last], targets[begin:end], shares_row, b"")
            for first, last, begin, end, shares_row in zip(
                read, read[1:], scored, scored[1:], self.shares_row.tolist(), strict=False
            )
        ]


OWN = {"tokens", "targets", "shares_row", "alternatives"}
"""Fields in which packed jobs differ."""
OBJECTS = ("plan", "override", "adapter", "capture")
"""Fields that packed jobs share as one object."""
_get_objects = attrgetter(*OBJECTS)
_get_options = attrgetter(*(f.name for f in fields(ScoreJob) if f.name not in {*OWN, *OBJECTS}))


def pack_jobs(jobs: Sequence[Job]) -> Sequence[Job]:
    """Pack jobs into arrays if all are score jobs that differ only in tokens and targets."""
    if isinstance(jobs, ScoreJobs) or not jobs:
        return jobs
    scored = [job for job in jobs if type(job) is ScoreJob]
    kinds = {
        (
            *_get_options(job),
            *map(id, _get_objects(job)),
            None if job.alternatives is None else job.alternatives.shape[1],
        )
        for job in scored
    }
    return ScoreJobs.of(scored) if len(kinds) == 1 and len(scored) == len(jobs) else jobs


def change_all(jobs: Sequence[Job], change: Callable[[Any], Any]) -> Sequence[Any]:
    """Apply the same change, which must not depend on tokens or alter them, to all jobs."""
    if isinstance(jobs, ScoreJobs):
        return replace(jobs, like=change(jobs.like))
    return [change(job) for job in jobs]


def read_all(jobs: Sequence[Job]) -> Sequence[Any]:
    """Return jobs that have all values of the fields that `change_all` changes: one if packed."""
    return [jobs.like] if isinstance(jobs, ScoreJobs) else jobs


def name_contents(jobs: Sequence[Job]) -> bool:
    """Return whether any job has a stored file: an override or an adapter."""
    return any(job.override or job.adapter for job in read_all(jobs))


def select_jobs(jobs: Sequence[Job], indices: Indices) -> Sequence[Job]:
    """Return the jobs at these indices."""
    if isinstance(jobs, ScoreJobs):
        return jobs.select(indices)
    return [jobs[index] for index in indices]


def make_fingerprints(jobs: Sequence[Job]) -> list[bytes | None]:
    """Return each job's `fingerprint`."""
    if isinstance(jobs, ScoreJobs):
        return jobs.make_fingerprints()
    return [job.fingerprint for job in jobs]


def count_positions(jobs: Sequence[Job]) -> list[int]:
    """Return each job's `num_positions`."""
    if isinstance(jobs, ScoreJobs):
        found: list[int] = np.diff(jobs.token_starts).tolist()
        return found
    return [job.num_positions for job in jobs]


def sum_expected(jobs: Sequence[Job]) -> int:
    """Return the sum of the jobs' `num_expected`."""
    if isinstance(jobs, ScoreJobs):
        return len(jobs.tokens)
    return sum(job.num_expected for job in jobs)


@dataclass(frozen=True, slots=True, eq=False)
class ScoreOutputs(_Entries[ScoreOutput]):
    """Outputs of N score jobs with the same columns.

    `columns`: the rows of all jobs, concatenated. `traces`, `readings`: by output, or None.
    """

    columns: dict[str, npt.NDArray[Any]]
    row_starts: Starts
    cached_tokens: npt.NDArray[np.int32]
    traces: Sequence[SteeringTrace | None]
    readings: Sequence[Readings | None]

    @classmethod
    def of(cls, outputs: Sequence[ScoreOutput]) -> "ScoreOutputs":
        """Pack outputs, at least one, with the same columns."""
        if isinstance(outputs, ScoreOutputs):
            return outputs
        return cls(
            {
                name: np.concatenate([output.columns[name] for output in outputs])
                for name in outputs[0].columns
            },
            find_starts([len(next(iter(output.columns.values()))) for output in outputs]),
            np.array([output.cached_tokens for output in outputs], dtype=np.int32),
            [output.trace for output in outputs],
            [output.readings for output in outputs],
        )

    @classmethod
    def join(cls, batches: Sequence[Sequence[ScoreOutput]]) -> "ScoreOutputs":
        """Concatenate batches of outputs, at least one, with the same columns."""
        parts = list(map(cls.of, batches))
        first = parts[0]
        if len(parts) == 1:
            return first
        return cls(
            {
                name: np.concatenate([part.columns[name] for part in parts])
                for name in first.columns
            },
            find_starts(np.concatenate([np.diff(part.row_starts) for part in parts])),
            np.concatenate([part.cached_tokens for part in parts]),
            [trace for part in parts for trace in part.traces],
            [reading for part in parts for reading in part.readings],
        )

    def __len__(self) -> int:
        """Return N."""
        return len(self.cached_tokens)

    def _make(self, index: int) -> ScoreOutput:
        rows = slice(self.row_starts[index], self.row_starts[index + 1])
        return ScoreOutput(
            {name: values[rows] for name, values in self.columns.items()},
            cached_tokens=int(self.cached_tokens[index]),
            trace=self.traces[index],
            readings=self.readings[index],
        )

    def _gather(self, indices: Indices) -> "ScoreOutputs":
        chosen, starts = indices.tolist(), self.row_starts
        return ScoreOutputs(
            {name: gather(values, starts, indices) for name, values in self.columns.items()},
            find_starts(np.diff(self.row_starts)[indices]),
            self.cached_tokens[indices],
            [self.traces[n] for n in chosen],
            [self.readings[n] for n in chosen],
        )


def add_between(values: npt.NDArray[Any], begins: Starts, ends: Starts) -> npt.NDArray[Any]:
    """Return the sum of the values in each [begin, end); every end is past its begin."""
    padded = np.append(values, values.dtype.type(0))  # so that the last end is a valid index
    sums: npt.NDArray[Any] = np.add.reduceat(padded, np.stack([begins, ends], -1).ravel())[::2]
    return sums


def pack_results(results: Sequence[JobResult]) -> Sequence[JobResult]:
    """Pack results of one call into arrays if all have the same columns."""
    shapes = {_describe_shape(result) for result in results}
    if len(shapes) > 1 or None in shapes:
        return results
    return ScoreOutputs.of(cast(Sequence[ScoreOutput], results))


def _describe_shape(result: JobResult) -> tuple[Hashable, ...] | None:
    """Return the columns of an output with their shapes per row; None for a result without columns,
    or with activations.
    """
    if not isinstance(result, ScoreOutput) or result.activations is not None:
        return None
    return tuple((name, values.shape[1:]) for name, values in result.columns.items())


class ResultPart(NamedTuple):
    """Results of some jobs of a call: the jobs' numbers, their results, and the time at which the
    engine dequeued them (monotonic seconds, the same clock in all processes).
    """

    numbers: Sequence[int]
    results: Sequence[JobResult]
    taken_at: float


class OutputPart(NamedTuple):
    """Outputs of some jobs of a call: the jobs' indices, their outputs, and the time at which the
    engine dequeued them; None if it did not compute them.
    """

    indices: Sequence[int]
    outputs: Sequence[Output]
    taken_at: float | None = None


@dataclass(slots=True)
class WorkCounts:
    """Token counts of outputs, as in `Usage`; a job's own tokens count with its last output."""

    prompt_tokens: int = 0
    scored_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    cached_results: int = 0

    def add(self, other: "WorkCounts") -> None:
        """Add other counts."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def count_work(jobs: Sequence[Job], part: OutputPart) -> WorkCounts:
    """Count the tokens of outputs of some of the jobs."""
    if isinstance(jobs, ScoreJobs):
        own = np.array(part.indices)
        read = int(np.diff(jobs.token_starts)[own].sum())
        scored = int(np.diff(jobs.target_starts)[own].sum()) - len(own) * jobs.like.reads_end
        if isinstance(part.outputs, ScoreOutputs):
            return WorkCounts(read, scored, 0, int(part.outputs.cached_tokens.sum()))
        return WorkCounts(read, scored, 0, sum(output.cached_tokens for output in part.outputs))
    pairs = zip(part.indices, part.outputs, strict=True)
    ended = [(jobs[index], output) for index, output in pairs if output.is_last]
    return WorkCounts(
        sum(len(job.tokens) for job, _ in ended),
        sum(job.num_scored for job, _ in ended),
        sum(output.num_generated for output in part.outputs),
        sum(output.cached_tokens for _, output in ended),
    )


def find_steered(jobs: Sequence[Job], part: OutputPart) -> Sequence[Output]:
    """Return the last outputs of the jobs with a plan."""
    if isinstance(jobs, ScoreJobs) and jobs.like.plan is None:
        return ()
    pairs = zip(part.indices, part.outputs, strict=True)
    return [out for index, out in pairs if out.is_last and jobs[index].plan is not None]


def find_last(part: ResultPart) -> Sequence[int]:
    """Return the numbers of the jobs whose last result is in a part."""
    if isinstance(part.results, ScoreOutputs):
        return part.numbers
    pairs = zip(part.numbers, part.results, strict=True)
    return [number for number, result in pairs if result.is_last]


def find_first_failure(results: Sequence[JobResult]) -> JobFailure | None:
    """Return the first failure among results, if any."""
    if isinstance(results, ScoreOutputs):
        return None
    return next((result for result in results if isinstance(result, JobFailure)), None)


NON_FINITE = "non_finite"
"""The problem code of a job whose activations or logits are not finite."""


def is_finite(output: Output) -> bool:
    """Return whether no number of an output is NaN, and no rank is 0, which stands for NaN.

    Infinity is allowed: q, or the model itself, may give a token probability 0.
    """
    found = output.activations
    if found is not None and not np.isfinite(found.activations_LTD).all():
        return False
    match output:
        case ScoreOutput():
            return bool(_find_finite_rows(output.columns).all())
        case GenerateOutput() | GradientOutput():
            return not np.isnan(output.logprobs).any()
    return True


def find_finite(outputs: ScoreOutputs) -> list[bool]:
    """Return `is_finite` of each output."""
    finite_R = _find_finite_rows(outputs.columns)
    found: list[bool] = np.logical_and.reduceat(finite_R, outputs.row_starts[:-1]).tolist()
    return found


def _find_finite_rows(columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    """Return which rows [R] have no NaN in any column, and no rank 0.

    Listed tokens of a row are either all NaN or all numbers, so that the first decides.
    """
    finite_R: npt.NDArray[np.bool_] = np.logical_and.reduce(
        [
            values > 0 if name == "rank" else ~np.isnan(values if values.ndim == 1 else values.T[0])
            for name, values in columns.items()
        ]
    )
    return finite_R


def find_failure(job: Job, output: Output) -> JobFailure | None:
    """Return the failure of a changed model's output that is not finite; None if it is."""
    traced = output.trace is None or output.trace.is_finite
    if not job.is_changed or (is_finite(output) and traced):
        return None
    return describe_non_finite(job, "the model's activations or logits are not finite")


def describe_non_finite(job: Job, found: str) -> JobFailure:
    """Return the failure of a job with a non-finite result, with what to do."""
    if job.plan is not None and job.plan.sites:
        hint = "steer with a smaller scale or narrower bounds"
    elif job.override is not None:
        hint = "use a smaller eta"
    elif job.adapter is not None:
        hint = "the adapter's updates are too large for the model's dtype"
    else:
        hint = "the model's dtype does not hold this text; serve it in a wider one"
    return JobFailure(NON_FINITE, f"{found}: {hint}")

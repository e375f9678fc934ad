"""The TransformerLens engine: jobs in, batches through the bridged model, results out.

Each step runs one batch: one that scores, captures or derives, one that starts continuations, or
the next token of a batch of continuations that runs. They take turns, so nobody waits for a long
one. Jobs of one batch have the same parameters.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch

from logsteer_server.contract.engine import EngineInfo, EngineSpec
from logsteer_server.contract.jobs import (
    CaptureJob,
    CheckAdapterJob,
    CheckAdapterOutput,
    CheckOverrideJob,
    GenerateJob,
    GradientJob,
    Job,
    JobFailure,
    JobResult,
    ScoreJob,
)
from logsteer_server.engines.tlens.batch import Batch, Continuation
from logsteer_server.engines.tlens.gradient import Differentiating, differentiate_batch
from logsteer_server.engines.tlens.model import BridgeModel
from logsteer_server.engines.tlens.parameters import Directions, UnfitParametersError
from logsteer_server.engines.tlens.points import Point, UnknownPointError
from logsteer_server.engines.tlens.reading import Capturing, Scoring, capture_batch, score_batch
from logsteer_server.engines.tlens.steering import InvalidPlanError, SteeredRow, place_sites
from logsteer_server.engines.weights import digest_weights, locate_model
from logsteer_server.numerics.rows import PUBLIC_COLUMNS

Results = list[tuple[int, JobResult]]
Ready = Scoring | Capturing | Differentiating | Continuation

GRADIENT_SHARE = 4
"""By how much smaller a batch that derives is: what it computes is kept for the way back."""
MAX_SHIFTED = 2
"""Batches of continuations that have parameters of their own, and so a copy of them, at once."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one batch holds at most: tokens with their padding, and rows.

    `override_cache_bytes`: of directions that are kept in memory for the next request.
    """

    max_batch_tokens: int = 4096
    max_batch_rows: int = 64
    override_cache_bytes: int = 2**30

    @classmethod
    def read(cls, engine_args: dict[str, Any]) -> "Bounds":
        """The bounds among an engine's arguments. Errors: ValueError for anything else."""
        known = tuple(cls.__slots__)
        for name, value in engine_args.items():
            if name not in known:
                raise ValueError(f"engine_args: unknown {name!r}; known are {', '.join(known)}")
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"engine_args: {name} must be a whole number from 1 on")
        return cls(**engine_args)


@dataclass(slots=True)
class Waiting:
    """Jobs of one kind that wait. Longest first within those that came since the last were taken.

    So neighbours in a batch are of like length, and still none waits for ever.
    """

    arrived: list[Ready] = field(default_factory=list)
    sorted: deque[Ready] = field(default_factory=deque)

    def __iter__(self) -> Iterator[Ready]:
        return iter([*self.sorted, *self.arrived])

    def take(self, bounds: Bounds, group: Callable[[Ready], object], room: int) -> list[Ready]:
        """The next batch: jobs of one group within the bounds, at most `room` of them."""
        if not self.sorted:
            self.arrived.sort(key=_length, reverse=True)
            self.sorted.extend(self.arrived)
            self.arrived = []
        taken: list[Ready] = []
        passed: list[Ready] = []
        longest = _length(self.sorted[0])
        limit = min(room, bounds.max_batch_rows, max(1, bounds.max_batch_tokens // longest))
        while self.sorted and len(taken) < limit:
            job = self.sorted.popleft()
            fits = not taken or group(job) == group(taken[0])
            (taken if fits else passed).append(job)
        self.sorted.extendleft(reversed(passed))
        return taken

    def drop(self, job_ids: frozenset[int]) -> None:
        """Forget jobs."""
        self.arrived = [job for job in self.arrived if job.job_id not in job_ids]
        self.sorted = deque(job for job in self.sorted if job.job_id not in job_ids)


def _length(ready: Ready) -> int:
    return len(ready.job.tokens)


class TransformerLensEngine:
    """A model resident in TransformerLens. Errors: ValueError where it cannot be served."""

    def __init__(self, spec: EngineSpec) -> None:
        for name in ("quantization", "memory"):
            if getattr(spec, name) is not None:
                raise ValueError(f"{name}: transformer_lens takes none; leave it out")
        self._bounds = Bounds.read(spec.engine_args)
        path = locate_model(spec.path)
        self._model = BridgeModel(spec, path)
        self._info = _describe(spec, str(path), self._model, digest_weights(path))
        self._chunk_bytes = spec.chunk_bytes
        self._directions = Directions(self._model.parameters, self._bounds.override_cache_bytes)
        self._scoring, self._capturing, self._deriving = Waiting(), Waiting(), Waiting()
        self._starting, self._starting_shifted = Waiting(), Waiting()
        self._known: Results = []
        # Whoever is first has the next turn.
        self._turns: deque[Waiting | Batch] = deque(
            [
                self._scoring,
                self._capturing,
                self._deriving,
                self._starting,
                self._starting_shifted,
            ]
        )

    @property
    def info(self) -> EngineInfo:
        """What this engine is."""
        return self._info

    @property
    def busy(self) -> bool:
        """Whether a job is unfinished."""
        return bool(self._known) or any(self._has_work(turn) for turn in self._turns)

    def add(self, jobs: Sequence[tuple[int, Job]]) -> None:
        """Take jobs in; one that does not fit the model fails with the next step."""
        for job_id, job in jobs:
            failure = self._check(job)
            if failure is None:
                try:
                    self._admit(job_id, job)
                except (UnknownPointError, UnfitParametersError) as error:
                    failure = JobFailure(error.code, error.detail)
                except InvalidPlanError as error:
                    failure = JobFailure("invalid_vector", str(error))
            if failure:
                self._known.append((job_id, failure))

    def _check(self, job: Job) -> JobFailure | None:
        if isinstance(job, CheckOverrideJob | CheckAdapterJob):
            return None
        if failure := self._info.refuse(job):
            return failure
        if not len(job.tokens):
            return JobFailure("invalid_request", "there are no tokens; give at least one")
        if job.tokens.min() < 0 or job.tokens.max() >= self._info.vocab_size:
            detail = f"token ids must lie from 0 to {self._info.vocab_size - 1}, the vocabulary"
            return JobFailure("invalid_request", detail)
        if isinstance(job, GenerateJob) and job.max_tokens < 1:
            return JobFailure("invalid_request", "max_tokens must be at least 1")
        if isinstance(job, CaptureJob) and not job.layers:
            return JobFailure("invalid_request", "layers: name at least one")
        return None

    def _admit(self, job_id: int, job: Job) -> None:
        points = self._model.points
        if isinstance(job, CheckOverrideJob):
            self._known.append((job_id, self._model.parameters.check(job.shapes)))
            return
        if isinstance(job, CheckAdapterJob):
            assert job.adapter is not None
            self._directions.read_adapter(job.adapter)
            self._known.append((job_id, CheckAdapterOutput()))
            return
        if isinstance(job, CaptureJob):
            found = tuple(points.find(layer, job.hook) for layer in job.layers)
            if len({point.width for point in found}) > 1:
                detail = f"{job.hook} is not equally wide in layers {list(job.layers)}; ask apart"
                raise UnknownPointError("invalid_request", detail)
            self._capturing.arrived.append(Capturing(job_id, job, found))
            return
        steered = None
        if job.plan is not None:
            steered = SteeredRow(job.plan, place_sites(job.plan, points), job.prompt_len)
        wanted = self._find_sites(job) if isinstance(job, GradientJob) else ()
        if job.delta or (isinstance(job, GradientJob) and job.along):
            hooked = [site.point for site in steered.sites] if steered else []
            self._model.check_override([*hooked, *wanted])
        if isinstance(job, ScoreJob):
            self._scoring.arrived.append(Scoring(job_id, job, steered))
        elif isinstance(job, GradientJob):
            self._deriving.arrived.append(Differentiating(job_id, job, steered, wanted))
        else:
            assert isinstance(job, GenerateJob)
            row = Continuation.start(job_id, job, steered, self._model)
            waiting = self._starting if not job.delta else self._starting_shifted
            waiting.arrived.append(row)

    def _find_sites(self, job: GradientJob) -> tuple[Point, ...]:
        found = tuple(self._model.points.find(layer, hook) for layer, hook in job.sites)
        if bool(found) == bool(job.along):
            raise UnknownPointError("invalid_request", "derive by activations or a direction")
        widest = max(found, key=lambda point: point.width, default=None)
        if widest and job.max_width is not None and widest.width > job.max_width:
            detail = (
                f"the gradients would be {widest.width} numbers a token, the request may have "
                f"{job.max_width}: name fewer layers, positions or targets"
            )
            raise UnknownPointError("payload_too_large", detail)
        return found

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Drop jobs, wherever they are."""
        ids = frozenset(job_ids)
        self._known = [(i, result) for i, result in self._known if i not in ids]
        for turn in self._turns:
            turn.drop(ids)

    def step(self) -> Results:
        """Run the batch whose turn it is, and give the results that came of it."""
        known, self._known = self._known, []
        results = known + self._take_turn()
        if not self.busy:
            self._directions.rest()
        return results

    def _take_turn(self) -> Results:
        for _ in range(len(self._turns)):
            turn = self._turns.popleft()
            self._turns.append(turn)
            if self._has_work(turn):
                return self._advance(turn) if isinstance(turn, Batch) else self._begin(turn)
            if isinstance(turn, Batch):
                self._turns.pop()
        return []

    def _has_work(self, turn: Waiting | Batch) -> bool:
        if isinstance(turn, Batch):
            return bool(turn.rows)
        if turn is self._starting_shifted:
            running = sum(isinstance(other, Batch) and bool(other.shifted) for other in self._turns)
            if running >= MAX_SHIFTED:
                return False
        return bool(turn.sorted or turn.arrived)

    def _begin(self, waiting: Waiting) -> Results:
        """Run the next batch of jobs that wait."""
        bounds, room = self._bounds, self._bounds.max_batch_rows
        if waiting is self._scoring:
            batch = waiting.take(bounds, _delta_of, room)
            return self._guard(batch, lambda: self._score(batch))
        if waiting is self._capturing:
            batch = waiting.take(bounds, _capture_group, room)
            capturings = [job for job in batch if isinstance(job, Capturing)]
            return self._guard(batch, lambda: capture_batch(self._model, capturings))
        if waiting is self._deriving:
            tokens = max(1, bounds.max_batch_tokens // GRADIENT_SHARE)
            batch = waiting.take(replace(bounds, max_batch_tokens=tokens), _gradient_group, room)
            return self._guard(batch, lambda: self._derive(batch))
        batch = waiting.take(bounds, _delta_of, room)
        return self._guard(batch, lambda: self._start(batch))

    def _score(self, batch: Sequence[Ready]) -> Results:
        scorings = [job for job in batch if isinstance(job, Scoring)]
        return self._model.parameters.under(
            self._directions.shift(scorings[0].job.delta),
            lambda: score_batch(self._model, scorings, self._chunk_bytes),
        )

    def _derive(self, batch: Sequence[Ready]) -> Results:
        entries = [job for job in batch if isinstance(job, Differentiating)]
        first = entries[0].job
        direction = self._directions.load(first.along) if first.along else {}
        parameters = self._directions.shift(first.delta)
        return differentiate_batch(self._model, entries, parameters, direction, self._chunk_bytes)

    def _start(self, batch: Sequence[Ready]) -> Results:
        rows = [job for job in batch if isinstance(job, Continuation)]
        started = Batch(self._model, rows, self._directions.shift(rows[0].job.delta))
        self._turns.append(started)
        return self._advance(started)

    def _advance(self, batch: Batch) -> Results:
        rows = list(batch.rows)
        results = self._guard(rows, lambda: self._model.parameters.under(batch.shifted, batch.step))
        ended = frozenset(job_id for job_id, result in results if result.is_last)
        if ended == {row.job_id for row in rows}:
            self._turns.remove(batch)
        return results

    def _guard(self, batch: Sequence[Ready], run: Callable[[], Results]) -> Results:
        """What `run` gives; a failure for each of the batch's jobs where memory runs out or their
        parameters cannot be used.
        """
        try:
            return run()
        except UnfitParametersError as error:
            failure = JobFailure(error.code, error.detail)
            return [(job.job_id, failure) for job in batch]
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        tokens = sum(_length(job) for job in batch)
        detail = (
            f"memory ran out over {len(batch)} sequences of {tokens} tokens; "
            "send less, or set engine_args max_batch_tokens or max_batch_rows lower"
        )
        return [(job.job_id, JobFailure("out_of_memory", detail)) for job in batch]

    def close(self) -> None:
        """Let the model go."""
        self._turns.clear()
        del self._model


def _delta_of(ready: Ready) -> object:
    return ready.job.delta


def _gradient_group(ready: Ready) -> object:
    assert isinstance(ready, Differentiating)
    return ready.group


def _capture_group(ready: Ready) -> object:
    assert isinstance(ready, Capturing)
    return ready.job.layers, ready.job.hook, ready.job.read


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "can't allocate memory" in str(error)  # the CPU's allocator has no exception of its own


def _describe(spec: EngineSpec, path: str, model: BridgeModel, digest: str) -> EngineInfo:
    return EngineInfo(
        engine="transformer_lens",
        engine_version=version("transformer-lens"),
        model_path=spec.path,
        tokenizer_path=path,
        weights_digest=digest,
        dtype=str(model.dtype).removeprefix("torch."),
        logits_dtype=model.logits_dtype,
        quantization=model.quantization,
        tensor_parallel=1,
        pipeline_parallel=model.num_devices,
        batch_invariant=False,
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        columns=PUBLIC_COLUMNS,
        eos_ids=tuple(sorted(model.eos_ids)),
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        hooks=model.points.names,
        tf32=spec.tf32 and model.device.type == "cuda",
    )

"""One way to run a request: limits, admission, planning, jobs, then an answer or events.

A task defines limits, batches of jobs, a callback for their outputs, and its part of the answer.
`Run` does the rest once for all endpoints: it enters the model's budget before the task plans,
covers each batch, counts usage, times, receipts and provenance, and writes the answer. A deadline,
or a caller who hangs up, cancels the run; all that it reserved and started ends with it.

    task.plan()   Batch ──► model.prepare ──► reservation.cover ──► model.run
                    ▲                                                  │ index, output
                    └── the next batch, after the last output ◄── batch.take ──► Event
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from logsteer.errors import api_error
from logsteer.schemas import Precision, Provenance, SpecialTokens, TrainRequest
from logsteer.schemas.common import SequenceOptions
from logsteer.schemas.openai import CompatibleRequest
from logsteer.schemas.perplexity import WindowOptions
from logsteer_server.contract.batches import OutputPart, ScoreOutputs, count_work, find_steered
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import GenerateJob, Job, Routing
from logsteer_server.interventions.captures import CapturedJobs
from logsteer_server.interventions.interventions import (
    UNCHANGED,
    AppliedReport,
    Interventions,
    Stores,
)
from logsteer_server.keys.caller import Requester
from logsteer_server.models.admission import Admission, Reservation
from logsteer_server.models.model import ResidentModel
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.observation.metrics import TokenTimes
from logsteer_server.observation.requests import RequestRecord
from logsteer_server.settings import Settings
from logsteer_server.tasks.planning import Capacity, Planner
from logsteer_server.text.tokenizer import TextCodec

Purpose = Literal["work", "readout", "reference"]
"""What a batch counts for: `work` for usage and receipts, `readout` (of captured activations) for
usage alone, `reference` (the other side of a comparison, or readings after the end) for neither."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a streamed answer."""

    name: str
    document: dict[str, Any]


def discard(_part: OutputPart) -> Iterable[Event]:
    """Discard outputs."""
    return ()


def take_each(
    take: Callable[[int, Any], Event | None],
) -> Callable[[OutputPart], Iterator[Event]]:
    """Wrap a per-output callback so that it takes a batch of outputs.

    It is called with each job's index and output, and may return an event to show.
    """

    def take_all(part: OutputPart) -> Iterator[Event]:
        for index, output in zip(part.indices, part.outputs, strict=True):
            if (event := take(index, output)) is not None:
                yield event

    return take_all


@dataclass(frozen=True, slots=True)
class Batch:
    """Jobs to run together, and the callback for their outputs.

    `take` is called with outputs of some of the jobs, or pieces of them, and returns events to
    show. `model` runs them: None for the task's own. `cache` allows results of earlier work, which
    only score jobs have. A `silent` batch does not open the stream of events. At least `room`
    tokens are reserved, if later batches need more than this one.
    """

    jobs: Sequence[Job]
    take: Callable[[OutputPart], Iterable[Event]] = discard
    model: ResidentModel | None = None
    cache: bool = False
    purpose: Purpose = "work"
    silent: bool = False
    room: int = 0


class Collector:
    """Collects the outputs of a batch in the order of its jobs."""

    def __init__(self) -> None:
        self._indices: list[int] = []
        self._parts: list[Sequence[Any]] = []

    def take(self, part: OutputPart) -> Iterable[Event]:
        """Record outputs of some of the jobs."""
        self._indices += part.indices
        self._parts.append(part.outputs)
        return ()

    @property
    def outputs(self) -> list[Any]:
        """All outputs."""
        found = dict(zip(self._indices, chain.from_iterable(self._parts), strict=True))
        return [found[index] for index in sorted(found)]

    @property
    def scores(self) -> ScoreOutputs:
        """All outputs of score jobs of the same columns, in arrays."""
        order = np.argsort(np.array(self._indices, dtype=np.int64))
        return ScoreOutputs.join(self._parts).select(order)


class Task(ABC):
    """One request's work on one model, from its plan to its part of the answer.

    The first line of a task's docstring describes its endpoint.
    """

    kind: ClassVar[str]
    """The prefix of an answer's id."""
    windowing: WindowOptions | None = None
    """How texts were cut, for provenance; set by `plan`."""
    precision: Precision = "float32"
    """The precision of softmax and columns."""
    special_tokens: SpecialTokens = "parse"
    """How control text in the caller's strings is treated."""
    interventions: Interventions = UNCHANGED
    """The interventions of the answer; set by `plan`."""
    results: list[dict[str, Any]]
    """The results of the items; set by `plan`, if the task has any."""
    documents: Sequence[int] | None = None
    """The captured job of each document, where activations are stored; None: one a job."""
    applied_fields: ClassVar[tuple[str, ...]] = ("steering", "override", "adapter")
    """Interventions that the answer reports."""
    has_file: ClassVar[bool] = False
    """Whether the answer can be given as a file of tensors."""

    variant: str | None = None
    """The model's name in the request, if it is a variant's."""
    codec: TextCodec
    info: EngineInfo
    """The model's tokenizer and engine when the task began; set by `require`."""

    def __init__(self, model: ResidentModel, *, streams: bool = False) -> None:
        self.model = model
        self.streams = streams
        self.request_id = ""
        self.id = f"{self.kind}-{uuid.uuid4().hex[:24]}"

    @abstractmethod
    def check_limits(self, settings: Settings) -> None:
        """Refuse requests that are too large, by arithmetic alone. Errors: APIError
        `payload_too_large`.
        """

    def require(self) -> None:
        """Make sure that the model answers now. Errors: as `ResidentModel.require`."""
        self.codec, self.info = self.model.require()
        if self.special_tokens == "text":
            self.codec = self.codec.literal

    @abstractmethod
    def plan(self, planner: Planner) -> AsyncGenerator[Batch | Event, None]:
        """Yield batches of jobs, each after the last output of the previous one was taken.

        Events that no output causes may be yielded between batches, not before the first.
        """

    def route(self, routing: Routing) -> Routing:
        """Return the routing of the task's jobs, given the caller's."""
        return routing

    def report(self) -> dict[str, Any]:
        """Return the answer's own fields, once the plan has ended."""
        return {"results": self.results}

    def lay_out(self, document: dict[str, Any]) -> "TensorLayout":
        """Return the whole answer as a file of tensors, where the task `has_file`."""
        raise NotImplementedError

    def write(self, facts: "Facts") -> dict[str, Any]:
        """Write the whole answer: the task's own fields and what every answer carries."""
        return {
            **self.report(),
            **{name: facts.applied[name] for name in self.applied_fields},
            "id": self.id,
            "model": self.variant or self.model.id,
            "usage": facts.usage,
            "timing": facts.timing,
            "provenance": facts.provenance.model_dump(),
        }


B = TypeVar("B", bound=SequenceOptions | CompatibleRequest | TrainRequest)


class BodyTask(Task, Generic[B]):
    """A task of a request's body, with the stores that its caller sees."""

    def __init__(self, body: B, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(models.find(body.model), streams=getattr(body, "stream", False))
        self.precision = getattr(body, "precision", "float32")
        self.special_tokens = getattr(body, "special_tokens", "parse")
        self._body = body
        self._stores = stores
        self._scratch = models.scratch


class ShapedTask(BodyTask[B]):
    """A task whose answer has OpenAI's shape."""

    shape: str
    """The `object` of an answer."""

    def __init__(self, body: B, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(body, models, stores)
        self._created = int(time.time())

    @property
    def _head(self) -> dict[str, Any]:
        name = self.variant or self.model.id
        return {"id": self.id, "object": self.shape, "created": self._created, "model": name}

    @abstractmethod
    def _count_usage(self, facts: "Facts") -> dict[str, Any]:
        """Return the fields of `OpenAIUsage`."""

    def write(self, facts: "Facts") -> dict[str, Any]:
        """Write the whole answer, without null interventions: clients of this shape know none."""
        document = {**self._head, **self.report()}  # before what it counts
        return document | {"usage": self._count_usage(facts)} | drop_nulls(facts.applied)


def drop_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """An answer as a file: tensors, each in parts that are concatenated along its first axis.

    `about` are documents for its metadata, by name.
    """

    tensors: Mapping[str, Sequence[npt.NDArray[Any]]]
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Facts:
    """The part common to all answers: fields of `Usage`, `Timing` and `AppliedInterventions`."""

    usage: dict[str, int]
    timing: dict[str, float]
    applied: dict[str, Any]
    provenance: Provenance


@dataclass(slots=True)
class Run:
    """The execution of one task; it is run once, by `finish` or by `events`."""

    task: Task
    capacity: Capacity
    caller: Requester = field(default_factory=Requester)
    memory: Reservation | None = None
    """The reservation of the answer's memory; None: one for the duration of the run."""
    packs_arrays: bool = False
    """Whether the answer has arrays as raw buffers, not as text."""
    record: RequestRecord = field(default_factory=RequestRecord)
    """The record of the request, its usage included."""
    accepted: float = field(default_factory=time.monotonic)
    expected_bytes: int = 0
    """The expected size of the answer, once its jobs are planned."""
    _taken_at: float | None = None
    """When the engine dequeued the first job; None before, and if it never did."""
    _batch_taken_at: float | None = None
    """The same of the latest batch."""
    _times: TokenTimes | None = None
    _shows_start: bool = True
    _report: AppliedReport | None = None
    _captured: CapturedJobs | None = None
    """What is captured for the store."""
    _reservations: dict[Admission, Reservation] = field(default_factory=dict)
    _room: ExitStack = field(default_factory=ExitStack)

    async def finish(self) -> dict[str, Any]:
        """Return the whole answer. Errors: those of the task, of admission and of engines."""
        answer: dict[str, Any] = {}
        self._shows_start = False
        async with aclosing(self.events()) as events:
            async for event in events:
                answer = event.document
        return answer

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield `start` once the first batch is admitted, the task's own events, and `result`.

        Errors: as `finish`; those of limits, admission and planning before the first event.
        """
        record, task = self.record, self.task
        record.model = task.model.id
        self.task.request_id = self.caller.routing.request_id
        self.task.check_limits(self.capacity.settings)
        self.task.require()
        await self.caller.allowance.check_tokens()
        with self._room:
            tokens = self._reserve(self.task.model.admission)
            memory = self.memory or self._reserve(self.capacity.memory)
            planner = Planner(self.capacity, tokens, memory, self.packs_arrays)
            has_started = False
            moment = time.monotonic()
            record.record_phase("admission", self.accepted, moment)
            async with aclosing(self.task.plan(planner)) as plan:
                async for batch in plan:
                    if isinstance(batch, Event):
                        yield batch
                        continue
                    model = batch.model or self.task.model
                    routing = self.task.route(self.caller.routing)
                    prepared = await model.prepare(batch.jobs, batch.cache, routing)
                    self.expected_bytes = planner.expected_bytes
                    needed = max(prepared.num_tokens, batch.room)
                    self._reserve(model.admission).cover(needed)
                    if self.caller.allowance.counts_tokens:
                        num_tokens = sum(len(job.tokens) for job in prepared.jobs)
                        await self.caller.allowance.charge(num_tokens)
                    planned = time.monotonic()
                    record.record_phase("planning", moment, planned)
                    if not has_started and not batch.silent:
                        has_started = True
                        if self._shows_start:
                            yield self._open()
                    if batch.purpose != "reference":
                        record.usage.cached_results += prepared.num_known
                    self._batch_taken_at = None
                    self._times = self._time_tokens(batch, model) if self.task.streams else None
                    async with aclosing(model.run(prepared, routing)) as parts:
                        async for part in parts:
                            generated = self._count(batch, model, part)
                            if batch.purpose == "work" and (stored := task.interventions.stored):
                                self._captured = self._captured or CapturedJobs(stored)
                                self._captured.add(batch.jobs, part)
                            if generated and self.caller.allowance.counts_tokens:
                                await self.caller.allowance.charge(generated)
                            for event in batch.take(part):
                                yield event
                    moment = time.monotonic()
                    if self._batch_taken_at is not None:
                        taken = max(planned, self._batch_taken_at)
                        record.record_phase("queue", planned, taken)
                        record.record_phase("engine", taken, moment)
            if not has_started and self._shows_start:
                yield self._open()
            document = self._write()
            if self._captured is not None:
                document["captured"] = await self._store(self._captured)
            result = Event("result", document)
            record.record_phase("answer", moment, time.monotonic())
            yield result

    async def _store(self, captured: CapturedJobs) -> dict[str, Any]:
        """Write what was captured to the store; return what an answer says of it."""
        task, seconds = self.task, time.monotonic() - self.accepted
        return await self.capacity.call_long(
            captured.write, task.documents, task.model.id, task.info.weights_digest, seconds
        )

    def _reserve(self, admission: Admission) -> Reservation:
        if admission not in self._reservations:
            self._reservations[admission] = self._room.enter_context(
                admission.enter(self.caller.routing.tenant)
            )
        return self._reservations[admission]

    def _time_tokens(self, batch: Batch, model: ResidentModel) -> TokenTimes | None:
        """Return token times for jobs that stream; None for others."""
        first = batch.jobs[0] if batch.jobs else None
        streams = isinstance(first, GenerateJob) and first.stream
        return TokenTimes(model.metrics, self.accepted) if streams else None

    def _count(self, batch: Batch, model: ResidentModel, part: OutputPart) -> int:
        """Count the work of outputs and its times; return the generated tokens."""
        work, metrics, taken_at = count_work(batch.jobs, part), model.metrics, part.taken_at
        if taken_at is not None:
            metrics.prompt_tokens.inc(work.prompt_tokens)
            metrics.prefix_cached_tokens.inc(work.cached_tokens)
            metrics.scored_tokens.inc(work.scored_tokens)
            metrics.generated_tokens.inc(work.generated_tokens)
        if batch.purpose == "reference":
            return work.generated_tokens
        self.record.usage.add(work)
        if taken_at is not None:
            queue_s = max(0.0, taken_at - self.accepted)
            if self._taken_at is None:
                metrics.queue_s.observe(queue_s)
            if self._taken_at is None or taken_at < self._taken_at:
                self._taken_at, self.record.queue_s = taken_at, queue_s
            self._batch_taken_at = min(self._batch_taken_at or taken_at, taken_at)
        if self._times is not None:
            for index, output in zip(part.indices, part.outputs, strict=True):
                if output.num_generated:
                    self._times.record(index, output.num_generated, time.monotonic())
        for output in find_steered(batch.jobs, part) if batch.purpose == "work" else ():
            self._applied.add(output)
            if output.trace is not None:
                self.task.model.metrics.steered_tokens.inc(sum(output.trace.tokens))
        return work.generated_tokens

    @property
    def _applied(self) -> AppliedReport:
        """The report of the task's interventions, available once it has planned."""
        if self._report is None:
            self._report = AppliedReport(self.task.interventions)
        return self._report

    def _open(self) -> Event:
        task = self.task
        document = {"id": task.id, "model": task.variant or task.model.id}
        return Event("start", document | {"provenance": self._describe().model_dump()})

    def _describe(self) -> Provenance:
        task, override = self.task, self.task.interventions.override
        cast = override.override.cast if override else None
        return task.model.provenance(task.windowing, task.precision, cast)

    def _write(self) -> dict[str, Any]:
        engine_s = 0.0
        if self._taken_at is not None:
            engine_s = time.monotonic() - self._taken_at
            self.task.model.metrics.engine_s.observe(engine_s)
        self.task.model.metrics.answer_s.observe(time.monotonic() - self.accepted)
        timing = {
            "queue_ms": round(1e3 * self.record.queue_s, 3),
            "engine_ms": round(1e3 * engine_s, 3),
        }
        usage, applied = asdict(self.record.usage), self._applied.write()
        return self.task.write(Facts(usage, timing, applied, self._describe()))


def check_count(name: str, count: int, limit: int) -> None:
    """Refuse more entries than the limit. Errors: APIError `payload_too_large`."""
    if count > limit:
        detail = f"{name} has {count} entries, at most {limit} are allowed: split the request."
        raise api_error("payload_too_large", detail, param=name)

"""The engine contract: an engine's specification, the facts that it reports, its methods.

An engine runs in its own process, which passes it jobs, calls `step` while there is work, and sends
the results of `step` back in batches.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from logsteer_server.contract.jobs import Feature, GenerateJob, Job, JobFailure, JobResult

HOOKS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
"""TransformerLens' names of a layer's activations that all engines may support, in the order of a
forward pass; each is as wide as the model. Parallel blocks have no resid_mid."""

Int8Products = Literal["integer", "float32_blocks"]
"""How products of 8-bit integers are summed: with the CPU's integer instructions, tested exact at
load; or, if these saturate, in float32 over blocks short enough to be exact."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One model of the configuration, as its engine needs it."""

    id: str
    engine: str
    path: str
    dtype: str = "auto"
    tf32: bool = False
    devices: str | tuple[int, ...] = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    replicas: int = 1
    replica: int = 0
    """The index of the replica."""
    quantization: str | None = None
    max_model_len: int | None = None
    memory: float | str | None = None
    compile: bool = True
    chunk_bytes: int = 256 * 2**20
    column_bytes: int = 256 * 2**20
    steering_slots: int = 64
    steering_depth: int = 2
    steering_probes: int = 16
    capture_bytes: int = 128 * 2**20
    hooks: tuple[str, ...] = ("resid_post",)
    adapter_slots: int = 0
    adapter_rank: int = 16
    runner: str = "auto"
    engine_args: dict[str, Any] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """The number of processes that share the model."""
        return self.tensor_parallel * self.pipeline_parallel

    def split(self) -> "list[EngineSpec]":
        """Return the specification of each replica, with its share of listed devices, in order.

        Devices 0, 1, 2, 3 with `tensor_parallel` 2 are 0, 1 and 2, 3 for two replicas.
        """
        listed, ranks = not isinstance(self.devices, str), self.num_ranks
        return [
            replace(
                self,
                replica=number,
                devices=self.devices[number * ranks :][:ranks] if listed else self.devices,
            )
            for number in range(self.replicas)
        ]


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """How much work an engine accepts before it has answered earlier work."""

    ahead_tokens: int = 65_536
    """Most tokens of jobs that have not begun: enough that steps are full, and no more, because
    later jobs wait for them."""
    cache_tokens: int | None = None
    """Size of the key-value cache in tokens. Generation is then admitted by current use, from
    `Engine.take_load`; None: by the largest size of each generation, counted in `ahead_tokens`."""
    sequences: int | None = None
    """Most jobs that generate at the same time."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of generation on an engine: jobs whose prompts it has read since the last report,
    and the tokens whose keys and values are in the cache, or were there when preempted.
    """

    started: Sequence[int]
    held_tokens: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one GPU in bytes: what this engine holds of it, what is free, and all of it."""

    device: str
    held_bytes: int
    free_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class EngineReading:
    """An engine's status, for monitoring; None for values that the engine does not have.

    `running`, `waiting`: jobs in the engine's batch, and waiting for it. `cache_blocks`: blocks of
    the key-value cache; used ones are held by running sequences. `preemptions`: how often a
    sequence had to give up its blocks and be computed again. Slots hold different steering plans
    and adapters; a slot is used while a job needs it.
    """

    running: int = 0
    waiting: int = 0
    cache_blocks: int | None = None
    cache_blocks_used: int | None = None
    preemptions: int | None = None
    steering_slots: int | None = None
    steering_slots_used: int | None = None
    adapter_slots: int | None = None
    adapter_slots_used: int | None = None
    memory: Sequence[DeviceMemory] = ()

    @property
    def is_idle(self) -> bool:
        """Whether it has no sequence."""
        return not (self.running or self.waiting)


TIME_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
)  # fmt: skip
"""Upper bounds of histograms of times: a millisecond to the default request_timeout_s."""


@dataclass(slots=True)
class StepCounts:
    """Durations of an engine's steps so far: a histogram with bounds TIME_BOUNDS_S, and the total.

    The last count is of steps beyond the last bound. Each heartbeat sends it.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(TIME_BOUNDS_S) + 1))
    total_s: float = 0.0

    def record(self, seconds: float) -> None:
        """Count one step."""
        self.counts[bisect_left(TIME_BOUNDS_S, seconds)] += 1
        self.total_s += seconds


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about an engine, known once its model is loaded."""

    engine: str
    engine_version: str
    model_path: str
    tokenizer_path: str
    weights_digest: str
    dtype: str
    logits_dtype: str
    quantization: str | None
    tensor_parallel: int
    pipeline_parallel: int
    batch_invariant: bool
    context_length: int
    vocab_size: int
    columns: tuple[str, ...]
    eos_ids: tuple[int, ...]
    num_layers: int
    hidden_size: int
    hooks: tuple[str, ...]
    """Activations of a layer that can be steered and captured."""
    hook_widths: Mapping[str, int] = field(default_factory=dict)
    """Numbers per token of hooks whose width is not `hidden_size`."""
    missing_hooks: Mapping[str, str] = field(default_factory=dict)
    """For each of HOOKS that it lacks: why, or what adds it, as an error's detail."""
    max_probes: int | None = None
    """Probes that one job may have; None: any number."""
    capture_rows: int | None = None
    """Most activations of one capture, over all layers; None: any number."""
    lacks: Mapping[Feature, str] = field(default_factory=dict)
    """For each feature that it lacks: what to do instead, as an error's detail."""
    dequantised_from: str | None = None
    """The commonest data type of a GGUF file, such as Q4_1."""
    rounding: float | None = None
    """For a model in half precision: the largest error of a log-probability against float32, in
    nats, measured at the start (`engines.rounding`); None if it was not measured."""
    tf32: bool = False
    """Whether float32 products may be computed in TF32."""
    computed_on: tuple[str, ...] = ()
    """What else determines its numbers: versions of libraries, and the device."""
    device: str = "cpu"
    """The name of its device."""
    room: EngineRoom = field(default_factory=EngineRoom)
    int8_products: Int8Products | None = None
    """None without INT8 layers, and on GPUs."""

    def explain_hook(self, hook: str) -> str:
        """Return why it lacks this activation, and which ones it has, as an error's detail."""
        if not self.hooks:
            return self.lacks.get("steering", "this engine gives no activations")
        detail = f"this engine reads and steers {', '.join(self.hooks)}, not {hook}"
        return f"{detail}: {self.missing_hooks[hook]}" if hook in self.missing_hooks else detail

    def refuse(self, job: Job) -> JobFailure | None:
        """Return why the engine cannot run a job: a feature that it lacks, or a job too long."""
        for feature in job.features:
            if feature in self.lacks:
                return JobFailure("unsupported_by_engine", self.lacks[feature])
        if job.num_positions > self.context_length:
            detail = (
                f"{job.num_positions} tokens do not fit into a context of {self.context_length}"
            )
            return JobFailure("context_too_long", detail)
        if job.capture is None or self.capture_rows is None:
            return None
        if (rows := job.num_captured) <= self.capture_rows:
            return None
        detail = (
            f"{rows} activations of one text, this model holds {self.capture_rows} at once: name "
            "fewer layers or positions, such as a window of them, or raise its capture_bytes"
        )
        if isinstance(job, GenerateJob):
            detail += "; of a continuation all tokens count that it may come to, so max_tokens does"
        return JobFailure("payload_too_large", detail)


class Engine(Protocol):
    """A resident model. Job ids are chosen by the caller and unique while a job runs."""

    @property
    def info(self) -> EngineInfo:
        """The facts about this engine."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a job is unfinished."""
        ...

    def add(self, jobs: Sequence[tuple[int, Job]]) -> None:
        """Accept jobs; one that cannot run is returned from `step` as a JobFailure."""
        ...

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Drop jobs; they give no result. Unknown ids are ignored."""
        ...

    def step(self) -> list[tuple[int, JobResult]]:
        """Advance the work by one batch and return its results."""
        ...

    def take_load(self) -> EngineLoad | None:
        """Return the load of generation after the last step; None if it changed too little."""
        ...

    def read(self) -> EngineReading:
        """Return the engine's status; called once a second, between two steps."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...

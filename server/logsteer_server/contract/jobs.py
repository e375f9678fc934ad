"""The engine contract.

An engine lives in a process of its own. Its process gives it jobs, calls `step` as long as it has
work, and sends what `step` returns back in batches. Nothing here imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.plan import Positions, SteeringPlan, SteeringTrace

Ids = npt.NDArray[np.int32]
Scores = npt.NDArray[np.float32]
"""Float32; float64 where a job asked for it."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One model of the configuration, as its engine needs it."""

    id: str
    engine: str
    path: str
    dtype: str = "auto"
    logits_dtype: str = "auto"
    tf32: bool = False
    devices: str | tuple[int, ...] = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    quantization: str | None = None
    max_model_len: int | None = None
    memory: float | str | None = None
    compile: bool = True
    chunk_bytes: int = 64 * 2**20
    steering_slots: int = 64
    steering_depth: int = 2
    adapter_slots: int = 0
    adapter_rank: int = 16
    engine_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is, once its model is loaded."""

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
    """Activations of a layer that can be steered and captured; empty where none can."""
    features: tuple[str, ...] = ()
    """Of FEATURES, what it can do beside scoring, generating, steering and capturing."""
    tf32: bool = False
    """Whether float32 products may be computed in TF32."""


FEATURES = ("override", "gradient", "adapter")
"""Jobs with an `Override` or `CheckOverrideJob`; `GradientJob`; with an `Adapter`."""


@dataclass(frozen=True, slots=True)
class Direction:
    """A direction v in the space of parameters: the safetensors file with this SHA-256."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Override:
    """For one job, the model's parameters are theta + eta v."""

    direction: Direction
    eta: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: the safetensors file with this SHA-256.

    Its metadata has the configuration that PEFT writes beside weights, as JSON, under CONFIG_KEY.
    """

    path: str
    sha256: str


CONFIG_KEY = "adapter_config"


@dataclass(frozen=True, slots=True)
class Policy:
    """How a token is drawn from logits; temperature 0 is greedy, the other defaults cut nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """One sequence to score: the model reads T tokens, and its last R rows are scored.

    `targets[r]` is the token that follows row T - R + r: the text's next token, and for the last
    row the one token of the text that the model does not need to read.

    With `alternatives` the targets are no sequence: each of the R follows the last token, and all
    of them are read from its one row.

    With `export`, each row's log-probabilities over the vocabulary are written to that file as
    float32 [R, V]; with `reference`, such a file is read, and the columns `kl` and `top1_agrees`
    compare this model's rows with it.

    With `plan` the activations are steered; the prompt ends where the scored tokens begin.

    `policy` is what the policy columns refer to. With `double` the columns are computed in float64.
    With `override` or `adapter` the parameters are others.
    """

    tokens: Ids
    targets: Ids
    columns: tuple[str, ...] = ("logprob",)
    top: int = 0
    alternatives: bool = False
    export: str | None = None
    reference: str | None = None
    plan: SteeringPlan | None = None
    policy: Policy = Policy()
    double: bool = False
    override: Override | None = None
    adapter: Adapter | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens in front of the scored ones."""
        return len(self.tokens) - (0 if self.alternatives else len(self.targets) - 1)


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The columns of a job's R rows, each [R]; alternatives [R, top], most probable first."""

    columns: dict[str, npt.NDArray[Any]]
    top_ids: Ids | None
    top_logprobs: Scores | None
    cached_tokens: int
    trace: SteeringTrace | None = None


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """One prompt of T tokens to continue by at most `max_tokens` ones that `policy` draws.

    The same seed gives the same tokens whatever else is in the batch; None draws a seed. Generation
    ends at a token that ends the sequence, or where the text contains a string of `stop`, which is
    left out unless `include_stop`; with `ignore_eos` only at the latter. With `stream` the output
    comes in pieces. Without `logprobs` an engine may leave log-probabilities and alternatives out.
    """

    tokens: Ids
    max_tokens: int
    policy: Policy = Policy()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    top: int = 0
    logprobs: bool = True
    stream: bool = False
    plan: SteeringPlan | None = None
    override: Override | None = None
    adapter: Adapter | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """A piece of a job's continuation: N new tokens and their text.

    `logprobs` [N] are of the model, at temperature 1 and without any cut; alternatives are
    [N, top]. `finish_reason` is None until the last piece: `stop` or `length`. That one has the
    trace of a steered job.
    """

    token_ids: Ids
    text: str
    logprobs: Scores
    top_ids: Ids
    top_logprobs: Scores
    finish_reason: str | None
    cached_tokens: int
    trace: SteeringTrace | None = None


@dataclass(frozen=True, slots=True)
class CaptureJob:
    """A sequence of T tokens whose activations are wanted: after its last token, or their mean.

    `read`: `last` or `mean`, at `hook` of each of `layers`.
    """

    tokens: Ids
    layers: tuple[int, ...]
    hook: str = "resid_post"
    read: str = "last"


@dataclass(frozen=True, slots=True)
class CaptureOutput:
    """Activations [L, D], float32, in the order of the job's layers."""

    activations_LD: Scores
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GradientJob:
    """One sequence, laid out as in `ScoreJob`, whose summed target log-probability is derived.

    By the activations at `sites`, (layer, hook) each, after the tokens at `positions`; or, with
    `along`, along that direction of the parameters. Both where the model is steered by `plan` and
    has the parameters of `override` and `adapter`; an activation is what leaves its site, steering
    included. Activations of more than `max_width` numbers are refused.
    """

    tokens: Ids
    targets: Ids
    sites: tuple[tuple[int, str], ...] = ()
    positions: Positions = field(default_factory=Positions)
    along: Direction | None = None
    plan: SteeringPlan | None = None
    override: Override | None = None
    adapter: Adapter | None = None
    max_width: int | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens in front of the scored ones."""
        return len(self.tokens) - (len(self.targets) - 1)


@dataclass(frozen=True, slots=True)
class GradientOutput:
    """Log-probabilities [R] of the targets, and their derivatives.

    `gradients` [T', D] in the order of the job's sites, T' the tokens at its positions;
    `directional` [R] where the job has a direction: of each target's log-probability.
    """

    logprobs: Scores
    gradients: tuple[Scores, ...] = ()
    directional: Scores | None = None
    trace: SteeringTrace | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CheckOverrideJob:
    """The shape of each tensor of a direction, to be compared with the model's parameters."""

    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class CheckOverrideOutput:
    """The direction fits: it moves so many of the model's so many numbers."""

    moved: int
    total: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CheckAdapterJob:
    """An adapter that is to be loaded, to see whether it fits the model."""

    adapter: Adapter


@dataclass(frozen=True, slots=True)
class CheckAdapterOutput:
    """The adapter fits."""

    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class JobFailure:
    """Why a job has no output: `code` is a problem code, `detail` says what to do."""

    code: str
    detail: str


CommonJob = ScoreJob | GenerateJob | CaptureJob
"""What every engine does, unless it needs a feature."""
CheckJob = CheckOverrideJob | CheckAdapterJob
"""What reads no tokens."""
Job = CommonJob | GradientJob | CheckJob


def count_positions(job: Job) -> int:
    """Positions of the context that a job may come to use."""
    if isinstance(job, CheckJob):
        return 0
    return len(job.tokens) + (job.max_tokens if isinstance(job, GenerateJob) else 0)


CheckOutput = CheckOverrideOutput | CheckAdapterOutput
JobOutput = ScoreOutput | GenerateOutput | CaptureOutput | GradientOutput | CheckOutput
JobResult = JobOutput | JobFailure


def refuse_feature(job: Job, features: Sequence[str], engine: str) -> JobFailure | None:
    """The failure of a job that needs a feature which an engine does not have."""
    for feature in _find_needed(job):
        if feature not in features:
            return JobFailure("unsupported_by_engine", explain_missing(feature, engine))
    return None


def _find_needed(job: Job) -> list[str]:
    if isinstance(job, CheckOverrideJob):
        return ["override"]
    if isinstance(job, CheckAdapterJob):
        return ["adapter"]
    needed = ["gradient"] if isinstance(job, GradientJob) else []
    if not isinstance(job, CaptureJob):
        needed += ["override"] if job.override else []
        needed += ["adapter"] if job.adapter else []
    return needed


def explain_missing(feature: str, engine: str) -> str:
    """What to say where an engine lacks a feature."""
    if feature == "adapter" and engine == "vllm":
        return "this model takes no adapters; configure it with adapter_slots above 0"
    name = {"override": "parameter overrides", "gradient": "gradients", "adapter": "adapters"}
    return (
        f"the engine {engine} has no {name[feature]}; serve the model with engine transformer_lens"
    )


def is_last(result: JobResult) -> bool:
    """Whether nothing follows this result of its job."""
    return not (isinstance(result, GenerateOutput) and result.finish_reason is None)


class Engine(Protocol):
    """A resident model. Job ids are chosen by the caller and unique while a job runs."""

    @property
    def info(self) -> EngineInfo:
        """What this engine is."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a job is unfinished."""
        ...

    def add(self, jobs: Sequence[tuple[int, Job]]) -> None:
        """Take jobs in; a job that cannot run comes back from `step` as a JobFailure."""
        ...

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Drop jobs; they give no result. Unknown ids are ignored."""
        ...

    def step(self) -> list[tuple[int, JobResult]]:
        """Advance the work by one batch and give the results that came of it."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...

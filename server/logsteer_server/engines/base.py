"""The engine contract.

An engine lives in a process of its own. Its process gives it jobs, calls `step` as long as it has
work, and sends what `step` returns back in batches. Nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from logsteer_server.engines.plan import SteeringPlan, SteeringTrace

Ids = npt.NDArray[np.int32]
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One model of the configuration, as its engine needs it."""

    id: str
    engine: str
    path: str
    dtype: str = "auto"
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
    num_layers: int
    hidden_size: int
    hooks: tuple[str, ...]
    """Activations of a layer that can be steered and captured; empty where none can."""


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
    """

    tokens: Ids
    targets: Ids
    columns: tuple[str, ...] = ("logprob",)
    top: int = 0
    alternatives: bool = False
    export: str | None = None
    reference: str | None = None
    plan: SteeringPlan | None = None

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
    """One prompt of T tokens to continue by at most `max_tokens` sampled ones.

    Temperature 0 is greedy. The same seed gives the same tokens whatever else is in the batch;
    None draws a seed. Generation ends at a token that ends the sequence, or where the text contains
    a string of `stop`, which is left out;
    with `ignore_eos` only at the latter. With `stream` the output comes in pieces.
    """

    tokens: Ids
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top: int = 0
    stream: bool = False
    plan: SteeringPlan | None = None

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
class JobFailure:
    """Why a job has no output: `code` is a problem code, `detail` says what to do."""

    code: str
    detail: str


Job = ScoreJob | GenerateJob | CaptureJob


def count_positions(job: Job) -> int:
    """Positions of the context that a job may come to use."""
    return len(job.tokens) + (job.max_tokens if isinstance(job, GenerateJob) else 0)


JobOutput = ScoreOutput | GenerateOutput | CaptureOutput
JobResult = JobOutput | JobFailure


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

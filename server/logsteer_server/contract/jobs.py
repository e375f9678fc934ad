"""Jobs and their outputs: the requests of the HTTP process to an engine, and the answers.

A job states its own length, the engine features it needs and its fingerprint, so that queues,
caches and counters treat all kinds alike. Axis letters: T tokens, R scored rows, V vocabulary, L
layers, D width of an activation.
"""

import hashlib
import secrets
import struct
from collections.abc import Mapping
from dataclasses import KW_ONLY, astuple, dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.captures import Capture, CapturedActivations, Places
from logsteer_server.contract.plan import (
    Adapter,
    Override,
    ParameterDelta,
    Readings,
    SteeringPlan,
    SteeringTrace,
)

Ids = npt.NDArray[np.int32]
Scores = npt.NDArray[np.float32]
"""Float32; float64 for jobs with `double`."""


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Changes of logits before a policy draws; the defaults change nothing.

    `bias`: ids, and the number added to the logit of each. `allowed`: the only ids that may be
    drawn; None: all. `bad_words`: sequences of ids that may not appear after the prompt. The
    `end_ids` may not be drawn before `min_tokens` others.
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()

    @property
    def has_penalty(self) -> bool:
        """Whether the changes depend on earlier tokens."""
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Policy:
    """How a token is drawn from logits; temperature 0 is greedy, the other defaults cut nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    adjustments: Adjustments | None = None


NEUTRAL = Policy()
"""The policy that draws from the unchanged distribution."""
ReplyForm = tuple[Literal["json", "regex"], str]
"""A JSON Schema or a regular expression, and its text."""
EXPECTED_TOKENS = 1024
"""Most tokens that a generation is expected to have: a job without a limit of its own may use the
whole context, but hardly any does."""
NO_PLACES = np.zeros(0, dtype=np.int64)
NO_TOKENS: Ids = np.zeros(0, dtype=np.int32)
FINGERPRINT_HEAD = struct.Struct("<IIIII?")

MAX_DRAWN_SEED = 2**31


def draw_seed() -> int:
    """Draw a seed for a request without one, in [0, MAX_DRAWN_SEED)."""
    return secrets.randbelow(MAX_DRAWN_SEED)


Priority = Literal["interactive", "batch"]
"""`interactive`: a caller waits for the answer; `batch`: the work may use idle time."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How the calls of one caller are queued, whose cached work they share, and where they run.

    Tenants take turns, and `batch` calls let `interactive` ones pass. Results and prefixes are
    shared only within a `cache_namespace`. `request_id` identifies the request in the log.
    """

    tenant: str = ""
    priority: Priority = "interactive"
    cache_namespace: str = ""
    request_id: str = ""


Feature = Literal["steering", "override", "gradient", "adapter", "structure", "step_tokens"]
"""Jobs with a plan or a capture; jobs with an `Override` or `CheckOverrideJob`; `GradientJob`; jobs
with an `Adapter` or `CheckAdapterJob`; a `GenerateJob` with a `form`; a `ScoreJob` with
`step_tokens`."""


@dataclass(frozen=True, slots=True)
class Job:
    """A piece of work for an engine. Its class says what to do with the T tokens.

    `plan` steers and reads activations; `override` and `adapter` change parameters. Cached work of
    a job is reused only within its `cache_namespace`. With `capture` the output has the activations
    of tokens that the model reads.
    """

    tokens: Ids
    _: KW_ONLY
    plan: SteeringPlan | None = None
    override: Override | None = None
    adapter: Adapter | None = None
    cache_namespace: str = ""
    capture: Capture | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens before the scored or generated ones."""
        return len(self.tokens)

    @property
    def num_read(self) -> int:
        """Most tokens that the model reads, which exclude the last generated one."""
        return len(self.tokens)

    @property
    def num_positions(self) -> int:
        """Positions of the context that the job may use at most."""
        return len(self.tokens)

    @property
    def num_expected(self) -> int:
        """Positions that budgets count before the length of a generation is known."""
        return len(self.tokens)

    @property
    def num_scored(self) -> int:
        """Tokens whose log-probability is read."""
        return 0

    @property
    def places(self) -> Places:
        """Positions of the tokens that may be captured."""
        if self.capture is None:
            return NO_PLACES
        return self.capture.find_places(self.num_read, self.prompt_len, len(self.tokens))

    @property
    def num_captured(self) -> int:
        """Activations to be held at once for the capture, over all layers."""
        return len(self.places) * len(self.capture.layers) if self.capture else 0

    @property
    def delta(self) -> ParameterDelta:
        """The change of the model's parameters."""
        return ParameterDelta(self.override, self.adapter)

    @property
    def features(self) -> tuple[Feature, ...]:
        """The engine features that the job needs beyond reading tokens."""
        return find_features(self)

    @property
    def is_changed(self) -> bool:
        """Whether the job changes the model."""
        return bool(self.delta or (self.plan and self.plan.sites))

    @property
    def plan_namespace(self) -> tuple[int, str] | None:
        """The first position whose keys and values the plan changes, and an identifier of the
        change.

        Keys and values of earlier tokens are unchanged, because a token's depend only on itself and
        earlier ones. None without a change.
        """
        if self.plan is None or not self.plan.sites:
            return None
        first = self.plan.first_changed(self.prompt_len)
        return first, self.plan.digest(self.prompt_len).hex()

    @property
    def fingerprint(self) -> bytes | None:
        """SHA-256 of everything that determines the output; None if it is not cached."""
        return None


def find_features(job: Job) -> tuple[Feature, ...]:
    """Return the features that a job's interventions and captures need."""
    names: tuple[Feature, ...] = ("steering", "override", "adapter")
    values = job.plan or job.capture, job.override, job.adapter
    return tuple(n for n, value in zip(names, values, strict=True) if value is not None)


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a job.

    `cached_tokens`: number of tokens from the prefix cache. `trace`, `readings`: of its plan, if it
    steers or keeps any. `activations`: of its capture, in the last output.
    """

    failed: ClassVar[Literal[False]] = False
    _: KW_ONLY
    cached_tokens: int = 0
    trace: SteeringTrace | None = None
    readings: Readings | None = None
    activations: CapturedActivations | None = None

    @property
    def is_last(self) -> bool:
        """Whether this is the last output of its job."""
        return True

    @property
    def num_generated(self) -> int:
        """Generated tokens in this output."""
        return 0


@dataclass(frozen=True, slots=True)
class JobFailure:
    """Why a job has no output: `code` is a problem code, `detail` says what to do."""

    failed: ClassVar[Literal[True]] = True
    code: str
    detail: str

    @property
    def is_last(self) -> bool:
        """Whether this is the last result of its job: always true."""
        return True


JobResult = Output | JobFailure


@dataclass(frozen=True, slots=True)
class ScoreJob(Job):
    """One sequence to score: the model reads T tokens, and its last R rows are scored.

    `targets[r]` is the token that follows row T - R + r: the text's next token, and for the last
    row the one token of the text that the model does not need to read.

        tokens    The  cat  sat        T = 3
        targets        sat  down       R = 2: rows 1 and 2 (of "cat" and "sat") are scored

    With `shares_row` the targets are not a sequence: each of the R follows the last token, and all
    of them are read from its one row.

    With `export`, each row's log-probabilities over the vocabulary are written to that file as
    float32 [R, V]; with `reference`, such a file is read, and some columns compare the rows with
    it: `jsd` gives this model the weight `beta`. Jobs of one head exchange `hidden` states [R, D].

    For each row the `top` most probable tokens are listed, and the ids `alternatives` [R, K]; with
    `tail`, the mass of all others. `policy` applies to these and to the policy columns. With
    `double` everything is computed in float64. For steering, the prompt ends where scored tokens
    begin.

    With `reads_end` the model also reads the text's last token, so that probes do. The last entry
    of `targets` is then a placeholder, and its row is unused.

    With `step_tokens` a step of the engine reads at most so many of the job's tokens.
    """

    targets: Ids
    columns: tuple[str, ...] = ("logprob",)
    top: int = 0
    shares_row: bool = False
    export: str | None = None
    reference: str | None = None
    policy: Policy = NEUTRAL
    double: bool = False
    reads_end: bool = False
    step_tokens: int | None = None
    alternatives: Ids | None = None
    tail: bool = False
    beta: float = 0.5
    exchange: Literal["rows", "hidden"] = "rows"

    @property
    def features(self) -> tuple[Feature, ...]:
        """The engine features that the job needs."""
        needed = find_features(self)
        return needed if self.step_tokens is None else (*needed, "step_tokens")

    @property
    def prompt_len(self) -> int:
        """Tokens before the scored ones."""
        return len(self.tokens) - (0 if self.shares_row else len(self.targets) - 1)

    @property
    def first_row(self) -> int:
        """The first row that is scored."""
        return self.prompt_len - 1

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The rows [R] that are scored, one for each target."""
        count = len(self.targets)
        return np.arange(count) * (not self.shares_row) + self.first_row

    @property
    def num_scored(self) -> int:
        """Tokens whose log-probability is read."""
        return len(self.targets) - self.reads_end

    @property
    def fingerprint(self) -> bytes | None:
        """SHA-256 of everything that determines the scores, and of the cache namespace; None with a
        file, a capture, or kept readings. Lengths are hashed before the contents.
        """
        options = self.write_options()
        if options is None:
            return None
        plan = b"" if self.plan is None else self.plan.digest(self.prompt_len)
        others = b"" if self.alternatives is None else self.alternatives.tobytes()
        return self.digest(
            options, self.tokens.tobytes(), self.targets.tobytes(), self.shares_row, plan, others
        )

    def write_options(self) -> bytes | None:
        """Return everything that determines scores except tokens and plan; None without a
        fingerprint.
        """
        keeps = self.plan is not None and self.plan.kept != "none"
        if (
            keeps
            or self.capture is not None
            or self.export is not None
            or self.reference is not None
        ):
            return None
        override = self.override and self.override.identity
        adapter = self.adapter and self.adapter.sha256
        changes = override, adapter, self.reads_end, self.step_tokens, self.tail
        read = self.columns, astuple(self.policy), self.double, self.cache_namespace
        return repr((read, changes)).encode()

    def digest(
        self,
        options: bytes,
        tokens: bytes,
        targets: bytes,
        shares_row: bool,
        plan: bytes,
        alternatives: bytes = b"",
    ) -> bytes:
        """Return SHA-256 of a job like this one, with other tokens, targets and alternatives."""
        sizes = len(tokens) // 4, len(targets) // 4, len(options), self.top, len(alternatives) // 4
        head = FINGERPRINT_HEAD.pack(*sizes, shares_row)
        parts = head, options, tokens, targets, alternatives, plan
        return hashlib.sha256(b"".join(parts)).digest()


TOP_IDS, TOP_LOGPROBS, TOP_TAIL = "top_ids", "top_logprobs", "top_tail"
ALTERNATIVES, ALTERNATIVES_TAIL = "alternatives", "alternatives_tail"


@dataclass(frozen=True, slots=True)
class ScoreOutput(Output):
    """The columns of a job's R rows, each [R], and the tokens listed for each row.

    These are `top_ids` and `top_logprobs` [R, top], most probable first, and `alternatives` [R, K];
    the mass of all other tokens is `top_tail` and `alternatives_tail` [R].
    """

    columns: dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class GenerateJob(Job):
    """One prompt of T tokens to continue by at most `max_tokens` tokens, drawn by `policy`.

    The same seed gives the same tokens whatever else is in the batch; a job without one has a seed
    drawn. Generation ends at a token that ends the sequence, unless `ignore_eos`, at one of
    `stop_ids`, or where the text contains a string of `stop`, which is left out unless
    `include_stop`; at none of these before the policy's `min_tokens`. With `skip_special` the text
    leaves out special tokens. With `stream` the output is sent in pieces. Without `logprobs`
    neither columns nor alternatives are read: the `top` most probable tokens, or those of `listed`.

    `columns` are read with the log-probability from the logits that each token is drawn from; the
    policy columns are of the distribution that draws it. With `double` all of this, the draw
    included, is computed in float64. With `form` the whole continuation matches it: each token is
    drawn from the tokens that may follow, and the policy columns are of these.
    """

    max_tokens: int
    policy: Policy = NEUTRAL
    seed: int = field(default_factory=draw_seed)
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    ignore_eos: bool = False
    top: int = 0
    logprobs: bool = True
    stream: bool = False
    columns: tuple[str, ...] = ()
    double: bool = False
    form: ReplyForm | None = None
    listed: tuple[int, ...] = ()

    @property
    def features(self) -> tuple[Feature, ...]:
        """The engine features that the job needs."""
        needed = find_features(self)
        return needed if self.form is None else (*needed, "structure")

    @property
    def min_tokens(self) -> int:
        """Least number of tokens of the continuation."""
        return self.policy.adjustments.min_tokens if self.policy.adjustments else 0

    @property
    def num_read(self) -> int:
        """Most tokens that the model reads, which exclude the last generated one."""
        return len(self.tokens) + self.max_tokens - 1

    @property
    def num_positions(self) -> int:
        """Positions of the context that the job may use at most."""
        return len(self.tokens) + self.max_tokens

    @property
    def num_expected(self) -> int:
        """Positions that budgets count before the length of the generation is known."""
        return len(self.tokens) + min(self.max_tokens, EXPECTED_TOKENS)


@dataclass(frozen=True, slots=True)
class GenerateOutput(Output):
    """A piece of a job's continuation: N new tokens and their text.

    `logprobs` [N] are of the model, at temperature 1 and without any cut; `columns` are [N] each,
    alternatives [N, top]. `finish_reason`: None before the last piece, then `stop` or `length`. The
    last piece has the trace of a steered job. Readings are of the rows from which the tokens were
    drawn: the first piece has those of the prompt's last token, or of the whole prompt if the plan
    keeps them; the last generated token has no reading.
    """

    token_ids: Ids
    text: str
    logprobs: Scores
    top_ids: Ids
    top_logprobs: Scores
    finish_reason: str | None = None
    columns: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """Whether no piece follows."""
        return self.finish_reason is not None

    @property
    def num_generated(self) -> int:
        """Tokens of the piece."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class CheckOverrideJob(Job):
    """Check that a direction fits the model: `shapes` of its tensors, by name."""

    tokens: Ids = field(default_factory=lambda: NO_TOKENS, init=False)
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def features(self) -> tuple[Feature, ...]:
        """The engine features that the job needs."""
        return ("override",)


@dataclass(frozen=True, slots=True)
class CheckOverrideOutput(Output):
    """The direction fits: it changes `moved` of the model's `total` parameters."""

    moved: int
    total: int


@dataclass(frozen=True, slots=True)
class CheckAdapterJob(Job):
    """Check that an adapter fits the model, by loading it."""

    tokens: Ids = field(default_factory=lambda: NO_TOKENS, init=False)


@dataclass(frozen=True, slots=True)
class CheckAdapterOutput(Output):
    """The adapter fits: it changes `updated` of the model's weights."""

    updated: int


@dataclass(frozen=True, slots=True)
class CaptureJob(Job):
    """A sequence of tokens to read only for its activations.

    For steering and positions, the prompt is the first `num_prompt` tokens, or the whole sequence.
    """

    num_prompt: int | None = None
    _: KW_ONLY
    capture: Capture

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens) if self.num_prompt is None else self.num_prompt

    @property
    def num_rows(self) -> int:
        """Activations per layer: one, or one for each token that is read."""
        return len(self.places) if self.capture.read == "each" else 1


@dataclass(frozen=True, slots=True)
class CaptureOutput(Output):
    """The activations of a `CaptureJob`."""

    @property
    def activations_LTD(self) -> Scores:
        """The activations [L, T, D]: T is the job's `num_rows`."""
        assert self.activations is not None
        return self.activations.activations_LTD

    @property
    def activations_LD(self) -> Scores:
        """The first activation of each layer: the only one, unless the job captures each token."""
        return self.activations_LTD[:, 0]

    @property
    def sinks(self) -> dict[int, list[int]]:
        """By layer, the tokens left out of a mean."""
        assert self.activations is not None
        return self.activations.sinks

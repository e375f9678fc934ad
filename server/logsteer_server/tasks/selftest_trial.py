"""What the checks of a self-test share: texts, steering plans, jobs, and how values are compared.

Nothing is drawn at random twice: seeds are fixed, so that a self-test repeats itself.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from logsteer.errors import api_error
from logsteer.schemas.operations import PromiseName, SelftestRequest, Verdict
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import (
    CaptureJob,
    GenerateJob,
    Ids,
    Policy,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.contract.plan import Positions, ResidualOp, Site, SteeringPlan, Vector
from logsteer_server.models.model import ResidentModel
from logsteer_server.stores.layer_vectors import RESID_POST
from logsteer_server.tasks.run import Batch, Collector, Purpose
from logsteer_server.text.tokenizer import TextCodec

MAX_TOKENS = 32_768
"""Of a self-test's texts, and of those that fill a step: several steps of any usual size."""
SEED = 20_011
TEXTS = (
    "Once upon a time there was a little girl who lived near the sea with her old grandfather, "
    "and every morning the two of them counted the boats that came back from the night.",
    "The committee met on 14 March 2019 and approved, by 7 votes to 2, a budget of 1,482,300.50 "
    "for the repair of the northern bridge; the work is to end before the winter of 2021.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values) if values else float('nan')\n",
    "Größe und Maß: naïve façades, 東京の天気は晴れ, привет мир, ∑ x² ≤ 4 → 🙂",
    "Yes, of course.",
    "red red red blue red red red blue red red red blue red red red blue red red red blue",
)
"""Prose, numbers, code, other scripts, something short, something that repeats itself."""

PROMPTS = 4
PROMPT_TOKENS = 24
SAMPLE_TOKENS = 96
BUILT_IN_TOKENS = 160
CUT_POLICY = Policy(temperature=0.8, top_k=20)

EPSILON = {"float64": 2.0**-23, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Machine epsilon by dtype; rows of float64 models are float32, too."""
TF32_EPSILON = 2.0**-10
QUANTIZED_EPSILON = 2.0**-7
"""The step of 8-bit activations between 0 and their largest."""
FLOAT32_TOLERANCE = 1e-4
TOLERATED_FLOORS = 12.0
RMS_SHARE = 0.25
"""What the root mean square may be of what the largest difference may be.

Rounding hits tokens at random, so that the largest of a thousand is three to four times the root
mean square; a fault that moves all tokens alike shows in the latter first.
"""


Logprobs: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise floor of some models' arithmetic, and what is tolerated of it: nats a token.

    With logits of root mean square s, machine epsilon e and L layers, the floor is

        e s sqrt(L) / 2

    A stream to which each of L layers adds twice is rounded 2 L times, each time by up to e / 2 of
    itself, uniformly: sqrt(2 L) e / sqrt(12), and matrix products round as much again. In bfloat16
    the root mean square of the error was measured at 1.0 floors for a trained model of 5 layers,
    and at 1.2 to 2.7 for random ones of 4 to 64; the largest of a thousand errors at 4 to 12.
    """

    floor: float
    tolerance: float

    @classmethod
    def measure(cls, logit_scale: float, *infos: EngineInfo) -> "Noise":
        """Return the noise of the coarsest of these engines, for logits of this size."""
        epsilon = max(map(_find_epsilon, infos))
        floor = epsilon * logit_scale * float(np.sqrt(infos[0].num_layers)) / 2
        exact = epsilon <= EPSILON["float32"]
        return cls(floor, FLOAT32_TOLERANCE if exact else TOLERATED_FLOORS * floor)


def _find_epsilon(info: EngineInfo) -> float:
    found = [EPSILON[info.dtype], EPSILON[info.logits_dtype]]
    if info.tf32:
        found.append(TF32_EPSILON)
    if info.quantization is not None:
        found.append(QUANTIZED_EPSILON)
    return max(found)


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one check."""

    name: PromiseName
    verdict: Verdict
    reason: str
    noise: Noise
    num_compared: int = 0
    largest: float = 0.0
    rms: float = 0.0

    def write(self, promise: str) -> dict[str, Any]:
        """Return the fields of `SelftestCheck`."""
        is_number = self.num_compared > 0 and np.isfinite(self.largest)
        return {
            "name": self.name,
            "promise": promise,
            "verdict": self.verdict,
            "reason": self.reason,
            "num_compared": self.num_compared,
            "largest_difference": self.largest if is_number else None,
            "rms_difference": self.rms if is_number else None,
            "tolerance": self.noise.tolerance,
            "noise_floor": self.noise.floor,
        }


@dataclass(slots=True)
class Discrepancy:
    """How far values are apart that should be equal: the largest, where it is, and the sum of
    squares.
    """

    count: int = 0
    squares: float = 0.0
    largest: float = 0.0
    where: str = ""

    @classmethod
    def of(
        cls, found: Sequence[npt.ArrayLike], wanted: Sequence[npt.ArrayLike], noun: str = "text"
    ) -> "Discrepancy":
        """Compare the values of each text with what is wanted of it."""
        discrepancy = cls()
        discrepancy.add_all(found, wanted, noun)
        return discrepancy

    def add(self, found: npt.ArrayLike, wanted: npt.ArrayLike, where: str) -> None:
        """Compare values of one text; one that is no number differs infinitely."""
        a, b = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.where(a == b, 0.0, np.abs(a - b))
        apart = np.where(np.isnan(apart), np.inf, apart)
        self.count += len(apart)
        self.squares += float((apart**2).sum())
        if len(apart) and apart.max() > self.largest:
            self.largest = float(apart.max())
            self.where = f"value {int(apart.argmax()) + 1} of {len(apart)} of {where}"

    def add_all(
        self, found: Sequence[npt.ArrayLike], wanted: Sequence[npt.ArrayLike], noun: str = "text"
    ) -> None:
        """Compare the values of each text with what is wanted of it."""
        for number, (own, others) in enumerate(zip(found, wanted, strict=True), 1):
            self.add(own, others, f"{noun} {number}")

    def judge(self, name: PromiseName, noise: Noise, evidence: str) -> Finding:
        """Return the finding; `evidence` says what was measured."""
        if not self.count:
            return Finding(name, "not_run", f"nothing was compared: {evidence}", noise)
        rms = float(np.sqrt(self.squares / self.count))
        is_noise = self.largest <= noise.tolerance and rms <= RMS_SHARE * noise.tolerance
        verdict: Verdict = "passed" if is_noise else "failed"
        if not is_noise:
            evidence = f"{self.where} differs by {self.largest:.3g} nats; {evidence}"
        return Finding(name, verdict, evidence, noise, self.count, self.largest, rms)


@dataclass(frozen=True, slots=True)
class DrawnTexts:
    """Continuations of one kind: what was asked for, the tokens, and what they were drawn with."""

    jobs: list[GenerateJob]
    completions: list[Ids]
    logprobs: list[npt.NDArray[np.float32]]

    def reread(self, steered: bool = True, **fields: Any) -> list[ScoreJob]:
        """Return jobs that score the completions."""
        return [
            ScoreJob(
                np.concatenate([job.tokens, ids])[:-1],
                ids,
                plan=job.plan if steered else None,
                **fields,
            )
            for job, ids in zip(self.jobs, self.completions, strict=True)
        ]


@dataclass(slots=True)
class Trial:
    """One self-test: its models, its texts, and what the checks so far have found.

    `plain` are the texts' log-probabilities, each scored alone; `steered` those under
    `plans.whole`, next to unsteered texts. `max_tokens` bounds what is read to fill a step.
    """

    model: ResidentModel
    info: EngineInfo
    other: ResidentModel | None
    given: list[Ids]
    max_tokens: int
    texts: list[Ids] = field(default_factory=list)
    samples: dict[PromiseName, DrawnTexts] = field(default_factory=dict)
    plans: "TrialPlans | None" = None
    plain: list[npt.NDArray[np.float32]] = field(default_factory=list)
    steered: list[npt.NDArray[np.float32]] = field(default_factory=list)
    noise: Noise = field(default_factory=lambda: Noise(0.0, 0.0))
    logit_scale: float = 0.0

    @property
    def why_unsteered(self) -> str:
        """Why the model cannot be steered; empty where it can."""
        if lacking := self.info.lacks.get("steering"):
            return lacking
        return "" if RESID_POST in self.info.hooks else "the model offers no hook resid_post"

    def require_plans(self) -> "TrialPlans":
        """Return the plans. Errors: CheckEndedError where the model cannot be steered."""
        if self.plans is None:
            raise CheckEndedError("not_run", self.why_unsteered)
        return self.plans

    def jobs(self, plan: SteeringPlan | None = None, first_row: int = 0) -> list[ScoreJob]:
        """Return jobs that score each text from the token behind this row on, if it has one."""
        return [score(ids, plan, first_row) for ids in self.texts if len(ids) > first_row + 1]


def score(ids: Ids, plan: SteeringPlan | None = None, first_row: int = 0) -> ScoreJob:
    """Return a job that scores all tokens of a text that stand behind the given row's."""
    return ScoreJob(ids[:-1], ids[first_row + 1 :], plan=plan)


def choose_texts(
    body: SelftestRequest, codec: TextCodec, info: EngineInfo, context: int, max_tokens: int
) -> list[Ids]:
    """Return the texts of a self-test as token ids: those given, else the built-in ones.

    Errors: APIError `invalid_request`, `context_too_long`, `payload_too_large`.
    """
    if body.token_ids:
        found = [np.array(ids, np.int32) for ids in body.token_ids]
    else:
        encoded = codec.encode_ids(body.texts or TEXTS)
        found = [np.array([*codec.bos_ids("auto", ids), *ids], np.int32) for ids in encoded]
    if not (body.texts or body.token_ids):
        found = [ids[: min(context, BUILT_IN_TOKENS)] for ids in found]
        return [ids for ids in found if len(ids) > 1 and ids.max() < info.vocab_size]
    param = "token_ids" if body.token_ids else "texts"
    total = sum(map(len, found))
    if total > max_tokens:
        detail = f"The texts have {total} tokens, at most {max_tokens} are allowed: send fewer."
        raise api_error("payload_too_large", detail, param=param)
    for number, ids in enumerate(found):
        place = f"{param}.{number}"
        if len(ids) > context:
            detail = f"It has {len(ids)} tokens, at most {context} are allowed; shorten it."
            raise api_error("context_too_long", detail, param=place)
        if len(ids) < 2:
            detail = "It has fewer than two tokens, so there is nothing to score; lengthen it."
            raise api_error("invalid_request", detail, param=place)
        if ids.max() >= info.vocab_size:
            detail = f"It has token {ids.max()}, the model's vocabulary is {info.vocab_size}."
            raise api_error("invalid_request", detail, param=place)
    return found


@dataclass(frozen=True, slots=True)
class TrialPlans:
    """Plans that steer at the middle layer, each changing an activation by about a quarter.

    `whole` adds a vector at some tokens, `nothing` goes the way of steering and changes nothing.
    """

    add: SteeringPlan
    turn: SteeringPlan
    ablate: SteeringPlan
    whole: SteeringPlan
    nothing: SteeringPlan

    @classmethod
    def make(cls, info: EngineInfo, norm: float) -> "TrialPlans":
        """Make the plans for activations of this norm."""
        drawn_D = np.random.default_rng(SEED).normal(size=info.hidden_size)
        unit_D: Vector = (drawn_D / np.linalg.norm(drawn_D)).astype(np.float32)
        layer = info.num_layers // 2
        added = Site(layer, RESID_POST, (0.25 * norm * unit_D).astype(np.float32))
        turned = Site(layer, RESID_POST, None, (turn_op(unit_D),))
        ablated = Site(layer, RESID_POST, None, (ResidualOp(unit_D),))
        same = ResidualOp(unit_D, per_component=1.0)
        nothing = (Site(n, RESID_POST, 0 * unit_D, (same,)) for n in range(info.num_layers))
        some = Positions("slices", ((1, 5), (9, 2**20)))
        return cls(
            SteeringPlan((added,)),
            SteeringPlan((turned,)),
            SteeringPlan((ablated,)),
            SteeringPlan((added,), some),
            SteeringPlan(tuple(nothing)),
        )


def turn_op(unit_D: Vector) -> ResidualOp:
    """Return the operation that turns an activation toward a vector by 15 degrees."""
    return ResidualOp(unit_D, per_component=1.0, degrees=15.0)


def capture_norm(trial: Trial) -> CaptureJob:
    """Return the job that reads the activation whose norm `TrialPlans` are made for."""
    longest = max(trial.given, key=len)
    return CaptureJob(longest, (trial.info.num_layers // 2,), RESID_POST, "last")


def plan_samples(trial: Trial, context: int) -> dict[PromiseName, list[GenerateJob]]:
    """Return the continuations that are drawn, by the check that looks at them."""
    length = min(PROMPT_TOKENS, max(1, context // 2))
    prompts = [np.ascontiguousarray(ids[:length]) for ids in trial.given]
    sampled = [
        GenerateJob(ids, min(SAMPLE_TOKENS, context - len(ids)), seed=SEED + n, ignore_eos=True)
        for n, ids in enumerate(prompts[n % len(prompts)] for n in range(PROMPTS))
    ]
    found: dict[PromiseName, list[GenerateJob]] = {"sampled": sampled}
    if trial.plans is not None:
        ways = [
            SteeringPlan(plan.sites, Positions(where))
            for where in ("all", "completion")
            for plan in (trial.plans.add, trial.plans.turn)
        ]
        found["steered_sampled"] = [
            replace(job, plan=plan) for job, plan in zip(sampled, ways, strict=True)
        ]
    if "log_q" in trial.info.columns:
        found["drawn"] = [replace(job, policy=CUT_POLICY) for job in sampled]
    return found


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a check has measured: how far values are apart, and `evidence` of what was compared.

    `noise` is the trial's own where it is None. Where the check did not reach what it is about, it
    fails even without a difference.
    """

    discrepancy: Discrepancy
    evidence: str
    noise: Noise | None = None
    has_reached: bool = True


class CheckEndedError(Exception):
    """A check has no values to compare: its verdict, and why."""

    def __init__(self, verdict: Verdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict


Steps: TypeAlias = Generator[Batch, None, Measurement]


def score_all(
    jobs: Sequence[ScoreJob], model: ResidentModel | None = None, replica: int | None = None
) -> Generator[Batch, None, list[ScoreOutput]]:
    """Yield the batch of some jobs, and return their outputs."""
    collector = Collector()
    purpose: Purpose = "reference" if model else "work"
    yield Batch(jobs, collector.take, model, purpose=purpose, replica=replica)
    return collector.outputs


def read_logprobs(outputs: Sequence[ScoreOutput]) -> list[Logprobs]:
    """Return the log-probabilities of each output, a row a token."""
    return [output.columns["logprob"] for output in outputs]

"""A model of a few matrices behind a scripted handle, right in every way but those asked for.

It reads tokens one after another into a state of D numbers, which plans may change, and has logits
of that state. Prefixes that were read before come from a cache, as vLLM has it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from logsteer.schemas import ReplicaCard
from logsteer_server.contract.batches import ResultPart
from logsteer_server.contract.captures import CapturedActivations
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import (
    CaptureJob,
    CaptureOutput,
    GenerateJob,
    GenerateOutput,
    Job,
    Output,
    Routing,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.contract.plan import Site, SteeringPlan, SteeringTrace
from tests.server import scripted_model
from tests.server.scripted_model import ScriptedHandle

INFO = replace(scripted_model.INFO, num_layers=2, hidden_size=12, context_length=96)
BLOCK = 16


@dataclass(frozen=True)
class Moment:
    """How a job came to be scored: its call, what the cache gave, the replica, and other calls that
    run meanwhile.
    """

    job: Job
    call: Sequence[Job]
    serial: int
    cached: int
    replica: int
    beside: Sequence[Sequence[Job]]


Fault = Callable[[Moment], float]
"""Nats by which the log-probabilities of a job are off."""


class HonestEngine(ScriptedHandle):
    """Answers from the matrices of `seed`; what is wrong is said by functions of each job.

    `fault` moves scores; `steer` takes the place of what a plan does at a site; `cuts` says whether
    the sampler obeys `top_k`; `traces` how many of the steered tokens a trace counts.
    """

    def __init__(
        self,
        fault: Fault = lambda _moment: 0.0,
        info: EngineInfo = INFO,
        *,
        seed: int = 0,
        steer: Callable[[Job, Site, np.ndarray], np.ndarray] | None = None,
        sampled_fault: Callable[[GenerateJob], float] = lambda _job: 0.0,
        cuts: bool = True,
        traces: float = 1.0,
    ) -> None:
        super().__init__(info)
        self._fault, self._steer = fault, steer or (lambda _job, site, x: apply_site(site, x))
        self._sampled_fault, self._cuts, self._traces = sampled_fault, cuts, traces
        draws = np.random.default_rng(seed)
        width = info.hidden_size
        self._embedding_VD = draws.normal(size=(info.vocab_size, width))
        self._step_DD = draws.normal(size=(width, width)) / np.sqrt(width)
        self._head_DV = draws.normal(size=(width, info.vocab_size)).astype(np.float32)
        self._read: set[bytes] = set()
        self._known: dict[bytes, np.ndarray] = {}
        self._known_log_p: dict[bytes, np.ndarray] = {}
        self._serial = 0
        self._open_calls: list[Sequence[Job]] = []

    def read(self) -> Sequence[ReplicaCard]:
        return [*super().read()] * 2

    def _advance(self, job: Job, x_D: np.ndarray, position: int, token: int) -> np.ndarray:
        x_D = 0.7 * np.tanh(self._step_DD @ x_D + self._embedding_VD[token])
        plan, own = job.plan, (position, position + 1, job.prompt_len)
        if plan is not None and plan.positions.mask(*own).any():
            for site in plan.sites:
                x_D = self._steer(job, site, x_D)
        return x_D

    def _states(self, job: Job) -> np.ndarray:
        """Return the state after each token [T, D]; equal work is done once."""
        key = self._key(job)
        if key not in self._known:
            x_D, states = np.zeros(self.info.hidden_size), []
            for position, token in enumerate(job.tokens.tolist()):
                x_D = self._advance(job, x_D, position, token)
                states.append(x_D)
            self._known[key] = np.array(states)
        return self._known[key]

    def _salt(self, job: Job) -> bytes:
        return b"" if job.plan is None else job.plan.digest(job.prompt_len)

    def _key(self, job: Job) -> bytes:
        return self._salt(job) + type(job).__name__.encode() + job.tokens.tobytes()

    def _log_p(self, job: ScoreJob) -> np.ndarray:
        """Return log-probabilities after each token [T, V]; equal work is done once."""
        key = self._key(job)
        if key not in self._known_log_p:
            self._known_log_p[key] = self._log_softmax(self._states(job).astype(np.float32))
        return self._known_log_p[key]

    def _log_softmax(self, states_TD: np.ndarray) -> np.ndarray:
        logits_TV = states_TD @ self._head_DV
        shifted_TV = logits_TV - logits_TV.max(-1, keepdims=True)
        return shifted_TV - np.log(np.exp(shifted_TV).sum(-1, keepdims=True))

    def _find_cached(self, job: Job) -> int:
        """Tokens of whole blocks that were read before, in front of the first row."""
        salt = self._salt(job)
        ends = range(BLOCK, len(job.tokens) + 1, BLOCK)
        keys = {end: salt + job.tokens[:end].tobytes() for end in ends}
        first_row = job.first_row if isinstance(job, ScoreJob) else 0
        found = max(
            (end for end in ends if end <= first_row and keys[end] in self._read), default=0
        )
        self._read |= set(keys.values())
        return found

    def _score(self, job: ScoreJob, moment: Moment) -> ScoreOutput:
        log_p_RV = self._log_p(job)[job.first_row :]
        own_R = np.take_along_axis(log_p_RV, job.targets[:, None].astype(np.int64), -1)[:, 0]
        columns = {"logprob": own_R + self._fault(moment)}
        if "logit_std" in job.columns:
            logits_RV = self._states(job)[job.first_row :] @ self._head_DV
            columns |= {"logit_mean": logits_RV.mean(-1), "logit_std": logits_RV.std(-1)}
        if "log_q" in job.columns:
            rank_R = 1 + (log_p_RV > own_R[:, None]).sum(-1)
            columns["log_q"] = np.where(rank_R <= job.policy.top_k, own_R, -np.inf)
        read = {name: columns[name].astype(np.float32) for name in job.columns}
        if job.top:
            read["top_logprobs"] = -np.sort(-log_p_RV, -1)[:, : job.top].astype(np.float32)
            read["top_ids"] = np.zeros_like(read["top_logprobs"], np.int32)
        return ScoreOutput(
            read,
            cached_tokens=moment.cached,
            trace=self._trace(job, len(job.tokens)),
        )

    def _trace(self, job: Job, num_tokens: int) -> SteeringTrace | None:
        if job.plan is None:
            return None
        count = job.plan.positions.count(num_tokens, job.prompt_len)
        sites = {site.name: (count, 0.25) for site in job.plan.sites}
        return SteeringTrace((int(self._traces * count),), sites)

    def _generate(self, job: GenerateJob) -> GenerateOutput:
        draws = np.random.default_rng(job.seed)
        x_D, ids, logprobs = self._states(job)[-1], [], []
        for position in range(len(job.tokens), len(job.tokens) + job.max_tokens):
            log_p_V = self._log_softmax(x_D[None])[0]
            q_V = np.exp(log_p_V / job.policy.temperature)
            if self._cuts and job.policy.top_k:
                q_V[np.argsort(-log_p_V)[job.policy.top_k :]] = 0
            ids.append(int(draws.choice(len(q_V), p=q_V / q_V.sum())))
            logprobs.append(log_p_V[ids[-1]] + self._sampled_fault(job))
            x_D = self._advance(job, x_D, position, ids[-1])
        none = np.zeros((len(ids), 0), np.int32)
        return GenerateOutput(
            np.array(ids, np.int32), "", np.array(logprobs, np.float32), none,
            none.astype(np.float32), "length", trace=self._trace(job, len(job.tokens) + len(ids)),
        )  # fmt: skip

    async def run(
        self, jobs: Sequence[Job], routing: Routing | None = None
    ) -> AsyncGenerator[ResultPart, None]:
        self.calls.append(list(jobs))
        self._serial += 1
        serial, replica = self._serial, self._serial % 2  # calls go to one and the other in turn
        self._open_calls.append(jobs)
        try:
            await asyncio.sleep(0.02)  # others come meanwhile
            for index, job in enumerate(jobs):
                await asyncio.sleep(0)
                output: Output
                match job:
                    case ScoreJob():
                        cached = self._find_cached(job)
                        beside = [call for call in self._open_calls if call is not jobs]
                        moment = Moment(job, jobs, serial, cached, replica, beside)
                        output = self._score(job, moment)
                    case GenerateJob():
                        output = self._generate(job)
                    case CaptureJob():
                        last_D = self._states(job)[-1].astype(np.float32)
                        found = CapturedActivations(np.array([[last_D]]), job.places)
                        output = CaptureOutput(activations=found)
                    case _:
                        raise AssertionError(job)
                yield ResultPart([index], [output], time.monotonic())
        finally:
            self._open_calls = [call for call in self._open_calls if call is not jobs]


def apply_site(site: Site, x_D: np.ndarray) -> np.ndarray:
    """What plans of self-tests do: add, keep or take the component along a vector, or turn."""
    if site.offset is not None:
        x_D = x_D + site.offset
    for op in site.ops:
        u_D = op.direction.astype(np.float64)
        x_D = x_D + (op.per_component - 1) * (x_D @ u_D) * u_D
        if op.degrees:
            x_D = x_D + np.sin(np.deg2rad(op.degrees)) * np.linalg.norm(x_D) * u_D
    return x_D


def is_zero(plan: SteeringPlan | None) -> bool:
    """Whether a plan changes nothing."""
    if plan is None:
        return False
    return all(
        (site.offset is None or not site.offset.any())
        and all(op.per_component == 1 and not op.degrees for op in site.ops)
        for site in plan.sites
    )


def steered(job: Job) -> bool:
    """Whether a plan changes something."""
    return job.plan is not None and not is_zero(job.plan)

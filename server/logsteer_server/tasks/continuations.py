"""`/steer` and `/generate`: prompts as jobs, and their outputs as completions."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from logsteer.schemas import GenerateRequest, PromptRequest
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import (
    GenerateJob,
    GenerateOutput,
    Policy,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.tasks.aggregates import aggregate_columns
from logsteer_server.tasks.completions import check_length, read_prompts
from logsteer_server.text.sums import sum_usage
from logsteer_server.text.tokenizer import TextCodec


def plan_continuations(
    request: PromptRequest, codec: TextCodec, info: EngineInfo
) -> list[GenerateJob]:
    """An unsteered job for each completion, `n` of the first prompt, then those of the next.

    Errors: APIError `invalid_request`, `context_too_long`.
    """
    seed = secrets.randbelow(2**31) if request.seed is None else request.seed
    jobs: list[GenerateJob] = []
    for ids in _encode_prompts(request, codec, info):
        check_length(ids, request.max_tokens, info)
        first = GenerateJob(
            np.array(ids, dtype=np.int32),
            request.max_tokens,
            Policy(request.temperature, request.top_k, request.top_p, request.min_p),
            seed=seed,
            stop=tuple(request.stop),
            include_stop=request.include_stop,
            ignore_eos=request.ignore_eos,
            stream=request.stream,
        )
        jobs += [replace(first, seed=seed + len(jobs) + k) for k in range(request.n)]
    return jobs


def _encode_prompts(request: PromptRequest, codec: TextCodec, info: EngineInfo) -> list[list[int]]:
    if request.messages is not None:
        text = codec.render_chat(request.messages)
        return [codec.encode_ids([text])[0]]
    given = request.prompts or request.prompt_ids or []
    return [ids for _, ids in read_prompts(given, codec, info, request.bos)]


@dataclass(slots=True)
class Continuation:
    """The pieces of one job's output, as far as they have come."""

    job: GenerateJob
    pieces: list[GenerateOutput] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """All its tokens so far."""
        return [token for piece in self.pieces for token in piece.token_ids.tolist()]

    def write(self, codec: TextCodec) -> dict[str, Any]:
        """The whole as a `Completion`."""
        ids = self.token_ids
        logprobs = np.concatenate([piece.logprobs for piece in self.pieces])
        total = float(logprobs.astype(np.float64).sum())
        return {
            "text": "".join(piece.text for piece in self.pieces),
            "token_ids": ids,
            "tokens": [codec.piece(token) for token in ids],
            "logprobs": logprobs,
            "logprob": total if math.isfinite(total) else None,
            "num_tokens": len(ids),
            "finish_reason": self.pieces[-1].finish_reason,
            "seed": self.job.seed,
        }


class Diagnosis:
    """What the policy saw at each step of the completions: they are scored as they were sampled."""

    def __init__(self, jobs: Sequence[ScoreJob], window: int) -> None:
        self.jobs = jobs
        self._window = window
        self._outputs: dict[int, ScoreOutput] = {}

    def add(self, index: int, output: ScoreOutput) -> None:
        """Take the scores of a completion in."""
        self._outputs[index] = output

    def write(self, index: int) -> dict[str, Any]:
        """Columns and aggregates of a completion."""
        columns = self._outputs[index].columns
        return {"columns": columns, "aggregates": aggregate_columns(columns.items(), self._window)}

    def count_usage(self) -> dict[str, int]:
        """What it adds to the fields of `Usage`."""
        return sum_usage(self.jobs, self._outputs.values())


class Continuations:
    """The completions of a request: those of its jobs, then those of a baseline's."""

    def __init__(
        self, jobs: Sequence[GenerateJob], baseline: Sequence[GenerateJob], per_prompt: int
    ) -> None:
        self.jobs = [*jobs, *baseline]
        self._per_prompt = per_prompt
        self._num_own = len(jobs)
        self.entries = [Continuation(job) for job in self.jobs]

    def add(self, index: int, piece: GenerateOutput) -> dict[str, Any]:
        """Take a piece of a job's output in; the piece as a `SteerPiece`."""
        self.entries[index].pieces.append(piece)
        place = index % self._num_own
        return {
            "prompt": place // self._per_prompt,
            "completion": place % self._per_prompt,
            "steered": self.jobs[index].plan is not None,
            "text": piece.text,
            "token_ids": piece.token_ids,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
        }

    @property
    def steered_ends(self) -> list[GenerateOutput]:
        """The last piece of each steered job."""
        return [entry.pieces[-1] for entry in self.entries if entry.job.plan is not None]

    def write(self, codec: TextCodec, diagnosis: Diagnosis | None) -> list[dict[str, Any]]:
        """All of them as `PromptCompletions`, once every job has ended."""
        written = [entry.write(codec) for entry in self.entries]
        if diagnosis is not None:
            for index in range(self._num_own):
                written[index] |= diagnosis.write(index)
        size, own = self._per_prompt, self._num_own
        results = []
        for start in range(0, own, size):
            baseline = written[own + start : own + start + size] or None
            results.append({"completions": written[start : start + size], "baseline": baseline})
        return results

    def count_usage(self, diagnosis: Diagnosis | None) -> dict[str, int]:
        """The fields of `Usage`."""
        pieces = [piece for entry in self.entries for piece in entry.pieces]
        usage = {
            "prompt_tokens": sum(len(job.tokens) for job in self.jobs),
            "scored_tokens": 0,
            "generated_tokens": sum(len(piece.token_ids) for piece in pieces),
            "cached_tokens": sum(entry.pieces[-1].cached_tokens for entry in self.entries),
        }
        more = diagnosis.count_usage() if diagnosis else {}
        return {name: count + more.get(name, 0) for name, count in usage.items()}


def plan_diagnosis(request: GenerateRequest, continuations: Continuations) -> Diagnosis:
    """The jobs that score each completion under the policy that drew it."""
    jobs = []
    for entry in continuations.entries:
        ids = np.array(entry.token_ids, dtype=np.int32)
        jobs.append(
            ScoreJob(
                np.concatenate([entry.job.tokens, ids[:-1]]),
                ids,
                tuple(dict.fromkeys(["logprob", *request.columns])),
                plan=entry.job.plan,
                override=entry.job.override,
                adapter=entry.job.adapter,
                policy=entry.job.policy,
                double=request.precision == "float64",
            )
        )
    return Diagnosis(jobs, request.window)

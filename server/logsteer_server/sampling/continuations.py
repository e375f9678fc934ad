"""`/steer`: prompts as jobs, steered and as a baseline, and their outputs as completions."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from logsteer.schemas import SteerRequest
from logsteer_server.engines.base import EngineInfo, GenerateJob, GenerateOutput
from logsteer_server.sampling.completions import check_length, read_prompts
from logsteer_server.scoring.tokenizer import TextCodec


def plan_continuations(
    request: SteerRequest, codec: TextCodec, info: EngineInfo
) -> list[GenerateJob]:
    """An unsteered job for each completion, `n` of the first prompt, then those of the next.

    Errors: APIError `invalid_request`, `context_too_long`.
    """
    seed = secrets.randbelow(2**31) if request.seed is None else request.seed
    jobs = []
    for ids in _encode_prompts(request, codec, info):
        check_length(ids, request.max_tokens, info)
        first = GenerateJob(
            np.array(ids, dtype=np.int32),
            request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            seed=seed,
            stop=tuple(request.stop),
            ignore_eos=request.ignore_eos,
            stream=request.stream,
        )
        jobs += [replace(first, seed=seed + k) for k in range(request.n)]
    return jobs


def _encode_prompts(request: SteerRequest, codec: TextCodec, info: EngineInfo) -> list[list[int]]:
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

    def write(self, codec: TextCodec) -> dict[str, Any]:
        """The whole as a `Completion`."""
        ids = [token for piece in self.pieces for token in piece.token_ids.tolist()]
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


class Continuations:
    """The completions of a `/steer` request: those of the steered jobs, then the baseline's."""

    def __init__(
        self, request: SteerRequest, steered: Sequence[GenerateJob], plain: Sequence[GenerateJob]
    ) -> None:
        self.jobs = [*steered, *(plain if request.baseline else [])]
        self._per_prompt = request.n
        self._num_steered = len(steered)
        self._all = [Continuation(job) for job in self.jobs]

    def add(self, index: int, piece: GenerateOutput) -> dict[str, Any]:
        """Take a piece of a job's output in; the piece as a `SteerPiece`."""
        self._all[index].pieces.append(piece)
        place = index % self._num_steered
        return {
            "prompt": place // self._per_prompt,
            "completion": place % self._per_prompt,
            "steered": index < self._num_steered,
            "text": piece.text,
            "token_ids": piece.token_ids,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
        }

    @property
    def steered_ends(self) -> list[GenerateOutput]:
        """The last piece of each steered job."""
        return [entry.pieces[-1] for entry in self._all[: self._num_steered]]

    def write(self, codec: TextCodec) -> list[dict[str, Any]]:
        """All of them as `PromptCompletions`, once every job has ended."""
        written = [entry.write(codec) for entry in self._all]
        size, steered = self._per_prompt, self._num_steered
        results = []
        for start in range(0, steered, size):
            baseline = written[steered + start : steered + start + size] or None
            results.append({"completions": written[start : start + size], "baseline": baseline})
        return results

    def count_usage(self) -> dict[str, int]:
        """The fields of `Usage`."""
        pieces = [piece for entry in self._all for piece in entry.pieces]
        return {
            "prompt_tokens": sum(len(job.tokens) for job in self.jobs),
            "scored_tokens": 0,
            "generated_tokens": sum(len(piece.token_ids) for piece in pieces),
            "cached_tokens": sum(entry.pieces[-1].cached_tokens for entry in self._all),
        }

"""Decodes with vLLM as told on stdin: `decoding.py ours|stock MODEL SLOTS SETTINGS`.

Each line of stdin has the arguments of `answer` as JSON, each result what came of it; the first
result is what stock vLLM has chosen by itself. Several of these live at once and are told in turn,
so that their runs alternate.
"""

import hashlib
import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch

from bench.models import GREEDY, generate
from bench.servers import ALL_CORES, answer_questions
from bench.stock import read_choices
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import GenerateJob
from logsteer_server.contract.plan import Site, SteeringPlan
from logsteer_server.engines.vllm.engine import VllmEngine

SEQUENCES, PROMPT, GENERATED = 32, 16, 64
"""A prompt is shorter than a block of the cache, so no batch finds those of another there."""
MEMORY = 2**30 if torch.cuda.is_available() else 2**29
"""Bytes of cached keys and values: on a CPU filled by the uncounted runs, so that no counted one
gets new pages."""


def make_prompts(seed: int, vocab: int) -> list[np.ndarray]:
    """Return random prompts, the same for the same seed."""
    rng = np.random.default_rng(seed)
    return list(rng.integers(10, vocab, (SEQUENCES, PROMPT), dtype=np.int32))


class Ours:
    """The engine of logsteer."""

    def __init__(self, path: str, slots: int, settings: dict[str, Any]) -> None:
        settings |= {"steering_slots": slots, "memory": f"{MEMORY >> 20}MiB"}
        self._engine = VllmEngine(EngineSpec("bench", "vllm", path, **settings))
        self.chosen: dict[str, Any] = {}
        info = self._engine.info
        self.vocab = info.vocab_size
        vector = np.random.default_rng(0).normal(size=info.hidden_size)
        vector_D = (4 * vector / np.linalg.norm(vector)).astype(np.float32)
        middle = info.num_layers // 2
        self._plans = {h: SteeringPlan((Site(middle, h, vector_D),)) for h in info.hooks}

    def generate(
        self,
        prompts: list[np.ndarray],
        logprobs: bool = True,
        steer_every: int = 0,
        hook: str = "resid_post",
    ) -> list[list[int]]:
        """Return the tokens of each sequence.

        Every `steer_every`-th is steered (0: none is), at a hook of the middle layer.
        """
        plan = self._plans.get(hook)
        jobs = [
            GenerateJob(
                prompt,
                GENERATED,
                GREEDY,
                ignore_eos=True,
                logprobs=logprobs,
                plan=plan if steer_every and index % steer_every == 0 else None,
            )
            for index, prompt in enumerate(prompts)
        ]
        return generate(self._engine, jobs)

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()


class Stock:
    """vLLM's own `LLM` with its own defaults, but for dtype, cores and memory, which are ours."""

    def __init__(self, path: str, _slots: int, settings: dict[str, Any]) -> None:
        from vllm import LLM

        os.environ |= ALL_CORES
        self._llm: Any = LLM(path, dtype=settings["dtype"], kv_cache_memory_bytes=MEMORY)
        config = self._llm.llm_engine.vllm_config
        self.vocab = int(config.model_config.get_vocab_size())
        self.chosen = read_choices(config)

    def generate(self, prompts: list[np.ndarray], logprobs: bool = True) -> list[list[int]]:
        """Return the tokens of each sequence, unsteered."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=GENERATED,
            temperature=0.0,
            ignore_eos=True,
            logprobs=0 if logprobs else None,
        )
        given = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        outputs = self._llm.generate(given, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """Stop vLLM."""
        self._llm.llm_engine.engine_core.shutdown()


def answer(
    decoder: Ours | Stock, seed: int, sequences: int = SEQUENCES, **how: Any
) -> dict[str, Any]:
    """Return the seconds that prompts of a seed take, and a digest of each sequence's tokens."""
    prompts = make_prompts(seed, decoder.vocab)[:sequences]
    started = time.perf_counter()
    tokens = decoder.generate(prompts, **how)
    seconds = time.perf_counter() - started
    digests = [hashlib.sha256(repr(ids).encode()).hexdigest()[:8] for ids in tokens]
    return {"seconds": seconds, "digests": digests}


def main() -> None:
    """Load the model, and answer until stdin ends."""
    kind, path, slots, settings = sys.argv[1:]
    decoder = (Ours if kind == "ours" else Stock)(path, int(slots), json.loads(settings))
    answer_questions(decoder.chosen, lambda asked: answer(decoder, **asked))
    decoder.close()


if __name__ == "__main__":
    main()

"""Decodes with vLLM as told on stdin: `decoding.py ours|stock MODEL SLOTS DEPTH SETTINGS`.

Each line of stdin is a `Work` as JSON, each `answer` line of stdout what came of it. Two of these
live at once and are told in turn, so that their runs alternate.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from continuation import GREEDY, generate
from logsteer.schemas import ProbeRequest, Steering
from logsteer_server.contract.engine import EngineInfo, EngineSpec
from logsteer_server.contract.jobs import GenerateJob
from logsteer_server.contract.plan import SteeringPlan
from logsteer_server.engines.vllm.config import context_length, engine_args, set_environment
from logsteer_server.engines.vllm.engine import VllmEngine
from logsteer_server.interventions.interventions import Interventions
from logsteer_server.interventions.probes import ResolvedProbe, resolve_probes
from logsteer_server.interventions.steering import resolve_steering
from logsteer_server.stores.layer_vectors import LayerVectors
from logsteer_server.stores.vectors import StoredVectors

SEQUENCES, PROMPT, GENERATED = 32, 16, 64
"""A prompt is shorter than a block of the cache, so no batch finds those of another there."""
MEMORY = "1GiB" if torch.cuda.is_available() else "128MiB"
"""Cached keys and values: on a CPU filled by the uncounted runs, so that no counted one gets new
pages."""


@dataclass(frozen=True, slots=True)
class Work:
    """A batch of prompts of a seed, every `every`-th of them steered.

    They are steered in turn by `plans` different plans (0: none is), which do `op` with each of
    `vectors` vectors at each of `layers` layers; with `of`, where a condition of that kind on
    another direction holds. `probes` directions are read, at a layer each in turn. With `fresh`
    nobody has seen the vectors before.
    """

    seed: int
    plans: int = 0
    layers: int = 1
    vectors: int = 1
    op: str = "add"
    every: int = 1
    fresh: bool = False
    of: str | None = None
    probes: int = 0
    logprobs: bool = True

    def encode(self) -> str:
        """Return the line that tells a process so."""
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds that a batch took, and a digest of each sequence's tokens."""

    seconds: float
    digests: list[str]


class InlineVectors:
    """Named random vectors of norm 1 for the model, the same at every layer."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._found: dict[str, StoredVectors] = {}

    def put(self, name: str, seed: tuple[int, ...]) -> str:
        """Keep the vectors of a seed under a name, where they are not kept yet."""
        if name not in self._found:
            vector = np.random.default_rng(seed).normal(size=self._info.hidden_size)
            vector_D = (vector / np.linalg.norm(vector)).astype(np.float32)
            vectors = LayerVectors(dict.fromkeys(range(self._info.num_layers), vector_D))
            self._found[name] = StoredVectors(name, vectors.sha256, vectors)
        return name

    def find(self, name: str) -> StoredVectors:
        """Return the vectors of a name."""
        return self._found[name]

    def find_content(self, sha256: str) -> StoredVectors:
        """Return the vectors of a content."""
        return next(found for found in self._found.values() if found.sha256 == sha256)


def make_steering(work: Work, info: EngineInfo, vectors: InlineVectors) -> list[Steering]:
    """Return the steering objects of a batch, their vectors among these."""
    middle = (info.num_layers - work.layers) // 2
    layers = list(range(middle, middle + work.layers))
    scale = {"add": 4.0, "rotate": 10.0}.get(work.op, 1.0)
    drawn = work.seed if work.fresh else 0
    steering = []
    for plan in range(work.plans):
        names = [
            vectors.put(f"v{drawn}.{plan}.{number}", (drawn, plan, number))
            for number in range(work.vectors)
        ]
        uses = [
            {"name": name, "op": work.op, "scale": scale, "layers": layers}
            | ({"when": make_condition(work, name, vectors, layers[0])} if work.of else {})
            for name in names
        ]
        steering.append(Steering.model_validate({"vectors": uses}))
    return steering


def make_condition(work: Work, name: str, vectors: InlineVectors, layer: int) -> dict[str, object]:
    """Return a condition of its own for a vector, which holds of about half of all tokens."""
    probe = vectors.put(f"condition.{name}", (7, *map(ord, name)))
    return {"probe": {"name": probe, "layers": [layer]}, "above": 0.0, "of": work.of}


def make_probes(work: Work, info: EngineInfo, vectors: InlineVectors) -> tuple[ResolvedProbe, ...]:
    """Return the probes of a batch, at the model's layers in turn."""
    asked = [
        ProbeRequest(name=vectors.put(f"probe.{n}", (8, n)), layers=[n % info.num_layers])
        for n in range(work.probes)
    ]
    return resolve_probes(asked, vectors, info)


def make_prompts(seed: int, vocab: int) -> list[np.ndarray]:
    """Return random prompts, the same for the same seed."""
    rng = np.random.default_rng(seed)
    return list(rng.integers(10, vocab, (SEQUENCES, PROMPT), dtype=np.int32))


class Ours:
    """The engine of logsteer; resolving the steering objects is a part of the work."""

    def __init__(self, spec: EngineSpec) -> None:
        self._engine = VllmEngine(spec)
        self._vectors = InlineVectors(self._engine.info)

    def prepare(self, work: Work) -> Callable[[], list[list[int]]]:
        """Return the function that does the work and gives the tokens of each sequence."""
        info = self._engine.info
        steering = make_steering(work, info, self._vectors)
        prompts = make_prompts(work.seed, info.vocab_size)

        def plan_of(index: int, plans: list[SteeringPlan | None]) -> SteeringPlan | None:
            return None if index % work.every else plans[index // work.every % len(plans)]

        def run() -> list[list[int]]:
            probes = make_probes(work, info, self._vectors)
            resolved = [resolve_steering(given, self._vectors, info) for given in steering]
            plans = [Interventions(one, probes=probes).plan for one in resolved or [None]]
            jobs = [
                GenerateJob(
                    prompt,
                    GENERATED,
                    GREEDY,
                    ignore_eos=True,
                    logprobs=work.logprobs,
                    plan=plan_of(index, plans),
                )
                for index, prompt in enumerate(prompts)
            ]
            return generate(self._engine, jobs)

        return run

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()


class Stock:
    """vLLM's own `LLM` in this process with the same settings, but for our worker."""

    def __init__(self, spec: EngineSpec) -> None:
        set_environment(spec)
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform

        limit = context_length(spec.path, None)
        args = engine_args(spec, spec.path, current_platform.is_cpu(), limit)
        for name in ("worker_cls", "additional_config"):
            del args[name]
        self._llm: Any = LLM(**args)
        self._params = SamplingParams
        self._vocab = int(self._llm.llm_engine.model_config.get_vocab_size())

    def prepare(self, work: Work) -> Callable[[], list[list[int]]]:
        """Return what `Ours.prepare` does; always unsteered."""
        assert not work.plans
        assert not work.probes
        prompts = make_prompts(work.seed, self._vocab)

        def run() -> list[list[int]]:
            params = self._params(
                max_tokens=GENERATED,
                temperature=0.0,
                ignore_eos=True,
                logprobs=0 if work.logprobs else None,
            )
            given = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
            outputs = self._llm.generate(given, params, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        return run

    def close(self) -> None:
        """Stop vLLM."""
        self._llm.llm_engine.engine_core.shutdown()


def answer(decoder: Ours | Stock, work: Work) -> Answer:
    """Do the work and time it."""
    run = decoder.prepare(work)
    started = time.perf_counter()
    tokens = run()
    seconds = time.perf_counter() - started
    digests = [hashlib.sha256(repr(ids).encode()).hexdigest()[:8] for ids in tokens]
    return Answer(seconds, digests)


def main() -> None:
    """Load the model, say so, and answer until stdin ends."""
    kind, path, slots, depth, settings = sys.argv[1:]
    spec = EngineSpec(
        "bench", "vllm", path, steering_slots=int(slots), steering_depth=int(depth),
        **(json.loads(settings) | {"memory": MEMORY}),
    )  # fmt: skip
    decoder = Ours(spec) if kind == "ours" else Stock(spec)
    print("ready", flush=True)
    for line in sys.stdin:
        print("answer", json.dumps(asdict(answer(decoder, Work(**json.loads(line))))), flush=True)
    decoder.close()


if __name__ == "__main__":
    main()

"""Measures an engine on checkpoints of families against transformers, in processes of its own.

    python -m tests.families.family_probe ENGINE compiled|eager DTYPE CHECKPOINT ...

prints a line of JSON for each checkpoint: by check the largest difference, in nats or, of
activations, as a part of their root mean square; or what the engine said in place of an answer.
"""

import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.captures import Capture
from logsteer_server.contract.engine import HOOKS, Engine, EngineSpec
from logsteer_server.contract.jobs import (
    CaptureJob,
    GenerateJob,
    GenerateOutput,
    Job,
    JobFailure,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.contract.plan import Positions, ResidualOp, Site, SteeringPlan
from logsteer_server.engines.vllm.config import set_environment
from logsteer_server.imports import hold_collector
from logsteer_server.runtime.process import build_engine
from logsteer_server.tasks.patch import replace_at
from tests.contract.steering import HookedReference, turn
from tests.probes import drain

LAYER = 1
INNER_HOOKS = HOOKS[:-1]
RUNNER = os.environ.get("LOGSTEER_TEST_RUNNER", "auto")
SOME = ((2, 9), (20, 21))
"""Positions that are steered where not all are."""


class Reference:
    """The model in transformers, in a process of its own: vLLM changes classes of transformers."""

    def __init__(self, path: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(1, context, _load_reference, (path,))
        self.activations([5])  # starts the process

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()

    def activations(self, ids: Sequence[int], hook: str = "resid_post") -> np.ndarray:
        """An activation of each layer, [L, T, D]."""
        return self._pool.submit(_read_activations, list(ids), hook).result()

    def logprobs(self, context: Sequence[int], target: Sequence[int], *steering: Any) -> np.ndarray:
        """Log p of each target token; `steering`: an operation, its vector, positions, hook."""
        return self._pool.submit(_read_logprobs, list(context), list(target), *steering).result()


_loaded: dict[str, HookedReference] = {}


def _load_reference(path: Path) -> None:
    torch.set_num_threads(1)
    _loaded["model"] = HookedReference(path)


def _read_activations(ids: list[int], hook: str) -> np.ndarray:
    return _loaded["model"].activations(ids, hook)


def _read_logprobs(
    context: list[int],
    target: list[int],
    name: str = "add",
    vector: np.ndarray | None = None,
    positions: Any = "all",
    hook: str = "resid_post",
) -> np.ndarray:
    if vector is None:
        return _loaded["model"].logprobs(context, target)
    offset = torch.tensor(vector)
    unit = offset / offset.norm()
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "add": lambda x: x + offset,
        "ablate": lambda x: x - (x @ unit)[..., None] * unit,
        "rotate": lambda x: turn(x, 20, unit),
    }
    return _loaded["model"].logprobs(context, target, changes[name], positions, LAYER, hook)


class FamilyProbe:
    """An engine and the reference, and the jobs that both are asked."""

    def __init__(self, engine: Engine, reference: Reference) -> None:
        self.engine = engine
        self.reference = reference
        rng = np.random.default_rng(3)
        vocab = engine.info.vocab_size
        self.texts = [rng.integers(5, vocab, size).astype(np.int32) for size in (40, 7, 90)]
        vector = rng.normal(size=engine.info.hidden_size)
        scale = float(np.sqrt(np.mean(self.reference.activations(self.texts[0])[LAYER] ** 2)))
        self.vector = (scale * vector).astype(np.float32)

    def run(self, jobs: list[Job]) -> list[Any]:
        """The results of jobs that run together. Errors: ValueError for a job that fails."""
        self.engine.add(list(enumerate(jobs)))
        found: dict[int, Any] = drain(self.engine)
        for result in found.values():
            if isinstance(result, JobFailure):
                raise ValueError(result.detail)
        return [found[n] for n in range(len(jobs))]

    def measure(self) -> dict[str, Any]:
        """Every check's largest difference, or the engine's words where it refuses."""
        checks: dict[str, Callable[[], float]] = {
            "scores": self.compare_scores,
            "prefix": self.compare_prefix,
            "captures": self.compare_captures,
            "add": lambda: self.compare_steering("add"),
            "ablate": lambda: self.compare_steering("ablate"),
            "rotate": lambda: self.compare_steering("rotate"),
            "generation": self.compare_generation,
            "lens": self.compare_lens,
            **{hook: partial(self.compare_hook, hook) for hook in INNER_HOOKS},
        }
        found: dict[str, Any] = {}
        for name, check in checks.items():
            try:
                found[name] = check()
            except ValueError as error:
                found[name] = str(error)
        return found

    def compare_scores(self) -> float:
        """Texts of several lengths at once."""
        jobs: list[Job] = [ScoreJob(ids[:-1], ids[1:]) for ids in self.texts]
        expected = [self.reference.logprobs(ids[:1], ids[1:]) for ids in self.texts]
        return _differ(self.run(jobs), expected)

    def compare_prefix(self) -> float:
        """The end of a long text twice, whose beginning the prefix cache has the second time."""
        ids = self.texts[2]
        expected = self.reference.logprobs(ids[:-5], ids[-5:])
        return max(_differ(self.run([ScoreJob(ids[:-1], ids[-5:])]), [expected]) for _ in range(2))

    def compare_captures(self) -> float:
        """Activations of every layer: their mean, the last token's, and those of a sample."""
        ids = self.texts[0]
        layers = tuple(range(self.engine.info.num_layers))
        jobs: list[Job] = [
            CaptureJob(ids, capture=Capture(layers, read=read)) for read in ("mean", "last")
        ]
        each = Capture(layers, read="each")
        *results, sample = self.run([*jobs, GenerateJob(ids, 12, ignore_eos=True, capture=each)])
        whole = np.concatenate([ids, sample.token_ids[:-1]])
        expected_LTD = self.reference.activations(whole)
        asked_LTD = expected_LTD[:, : len(ids)]
        found = [result.activations_LD[:, None] for result in results]
        found.append(sample.activations.activations_LTD)
        wanted = (asked_LTD.mean(1, keepdims=True), asked_LTD[:, -1:], expected_LTD)
        worst = 0.0
        for found_LTD, wanted_LTD in zip(found, wanted, strict=True):
            assert found_LTD.shape == wanted_LTD.shape
            size_L = np.sqrt((wanted_LTD**2).mean((1, 2)))
            worst = max(worst, float((np.abs(found_LTD - wanted_LTD).max((1, 2)) / size_L).max()))
        return worst

    def compare_lens(self) -> float:
        """The last layer's stream of every row, read by a job of one token as `/lens` reads it."""
        ids, last = self.texts[0], self.engine.info.num_layers - 1
        (captured,) = self.run([CaptureJob(ids[:-1], capture=Capture((last,), read="each"))])
        jobs: list[Job] = [
            ScoreJob(
                ids[n : n + 1], ids[n + 1 : n + 2], plan=replace_at("resid_post", {last: x}, 0)
            )
            for n, x in enumerate(captured.activations_LTD[0])
        ]
        return _differ(self.run(jobs), list(self.reference.logprobs(ids[:1], ids[1:])[:, None]))

    def compare_hook(self, hook: str) -> float:
        """An activation of every layer, each token's; and what a change of it comes to."""
        if hook not in self.engine.info.hooks:
            raise ValueError(self.engine.info.missing_hooks.get(hook, "there is none"))
        ids, layers = self.texts[0], tuple(range(self.engine.info.num_layers))
        expected_LTD = self.reference.activations(ids, hook)
        jobs: list[Job] = [CaptureJob(ids, capture=Capture(layers, hook, "each"))]
        expected = []
        for name in ("add", "rotate"):
            plan = self._plan(name, Positions("slices", SOME), hook)
            jobs.append(ScoreJob(ids[:-1], ids[1:], plan=plan))
            steering = name, self.vector, {"slices": SOME}, hook
            expected.append(self.reference.logprobs(ids[:1], ids[1:], *steering))
        captured, *scores = self.run(jobs)
        errors_LTD = np.abs(captured.activations_LTD - expected_LTD)
        size_L = np.sqrt((expected_LTD**2).mean((1, 2)))
        return max(float((errors_LTD.max((1, 2)) / size_L).max()), _differ(scores, expected))

    def _plan(self, name: str, positions: Positions, hook: str = "resid_post") -> SteeringPlan:
        unit = self.vector / np.linalg.norm(self.vector)
        offset, ops = {
            "add": (self.vector, ()),
            "ablate": (None, (ResidualOp(unit),)),
            "rotate": (None, (ResidualOp(unit, per_component=1, degrees=20),)),
        }[name]
        return SteeringPlan((Site(LAYER, hook, offset, ops),), positions)

    def compare_steering(self, name: str) -> float:
        """An operation at all positions and at some, beside a text that is not steered."""
        jobs, expected = [], []
        for ids in self.texts:
            for positions in (Positions(), Positions("slices", SOME)):
                where = "all" if positions.kind == "all" else {"slices": SOME}
                jobs.append(ScoreJob(ids[:-1], ids[1:], plan=self._plan(name, positions)))
                expected.append(self.reference.logprobs(ids[:1], ids[1:], name, self.vector, where))
        ids = self.texts[0]
        jobs.append(ScoreJob(ids[:-1], ids[1:]))
        expected.append(self.reference.logprobs(ids[:1], ids[1:]))
        results: list[ScoreOutput] = self.run(list(jobs))
        for job, result in zip(jobs[:-1], results[:-1], strict=True):
            assert job.plan is not None and result.trace is not None
            steered = job.plan.positions.count(len(job.tokens), job.prompt_len)
            assert sum(result.trace.tokens) == steered, (result.trace, steered)
        return _differ(results, expected)

    def compare_generation(self) -> float:
        """A steered sample, scored by the engine and by the reference."""
        ids, plan = self.texts[0], self._plan("rotate", Positions("completion"))
        job = GenerateJob(ids, 24, seed=5, ignore_eos=True, plan=plan)
        (sample,) = self.run([job])
        assert isinstance(sample, GenerateOutput)
        target = sample.token_ids
        whole = np.concatenate([ids, target])
        again = ScoreJob(whole[:-1], target, plan=plan)
        expected = self.reference.logprobs(ids, target, "rotate", self.vector, "completion")
        worst = _differ(self.run([again]), [expected])
        return max(worst, float(np.abs(sample.logprobs - expected).max()))


def _differ(results: list[ScoreOutput], expected: list[np.ndarray]) -> float:
    pairs = zip(results, expected, strict=True)
    return max(float(np.abs(r.columns["logprob"] - e).max()) for r, e in pairs)


def probe(engine: str, compiled: bool, dtype: str, path: Path) -> None:
    """Measure one checkpoint and print the line."""
    warnings.filterwarnings("ignore")
    spec = EngineSpec("probe", engine, str(path), dtype=dtype, compile=compiled)
    if engine == "vllm":
        spec = EngineSpec("probe", engine, str(path), dtype=dtype, compile=compiled,
                          memory="64MiB", steering_slots=8, runner=RUNNER, hooks=HOOKS)  # fmt: skip
    found: dict[str, Any] = {"family": path.name, "engine": engine}
    reference = Reference(path)
    try:
        built = build_engine(spec)
    except ValueError as error:
        found["refused"] = str(error).replace(f"{path}: ", "")
    else:
        try:
            found |= FamilyProbe(built, reference).measure()
        except Exception as error:
            found["died"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found), flush=True)
    reference.close()
    os._exit(0)  # an engine that died leaves threads behind


def main() -> None:
    """Measure checkpoints one after another, each in a process forked off after all imports."""
    engine, mode, dtype, *paths = sys.argv[1:]
    with hold_collector():
        if engine == "vllm":
            set_environment(EngineSpec("probe", engine, paths[0], runner=RUNNER))
            for module in ("core", "worker"):
                import_module(f"logsteer_server.engines.vllm.{module}")
        else:
            import_module("logsteer_server.engines.tlens.engine")
    if engine == "vllm":
        # vLLM would import itself once more for every family, to look at its class.
        registry = import_module("vllm.model_executor.models.registry")
        registry._run_in_subprocess = lambda look: look()
    context = multiprocessing.get_context("fork")
    for path in paths:
        arguments = (engine, mode == "compiled", dtype, Path(path))
        process = context.Process(target=probe, args=arguments)
        process.start()
        process.join()
        if process.exitcode:
            died = {"family": Path(path).name, "engine": engine, "died": f"{process.exitcode}"}
            print(json.dumps(died), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

"""The TransformerLens engine, without vLLM: against transformers, and its speed beside its peers'.

The model is that of the environment's `MODEL`, a directory, or one with random weights.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.bars import COLUMNS, list_figures
from bench.gpu_check.report import (
    NO_CUDA,
    Findings,
    Options,
    Table,
)
from bench.models import make_model, run_jobs
from bench.servers import run_module
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import GenerateJob, Policy, ScoreJob
from logsteer_server.contract.plan import Site, SteeringPlan

LAYER, PROMPT, GENERATED, SEQUENCES = 1, 12, 24, 4
NORM = 2.0
LIMIT = 1e-3
"""Nats a token, in float32."""
LEAST_EFFECT = 0.01


def find_model(options: Options) -> Path:
    """Return the directory of the model to run."""
    if given := os.environ.get("MODEL"):
        return Path(given)
    vocab, hidden, layers = (32_000, 2048, 16) if options.on_cuda else (2_048, 64, 4)
    return make_model(options.directory, vocab=vocab, hidden=hidden, layers=layers)


def check_scores(options: Options, path: Path, found: Findings) -> None:
    """Steered generation of the engine, its own scores of it, and those of transformers."""
    from transformers import AutoModelForCausalLM

    from logsteer_server.engines.tlens.engine import TransformerLensEngine

    devices = "auto" if options.on_cuda else "cpu"
    spec = EngineSpec("check", "transformer_lens", str(path), dtype="float32", devices=devices)
    engine = TransformerLensEngine(spec)
    info = engine.info
    rng = np.random.default_rng(0)
    vector_D = rng.normal(size=info.hidden_size).astype(np.float32)
    vector_D *= NORM / np.linalg.norm(vector_D)
    plan = SteeringPlan((Site(LAYER, "resid_post", vector_D),))
    prompts = rng.integers(10, info.vocab_size, (SEQUENCES, PROMPT)).astype(np.int32)
    greedy = Policy(temperature=0.0)
    generated = run_jobs(
        engine, [GenerateJob(p, GENERATED, greedy, ignore_eos=True, plan=plan) for p in prompts]
    )
    texts = [np.concatenate([p, g.token_ids]) for p, g in zip(prompts, generated, strict=True)]
    scored = [
        run_jobs(engine, [ScoreJob(t[:-1], t[PROMPT:], plan=own) for t in texts])
        for own in (plan, None)
    ]
    engine.close()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(options.device)
    vector = torch.tensor(vector_D, device=options.device)
    layers: Any = model.get_submodule("model.layers")
    layers[LAYER].register_forward_hook(lambda _m, _a, out: add_to_output(out, vector))
    with torch.inference_mode():
        ids_BT = torch.tensor(np.stack(texts), device=options.device).long()
        log_p_BTV = model(ids_BT).logits.float().log_softmax(-1)[:, PROMPT - 1 : -1]
    exact_BT = log_p_BTV.gather(-1, ids_BT[:, PROMPT:, None]).squeeze(-1).cpu().numpy()
    steered_BT, plain_BT = (np.stack([r.columns["logprob"] for r in part]) for part in scored)
    own_BT = np.stack([result.logprobs for result in generated])
    errors = {
        "scored, against transformers": float(abs(steered_BT - exact_BT).max()),
        "generated, against transformers": float(abs(own_BT - exact_BT).max()),
    }
    effect = float(abs(steered_BT - plain_BT).max())
    for what, error in errors.items():
        found.need(what, error, LIMIT)
    if not effect >= LEAST_EFFECT:
        found.failures.append("the vector changes nothing")
    table = Table(
        f"Largest difference in nats a token, {SEQUENCES} steered sequences in float32.",
        [*errors, "limit", "effect of steering"],
    )
    table.rows.append([*errors.values(), LIMIT, effect])
    found.add(table)


def add_to_output(output: Any, vector: torch.Tensor) -> Any:
    """Return what a block gives with a vector added to the stream."""
    if isinstance(output, tuple):
        return (output[0] + vector, *output[1:])
    return output + vector


def measure_speed(options: Options, path: Path, found: Findings) -> None:
    """What `bench/hooked.py` says: tokens a second beside TransformerLens' own ways and repeng."""
    batches, runs = (("1+",), "1") if options.quick else (("1+", "8", "32"), "3")
    dtype = "bfloat16" if options.on_cuda else "float32"
    # The model for CPUs is small: a second thread would mostly wait for the first.
    environment = {} if options.on_cuda else {"OMP_NUM_THREADS": "1"}
    result = run_module("hooked", path, dtype, runs, *batches, environment=environment)
    caption = f"150 steered tokens of each sequence, {dtype}."
    found.add(Table(caption, COLUMNS, list_figures(result)))
    found.notes += result["notes"]
    if not options.on_cuda:
        found.notes.append(f"These are figures of the CPU: {NO_CUDA}.")


def measure(options: Options, found: Findings) -> None:
    """Check the engine or time it."""
    if importlib.util.find_spec("transformer_lens") is None:
        found.not_run.append("transformer-lens is not installed")
        return
    (check_scores if options.case == "scores" else measure_speed)(
        options, find_model(options), found
    )

"""The TransformerLens engine in this process, its jobs, and small models: what its tests share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, GPT2Config, OPTConfig

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import (
    Job,
    JobFailure,
    JobResult,
    Policy,
    ScoreJob,
)
from logsteer_server.contract.plan import Positions, Site, SteeringPlan, SteeringTrace
from tests.conftest import DEMO_MODEL

PER_TOKEN = 1e-4
BATCH = 16 * 2.0**-19
"""Sixteen steps of float32 between 16 and 32, where the largest logits lie: what the order of sums
may move, which differs with the batch and the CPU."""
LAYER = 2
GREEDY = Policy(temperature=0.0)


def build(path: Path = DEMO_MODEL, dtype: str = "float32", **fields: Any) -> Any:
    from logsteer_server.engines.tlens.engine import TransformerLensEngine

    spec = EngineSpec("demo", "transformer_lens", str(path), dtype=dtype, devices="cpu", **fields)
    return TransformerLensEngine(spec)


def run_pieces(engine: Any, jobs: dict[int, Job]) -> dict[int, list[JobResult]]:
    """All results of each job, in order."""
    engine.add(list(jobs.items()))
    found: dict[int, list[JobResult]] = {i: [] for i in jobs}
    while engine.busy:
        for job_id, result in engine.step():
            found[job_id].append(result)
    return found


def run(engine: Any, *jobs: Job) -> list[Any]:
    """The one result of each job."""
    found = run_pieces(engine, dict(enumerate(jobs)))
    assert all(len(results) == 1 for results in found.values())
    return [found[i][0] for i in range(len(jobs))]


def score(engine: Any, *jobs: ScoreJob) -> list[np.ndarray]:
    return [output.columns["logprob"] for output in run(engine, *jobs)]


def check_trace(found: SteeringTrace | None, wanted: SteeringTrace | None) -> None:
    """Make sure that as many tokens were steered, and as much."""
    assert (found and found.tokens) == (wanted and wanted.tokens)
    if wanted:
        assert found.sites == {
            site: (count, pytest.approx(ratio, rel=1e-4))
            for site, (count, ratio) in wanted.sites.items()
        }


def check_failure(result: Any, code: str, reason: str = "") -> None:
    """Make sure that a job has failed, and that it says why."""
    assert isinstance(result, JobFailure), result
    assert (result.code, reason in result.detail) == (code, True), result


def draw_ids(rng: np.random.Generator, count: int, vocab: int = 1400) -> np.ndarray:
    return rng.integers(5, vocab, count).astype(np.int32)


def whole(ids: np.ndarray, **fields: Any) -> ScoreJob:
    """The job that scores every token but the first."""
    return ScoreJob(ids[:-1], ids[1:], **fields)


@torch.inference_mode()
def draw_vector(width: int = 128, seed: int = 0, norm: float = 5.0) -> np.ndarray:
    vector = np.random.default_rng(seed).normal(size=width)
    return (vector * norm / np.linalg.norm(vector)).astype(np.float32)


U = draw_vector(norm=1.0)


def add_plan(
    kind: str = "all", scale: float = 1.0, seed: int = 0, slices: Any = (), layer: int = LAYER
) -> SteeringPlan:
    site = Site(layer, "resid_post", draw_vector(seed=seed) * np.float32(scale))
    return SteeringPlan((site,), Positions(kind, slices))


SMALL = {
    "vocab_size": 1436, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OTHERS = {
    # Learned positions; a cap on logits and a sliding window; a body that is called by its part.
    "gpt2": GPT2Config(
        vocab_size=1436, n_embd=64, n_layer=3, n_head=4, n_positions=256, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2,
    ),
    "gemma2": Gemma2Config(
        **SMALL, intermediate_size=96, num_key_value_heads=2, head_dim=16, sliding_window=8,
        final_logit_softcapping=5.0, query_pre_attn_scalar=16, initializer_range=0.3,
    ),
    "opt": OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=64, init_std=0.2),
}  # fmt: skip

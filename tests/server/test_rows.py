"""Columns of logit rows against float64, and the bound on what is held at once."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.rows import (
    COLUMNS,
    PUBLIC_COLUMNS,
    Exchange,
    Reading,
    ReferenceFile,
    Rows,
    read_hidden,
    split_chunks,
    unpack,
)

R, V, D = 37, 1009, 16


def make_rows(seed: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits_RV = scale * torch.randn(R, V, generator=generator)
    return logits_RV, torch.randint(V, (R,), generator=generator)


def reference_columns(logits_RV: torch.Tensor, targets_R: torch.Tensor) -> dict[str, torch.Tensor]:
    log_p_RV = logits_RV.double().log_softmax(-1)
    own_R1 = logits_RV.gather(-1, targets_R[:, None])
    return {
        "logprob": log_p_RV.gather(-1, targets_R[:, None])[:, 0],
        "rank": 1 + (logits_RV > own_R1).sum(-1),
        "entropy": -(log_p_RV.exp() * log_p_RV).sum(-1),
    }


@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("name", PUBLIC_COLUMNS)
def test_columns_against_float64(name: str, scale: float) -> None:
    logits_RV, targets_R = make_rows(0, scale)
    expected = reference_columns(logits_RV, targets_R)[name].double()
    found = COLUMNS[name](Rows(logits_RV, targets_R)).double()
    assert (found - expected).abs().max() < 2e-5 * max(1.0, scale)


def test_rank_counts_strictly_larger_logits_only() -> None:
    logits_RV = torch.tensor([[1.0, 1.0, 1.0, 2.0]])
    ranks = [int(COLUMNS["rank"](Rows(logits_RV, torch.tensor([i])))) for i in range(4)]
    assert ranks == [2, 2, 2, 1]


def test_a_masked_logit_makes_no_nan() -> None:
    logits_RV = torch.tensor([[0.0, -math.inf, 0.0]])
    rows = Rows(logits_RV, torch.tensor([0]))
    assert float(COLUMNS["entropy"](rows)) == pytest.approx(math.log(2))
    assert float(COLUMNS["logprob"](Rows(logits_RV, torch.tensor([1])))) == -math.inf


def test_logits_in_half_precision_are_summed_in_float32() -> None:
    logits_RV, targets_R = make_rows(1)
    half = logits_RV.bfloat16()
    expected = reference_columns(half.float(), targets_R)["logprob"]
    assert (COLUMNS["logprob"](Rows(half, targets_R)) - expected).abs().max() < 1e-5


@given(st.integers(0, 500), st.integers(1, 10**6), st.integers(1, 10**7))
def test_chunks_cover_every_row_once_within_the_bound(count: int, row: int, limit: int) -> None:
    parts = list(split_chunks(count, row, limit))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(count))
    assert all((part.stop - part.start) * row <= max(limit, row) for part in parts)


def read(reading: Reading, chunk_bytes: int, exchange: Exchange | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    hidden_RD = torch.randn(R, D, generator=generator)
    head_VD = torch.randn(V, D, generator=generator)
    targets_R = torch.randint(V, (R,), generator=generator)
    sizes = []

    def project(hidden_rD: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden_rD))
        return hidden_rD @ head_VD.T

    values = read_hidden(hidden_RD, targets_R, project, V, reading, chunk_bytes, exchange)
    assert max(sizes) <= max(1, chunk_bytes // (16 * V))
    return values


def test_chunking_changes_nothing_and_unpacking_names_the_parts() -> None:
    reading = Reading(("logprob", "rank", "entropy"), top=4)
    whole, parts = read(reading, 10**9), read(reading, 3 * 16 * V)
    assert torch.allclose(whole, parts, atol=1e-6)
    values = unpack(whole.numpy(), reading)
    assert values.top_ids is not None
    assert values.top_logprobs is not None
    assert values.top_ids.shape == values.top_logprobs.shape == (R, 4)
    assert (values.top_logprobs[:, 0] >= values.columns["logprob"]).all()
    best = values.columns["rank"] == 1
    assert (values.columns["logprob"][best] == values.top_logprobs[best, 0]).all()


def test_models_are_compared_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "reference"
    path.write_bytes(bytes(4 * R * V))
    file = ReferenceFile(str(path), R, V)
    read(Reading(), 5 * 16 * V, Exchange(export=file))
    same = read(Reading(("kl", "top1_agrees")), 7 * 16 * V, Exchange(reference=file))
    assert same[:, 0].abs().max() < 1e-5
    assert (same[:, 1] == 1).all()
    logits_RV, targets_R = make_rows(3)
    log_q_RV = file.read(0, R, torch.device("cpu"))
    found = COLUMNS["kl"](Rows(logits_RV, targets_R, log_q_RV))
    log_p_RV = logits_RV.double().log_softmax(-1)
    expected = (log_q_RV.double().exp() * (log_q_RV.double() - log_p_RV)).sum(-1)
    assert (found - expected).abs().max() < 1e-4


def test_a_comparison_without_a_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="another model"):
        read(Reading(("kl",)), 10**9)

"""Columns of logit rows against float64, what is held at once, and the kernel that reads rows."""

import math
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import Policy
from logsteer_server.numerics.hidden_rows import HiddenRows, RowBounds, read_hidden, split_chunks
from logsteer_server.numerics.rows import (
    COLUMNS,
    DIVERGENCES,
    NEUTRAL,
    PUBLIC_COLUMNS,
    ReferenceFile,
    RowFiles,
    Rows,
    RowSpec,
    read_rows,
    unpack,
)
from logsteer_server.numerics.sampling import Cuts
from tests.probes import run_script

R, V, D = 37, 1009, 16


def make_rows(seed: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits_RV = scale * torch.randn(R, V, generator=generator)
    return logits_RV, torch.randint(V, (R,), generator=generator)


EOS_IDS = (3, 5)
POLICIES = {
    "neutral": Policy(),
    "nucleus": Policy(temperature=0.7, top_p=0.9),
    "top_k": Policy(temperature=1.3, top_k=40, top_p=0.95),
}


def define_q(logits_V: np.ndarray, policy: Policy) -> tuple[np.ndarray, float]:
    """q and the mass of the nucleus by the definition, one row in float64."""
    weights_V = np.exp((logits_V - logits_V.max()) / policy.temperature)
    order_V = np.argsort(-weights_V, kind="stable")[: policy.top_k or None]
    p_K = weights_V[order_V] / weights_V[order_V].sum()
    mass_before_K = np.cumsum(p_K) - p_K
    kept_K = np.ones(len(p_K), bool) if policy.top_p == 1 else mass_before_K < policy.top_p
    q_V = np.zeros_like(weights_V)
    q_V[order_V[kept_K]] = p_K[kept_K] / p_K[kept_K].sum()
    return q_V, float(p_K[kept_K].sum())


def reference_columns(
    logits_RV: torch.Tensor,
    targets_R: torch.Tensor,
    policy: Policy = NEUTRAL,
    eos_ids: tuple[int, ...] = EOS_IDS,
) -> dict[str, np.ndarray]:
    """Every column by its formula, a row at a time, in float64."""
    found: dict[str, list[float]] = {name: [] for name in PUBLIC_COLUMNS}
    for z, x in zip(logits_RV.double().numpy(), targets_R.tolist(), strict=True):
        log_p = z - z.max() - math.log(np.exp(z - z.max()).sum())
        q, head = define_q(z, policy)
        some = q[q > 0]
        entropy, first, second = -(some * np.log(some)).sum(), *np.sort(q)[::-1][:2]
        with np.errstate(divide="ignore"):
            row = {
                "logprob": log_p[x],
                "rank": 1 + (z > z[x]).sum(),
                "entropy": -(np.exp(log_p) * log_p).sum(),
                "logit_mean": z.mean(),
                "logit_std": z.std(),
                "log_q": np.log(q[x]),
                "rb_entropy": entropy,
                "head_mass": head,
                "tail_mass": 1 - head,
                "top1_prob": first,
                "margin": first - second,
                "two_point_entropy": -sum(t * math.log(t) for t in (first, 1 - first) if t > 0),
                "collision": (q**2).sum(),
                "renyi2": -math.log((q**2).sum()),
                "effective_support": math.exp(entropy),
                "eos_prob": q[list(eos_ids)].sum(),
            }
        for name, value in row.items():
            found[name].append(float(value))
    return {name: np.array(values) for name, values in found.items()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("name", PUBLIC_COLUMNS)
def test_columns_against_float64(name: str, scale: float, policy: str) -> None:
    logits_RV, targets_R = make_rows(0, scale)
    targets_R[::2] = logits_RV[::2].argmax(-1)  # every other target is one that q can draw
    expected = reference_columns(logits_RV, targets_R, POLICIES[policy])[name]
    size = np.abs(expected[np.isfinite(expected)]).max(initial=1.0)
    for double, tolerance in ((False, 3e-6 * max(1.0, scale)), (True, 1e-10)):
        rows = Rows(logits_RV, targets_R, None, POLICIES[policy], EOS_IDS, double)
        found = COLUMNS[name](rows).double().numpy()
        finite = np.isfinite(expected)
        worst = np.abs(found[finite] - expected[finite]).max()
        assert (np.isfinite(found) == finite).all()
        assert worst < tolerance * size
        assert rows.logits_RV.dtype == (torch.float64 if double else torch.float32)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("double", [False, True])
def test_listed_tokens_and_the_mass_beside_them(policy: str, double: bool) -> None:
    """Of what the policy draws from; a mass of 1e-9 keeps its digits, which 1 - the rest loses."""
    logits_RV, targets_R = make_rows(8)
    logits_RV[0, :4] += 30.0
    ids_RK = torch.stack([targets_R, logits_RV.argmax(-1), torch.arange(R)], dim=-1)
    ids_RK[0] = torch.arange(3)
    spec = RowSpec(
        ("logprob",), 4, POLICIES[policy], double=double, alternatives=3, tail=True,
        is_listed_by_policy=policy != "neutral",
    )  # fmt: skip
    rows = Rows(logits_RV, targets_R, None, POLICIES[policy], (), double, alternatives_RK=ids_RK)
    found = unpack(read_rows(rows, spec).numpy(), spec)
    for r in range(R):
        q_V, _ = define_q(logits_RV[r].double().numpy(), POLICIES[policy])
        with np.errstate(divide="ignore"):
            log_q_V = np.log(q_V)
        for ids, name, tail in (
            (found["top_ids"][r], "top_logprobs", "top_tail"),
            (ids_RK[r].numpy(), "alternatives", "alternatives_tail"),
        ):
            assert found[name][r] == pytest.approx(log_q_V[ids], abs=1e-12 if double else 2e-6)
            others = np.delete(q_V, ids).sum()
            assert found[tail][r] == pytest.approx(others, rel=1e-9 if double else 1e-5)
        assert sorted(-log_q_V)[:4] == pytest.approx(-found["top_logprobs"][r], abs=1e-5)


def test_rank_counts_strictly_larger_logits_only() -> None:
    logits_RV = torch.tensor([[1.0, 1.0, 1.0, 2.0]])
    ranks = [int(COLUMNS["rank"](Rows(logits_RV, torch.tensor([i])))) for i in range(4)]
    assert ranks == [2, 2, 2, 1]


def test_a_masked_logit_makes_no_nan() -> None:
    logits_RV = torch.tensor([[0.0, -math.inf, 0.0]])
    rows = Rows(logits_RV, torch.tensor([0]))
    assert float(COLUMNS["entropy"](rows)) == pytest.approx(math.log(2))
    assert float(COLUMNS["logprob"](Rows(logits_RV, torch.tensor([1])))) == -math.inf


@given(st.integers(0, 500), st.integers(1, 600))
def test_chunks_cover_every_row_once_within_the_bound(count: int, step: int) -> None:
    parts = list(split_chunks(count, step))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(count))
    sizes = [part.stop - part.start for part in parts]
    assert len(parts) == math.ceil(count / step)
    assert max(sizes, default=0) <= step
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


@given(st.integers(0, 5000), st.integers(1, 8))
def test_chunks_for_a_gpu_are_whole_tiles(count: int, tiles: int) -> None:
    sizes = [part.stop - part.start for part in split_chunks(count, 128 * tiles, 128)]
    assert sum(sizes) == count and max(sizes, default=0) <= 128 * tiles
    assert len(sizes) == math.ceil(count / (128 * tiles))
    assert all(size % 128 == 0 for size in sizes[:-1])
    assert (
        RowBounds(2**28, 2**28).rows_per_product(
            50_257, RowSpec(("logprob",)), torch.device("cuda")
        )
        % 128
        == 0
    )


def read(spec: RowSpec, rows_at_once: int, files: RowFiles | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    hidden_RD = torch.randn(R, D, generator=generator)
    head_VD = torch.randn(V, D, generator=generator)
    targets_R = torch.randint(V, (R,), generator=generator)
    sizes = []

    def project(hidden_rD: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden_rD))
        return hidden_rD @ head_VD.T

    rows = HiddenRows.of(hidden_RD, targets_R)
    bounds = RowBounds(rows_at_once * 4 * V, 2 * spec.bytes_per_logit(CPU) * V)
    values = read_hidden(rows, project, V, spec, bounds, files)
    assert max(sizes) <= rows_at_once
    return values


def test_chunking_changes_nothing_and_unpacking_names_the_parts() -> None:
    spec = RowSpec(("logprob", "rank", "entropy"), top=4)
    whole, parts = read(spec, 100), read(spec, 3)
    assert torch.allclose(whole, parts, atol=1e-6)
    values = unpack(whole.numpy(), spec)
    assert values["top_ids"].shape == values["top_logprobs"].shape == (R, 4)
    assert (values["top_logprobs"][:, 0] >= values["logprob"]).all()
    best = values["rank"] == 1
    assert (values["logprob"][best] == values["top_logprobs"][best, 0]).all()


def test_models_are_compared_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "reference"
    path.write_bytes(bytes(4 * R * V))
    file = ReferenceFile(str(path), V)
    read(RowSpec(), 5, RowFiles(export=file))
    same = read(RowSpec(("kl", "top1_agrees")), 7, RowFiles(reference=file))
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
        read(RowSpec(("kl",)), 100)


@pytest.mark.parametrize("size", [30, 2**16 + 30])
@pytest.mark.parametrize("columns", [("logprob",), ("rank",), ("entropy", "logprob")])
def test_rows_that_are_not_finite_are_told_apart(size: int, columns: tuple[str, ...]) -> None:
    logits_RV = torch.zeros(6, size)
    logits_RV[1, 7] = math.nan
    logits_RV[2, 8] = math.inf
    logits_RV[3] = -math.inf
    logits_RV[4, 1:] = -math.inf
    rows, bounds = HiddenRows.of(torch.zeros(6, D), torch.arange(6)), RowBounds(2**30, 2**30)
    values_RW = read_hidden(rows, lambda _: logits_RV, size, RowSpec(columns), bounds)
    assert values_RW.isnan().all(-1).tolist() == [False, True, True, True, False, False]
    assert not values_RW[[0, 4, 5]].isnan().any()


@pytest.mark.parametrize("vocab", [49_152, 2**18])
def test_a_peaked_row_keeps_its_small_terms(vocab: int) -> None:
    torch.manual_seed(0)
    logits_RV = 4 * torch.randn(6, vocab)
    rows = Rows(logits_RV, logits_RV.argmax(-1))
    exact_RV = logits_RV.double().log_softmax(-1)
    assert (rows.log_probs_RV - exact_RV).abs().mean() < 1e-6
    exact_R = exact_RV.amax(-1)
    assert (COLUMNS["logprob"](rows) - exact_R).abs().max() < 2e-6
    assert (COLUMNS["log_q"](rows) - exact_R).abs().max() < 2e-6
    entropy_R = -(exact_RV.exp() * exact_RV).sum(-1)
    assert (COLUMNS["entropy"](rows) - entropy_R).abs().max() < 1e-5
    assert (COLUMNS["rb_entropy"](rows) - entropy_R).abs().max() < 1e-5


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MIB = 2**20
PLAIN, SHAPED = RowSpec(), RowSpec(("log_q",))
MODEL = EngineSpec("a", "vllm", "a")
DEFAULT = RowBounds(MODEL.chunk_bytes, MODEL.column_bytes)


@pytest.mark.parametrize("vocab", [1436, 32_000, 128_256, 262_144])
@pytest.mark.parametrize("spec", [PLAIN, SHAPED], ids=["plain", "shaped"])
def test_by_default_a_product_has_256_rows_or_more(vocab: int, spec: RowSpec) -> None:
    assert DEFAULT.rows_per_product(vocab, spec, CUDA) >= 256
    assert DEFAULT.rows_per_product(vocab, spec, CPU) >= 256
    assert DEFAULT.rows_per_product(vocab, spec, CPU) <= 512  # no more than helps


def test_a_bound_holds_whatever_the_machine() -> None:
    small = RowBounds(10 * 4 * 1000, 3 * 16 * 1000)
    for device in (CPU, CUDA):
        assert small.rows_per_product(1000, PLAIN, device) == 10
        assert small.rows_per_product(1000, RowSpec(double=True), device) == 5
        assert small.rows_per_pass(1000, PLAIN, device) == 3
        assert small.rows_per_pass(1000, SHAPED, device) == (2 if device is CUDA else 1)
        assert small.rows_per_product(10**6, PLAIN, device) == 1


class _Peak(TorchDispatchMode):
    """The most bytes that tensors made meanwhile had at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if _is_tensor(x)}
        for storage in (x.untyped_storage() for x in tree_leaves(found) if _is_tensor(x)):
            if storage._cdata not in self.held.keys() | given:
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata)
        self.most = max(self.most, sum(self.held.values()))
        return found


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def test_policy_columns_on_a_gpu_take_the_bytes_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel takes p and makes nothing."""
    size, policy = 40_000, Policy(0.8, top_p=0.9)
    monkeypatch.setattr(Cuts, "apply", lambda _, z_RV: z_RV.softmax(-1)[:, 0])
    logits_RV, targets_R = torch.randn(3, size), torch.zeros(3, dtype=torch.int64)
    reference_RV = logits_RV.log_softmax(-1)
    shaped = tuple(name for name in COLUMNS if name not in DIVERGENCES)
    for columns in (shaped, tuple(COLUMNS)):
        spec = RowSpec(columns, 20, policy, EOS_IDS)
        with _Peak() as peak:
            read_rows(Rows(logits_RV, targets_R, reference_RV, policy, EOS_IDS), spec)
        assert 0.7 < peak.most / logits_RV.numel() / spec.bytes_per_logit(CUDA) < 1.001
    spec = RowSpec(shaped, 20, policy, EOS_IDS)
    assert spec.bytes_per_logit(CPU) == 3 * spec.bytes_per_logit(CUDA)


def test_a_cpu_reads_columns_of_what_its_cache_holds() -> None:
    assert DEFAULT.rows_per_pass(128_256, PLAIN, CPU) == 4
    assert DEFAULT.rows_per_pass(128_256, PLAIN, CUDA) == 256 * MIB // (16 * 128_256)


SCRIPT = """
import json
import math
import torch
from logsteer_server.numerics import row_kernel
from logsteer_server.numerics.row_kernel import FusedRows
from logsteer_server.numerics.rows import Rows, RowSpec, read_rows

row_kernel.BLOCK = 64
SPEC = RowSpec(("logprob", "rank", "entropy", "logit_mean"), top=3)
INF = math.inf


def draw(size, seed):
    # Rows by what they hold, the targets' column, and whether they are finite.
    torch.manual_seed(seed)
    z_RV = 4 * torch.randn(11, size)
    targets_R = torch.randint(size, (11,))
    finite = [True] * 11
    z_RV[1] = 2.5                                   # all tied
    z_RV[2] = z_RV[2].round()                       # many tied, with the target, too
    z_RV[3] = -INF
    z_RV[3, targets_R[3]] = 1.0                     # one token alone
    z_RV[4, : size // 2] = -INF                     # whole blocks masked, in front and behind
    z_RV[5, size // 2 :] = -INF
    z_RV[6, targets_R[6]] = -INF                    # a target that cannot be
    z_RV[7] = 1e4 + torch.arange(size) % 7          # large, and rising
    z_RV[7, 0] = torch.finfo(torch.float32).min
    for row, value in ((8, math.nan), (9, INF)):
        z_RV[row, size - 1] = value
        finite[row] = False
    z_RV[10] = -INF
    finite[10] = False
    return z_RV, targets_R, finite


found = []
for size in (1, 5, 64, 200, 1009):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        z_RV, targets_R, finite = draw(size, size)
        z_RV = z_RV.clamp(min=torch.finfo(dtype).min).where(z_RV != -INF, -INF).to(dtype)
        wide_RV = torch.full((11, size + 24), 99.0, dtype=dtype)
        wide_RV[:, :size] = z_RV
        plain = Rows(z_RV, targets_R)
        fused = FusedRows(wide_RV[:, :size], targets_R)  # as vLLM cuts the head's padding off
        ok = fused.finite_R
        expected_RW, own_RW = (read_rows(rows, SPEC)[ok] for rows in (plain, fused))
        double = Rows(z_RV, targets_R, double=True)
        exact_RW = read_rows(double, RowSpec(SPEC.columns, SPEC.top, double=True))[ok]
        same_inf = torch.equal(expected_RW.isinf(), own_RW.isinf())
        error = (own_RW - exact_RW).nan_to_num(posinf=0, neginf=0, nan=0).abs()
        error /= exact_RW.abs().nan_to_num(posinf=1, neginf=1).clamp(min=1)
        found.append({
            "size": size,
            "finite": ok.tolist(),
            "expected_finite": finite if size > 2 else plain.finite_R.tolist(),
            "same_infinities": same_inf and not own_RW.isnan().any().item(),
            "same_ranks": torch.equal(expected_RW[:, 1], own_RW[:, 1]),
            "same_top": torch.equal(expected_RW[:, 4:4 + min(3, size)],
                                    own_RW[:, 4:4 + min(3, size)]),
            "error": error.max().item(),
        })
print(json.dumps(found))
"""


def test_the_kernel_reads_what_the_plain_form_reads() -> None:
    cases = run_script(SCRIPT, TRITON_INTERPRET="1")
    assert len(cases) == 15
    for case in cases:
        assert case["finite"] == case["expected_finite"], case
        assert case["same_infinities"], case
        assert case["same_ranks"], case
        assert case["same_top"], case
        assert case["error"] < 2e-6, case


def test_logits_in_half_precision_are_summed_in_float32() -> None:
    logits_RV, targets_R = make_rows(1)
    half = logits_RV.bfloat16()
    expected = reference_columns(half.float(), targets_R)["logprob"]
    found = COLUMNS["logprob"](Rows(half, targets_R)).numpy()
    assert np.abs(found - expected).max() < 1e-5


def test_reading_in_float64_comes_back_in_float64() -> None:
    hidden_RV, targets_R = make_rows(5)
    spec = RowSpec(("logprob", "rb_entropy"), top=2, double=True)
    rows, bounds = HiddenRows.of(hidden_RV, targets_R), RowBounds(2**20, 2**20)
    values_RW = read_hidden(rows, lambda hidden: hidden, V, spec, bounds)
    expected = reference_columns(hidden_RV, targets_R)
    assert values_RW.dtype == torch.float64
    assert np.abs(values_RW[:, 0].numpy() - expected["logprob"]).max() < 1e-12
    assert np.abs(values_RW[:, 1].numpy() - expected["rb_entropy"]).max() < 1e-11

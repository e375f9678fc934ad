"""The kernel that reads rows on a GPU, run by Triton's interpreter, against the plain form."""

from tests.probes import run_script

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

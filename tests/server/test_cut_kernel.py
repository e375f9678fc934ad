"""The kernel that cuts, run by Triton's interpreter, against the form that sorts.

`CUT_ROWS=2500 .venv/bin/pytest tests/server/test_cut_kernel.py` tries 10,000 random rows.
"""

from tests.probes import run_script

SCRIPT = """
import json, math, os
import torch
from logsteer_server.contract.jobs import Policy
from logsteer_server.numerics import cut_kernel, sampling
from logsteer_server.numerics.sampling import Cuts, shape_rows
from tests.server import test_drawing as cases

TOP_K = [0, 0, 1, 3, 40, 60, 350, 699, 700, 10**9]
TOP_P = [1.0, 1.0, 0.05, 0.3, 0.5, 0.7, 0.9, 0.95, 0.9999, 1e-9]
MIN_P = [0.0, 0.0, 0.0, 0.01, 0.1, 0.6, 1.0, 1e-7]
counts = dict.fromkeys(("rows", "cut", "tied", "not_finite", "unlike", "masses_unlike"), 0)


def apply(self, logits_RV):
    # Cuts by the form that sorts, and compares the kernel with it.
    p_RV = logits_RV.softmax(-1)
    support_RV, mass_R = self.find_support(p_RV)
    out_VR = torch.zeros(p_RV.shape[::-1])  # of other strides than p
    own_R = cut_kernel.cut_rows(p_RV, self, out_VR.T)
    own_RV = out_VR.T == 0
    least_R1 = p_RV.where(support_RV, 2.0).amin(-1, keepdim=True)
    counts["rows"] += len(p_RV)
    counts["cut"] += int((~own_RV & (p_RV > 0)).any(-1).sum())
    counts["tied"] += int((~support_RV & (p_RV == least_R1)).any(-1).sum())
    counts["not_finite"] += int(own_R.isnan().sum())
    counts["unlike"] += int((own_RV != support_RV).any(-1).sum())
    counts["masses_unlike"] += int((~torch.isclose(own_R, mass_R, 0, 1e-7, True)).sum())
    logits_RV.masked_fill_(~support_RV, -math.inf)
    return mass_R


Cuts.apply = apply
generator = torch.Generator().manual_seed(0)
rows = int(os.environ.get("CUT_ROWS", 18))
for size, block in ((1, 512), (5, 512), (64, 16), (700, 512)):
    cut_kernel.BLOCK = block
    z_RV = 4 * torch.randn(rows, size, generator=generator)
    z_RV[::3] = z_RV[::3].round()
    z_RV[1::7] = z_RV[1::7].bfloat16().float()
    z_RV[::11, size // 3 : size // 2] = -math.inf
    z_RV[::13] = 1.5
    z_RV[::17] *= 30
    if size > 1:
        for row, value in ((5, math.nan), (6, math.inf), (7, -math.inf)):
            z_RV[row, size // 2] = value
        z_RV[8] = -math.inf
    drawn = torch.randint(10**6, (rows, 3), generator=generator).tolist()
    shape_rows(z_RV, [
        Policy(0.8, TOP_K[a % 10], TOP_P[b % 10], MIN_P[c % 8]) for a, b, c in drawn
    ])
cut_kernel.BLOCK = 2**15
z_RV = torch.randn(2, 2**18, generator=generator)
shape_rows(z_RV, [Policy(top_p=0.97), Policy(0.5, 10**5, 0.9)])
cut_kernel.BLOCK = 1024
random = dict(counts)
cases.test_a_likely_head_is_cut_as_the_whole_is()
cases.test_the_example_of_the_cut()
cases.test_without_cuts_nothing_is_lost()
cases.test_a_row_that_is_not_a_number_is_no_error()
cases.test_of_equally_probable_tokens_the_first_are_drawn_from(16)
tied = [Policy(top_k=cases.TOP_K), Policy(0.7, cases.TOP_K), Policy(top_p=cases.TOP_P)]
shape_rows(cases.TIED.expand(3, -1), tied)
print(json.dumps([random, counts]))
"""


def test_the_kernel_cuts_what_sorting_cuts() -> None:
    random, all_ = run_script(SCRIPT, TRITON_INTERPRET="1")
    assert all_["unlike"] == all_["masses_unlike"] == 0, all_
    assert random["cut"] > random["rows"] / 2
    assert random["tied"] > random["rows"] / 10
    assert random["not_finite"] > 5
    assert all_["rows"] > random["rows"] + 80

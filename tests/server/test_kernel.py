"""The CUDA kernel, run by Triton's interpreter, against the plain form of the operation."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json
import numpy as np
import torch
from logsteer_server.contract.plan import Site, ResidualOp
from logsteer_server.engines.vllm import kernel
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.tables import SteeringTables, Step

torch.manual_seed(0)
WIDTH, LAYER = 24, 1
draw = np.random.default_rng(1)


def unit():
    v = draw.normal(size=WIDTH).astype(np.float32)
    return v / np.linalg.norm(v)


TURN = ResidualOp(unit(), per_component=1, degrees=40)
PLANS = [
    (2 * unit(), ()),
    (None, (ResidualOp(unit()),)),
    (unit(), (TURN, ResidualOp(unit(), per_norm=0.5, keep=0))),
    (None, (ResidualOp(unit(), per_component=1, low=3, high=4),)),
    (None, (ResidualOp(unit(), per_component=1, degrees=-170),)),
]


def make_tables(dtype):
    size = SteeringSize(5, 2, 4 * 4 * WIDTH)
    tables = SteeringTables(size, 2, 16, WIDTH, torch.empty(0, dtype=dtype))
    for slot, (offset, ops) in enumerate(PLANS, start=1):
        tables.load(slot, [Site(LAYER, "resid_post", offset, ops)])
    captured = {
        LAYER: (np.array([0, 2, 3]), np.array([1, 1, 3])), 0: (np.array([4]), np.array([2]))
    }
    step = Step(np.arange(1, 8), np.array([1, 2, 3, 4, 5, 3, 5]), captured)
    tables.write(step)
    tables.slots_T[torch.from_numpy(step.steered_t)] = torch.from_numpy(step.steered_slots_t).int()
    tables.captures.fill_rows()
    return tables


found = []
for dtype in (torch.float32, torch.bfloat16):
    beside = torch.randn(9, WIDTH).to(dtype)
    for residual, form in ((None, "hidden"), (beside, "sum"), (beside, "hidden")):
        given = torch.randn(9, WIDTH).to(dtype)
        plain, fused = make_tables(dtype), make_tables(dtype)
        plain.set_form(form)
        fused.set_form(form)
        a, b = given.clone(), given.clone()
        plain.apply(a, residual, LAYER)
        kernel.launch(fused, b, residual, LAYER)
        found.append({
            "changed": (a != given).any(-1).tolist(),
            "hidden": (a.float() - b.float()).abs().max().item(),
            "ratios": (plain.ratios_LT - fused.ratios_LT).abs().max().item(),
            "sums": (plain.captures.sums_ND - fused.captures.sums_ND).abs().max().item(),
            "captured": plain.captures.sums_ND.abs().sum(-1).tolist(),
        })
print(json.dumps(found))
"""


@pytest.mark.engine
def test_the_kernel_does_what_the_plain_form_does() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cases = json.loads(done.stdout.splitlines()[-1])
    assert len(cases) == 6
    for case, tolerance in zip(cases, [2e-6] * 3 + [0.07] * 3, strict=True):
        assert case["changed"] == [False, *[True] * 7, False]
        assert case["hidden"] < tolerance
        assert case["ratios"] < max(2e-6, tolerance / 10)
        assert case["sums"] < max(2e-6, tolerance)
        nobodys, summed, of_another_layer, alone, free = case["captured"]
        assert min(summed, alone) > 1
        assert nobodys == of_another_layer == free == 0

"""The CUDA kernel, run by Triton's interpreter, against the plain form of the operation; and this
and those of rows, compiled for GPUs by the ptxas that Triton brings.
"""

import pytest

from tests.probes import run_script

SCRIPT = """
import json
from functools import partial
import numpy as np
import torch
from logsteer_server.contract.plan import Condition, Probe, ResidualOp, Site, SteeringPlan
from logsteer_server.engines.vllm import kernel
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.layout import CLOSED, DECIDED, ReadTokens, SteeredTokens, Step
from logsteer_server.engines.vllm.tables import SteeringTables

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
# Probe 0 is read in the layer in front, 1 and 2 in the layer that is steered. The first operation
# acts where probe 0 reads more than 0, the second where the prompt's last token is not against
# probe 2.
PROBES = tuple(Probe(layer, "resid_post", unit()) for layer in (0, LAYER, LAYER))
CONDITIONS = (Condition(0, above=0.0), Condition(2, above=-0.9, relative=True, of="prompt"))
CONDITIONAL = (
    ResidualOp(unit(), base=3, per_component=1, condition=0),
    ResidualOp(unit(), base=5, per_component=1, condition=1),
)
PLACES = np.arange(1, 14)
STEERED = SteeredTokens(
    PLACES, np.array([1, 2, 3, 4, 5, 3, 5, *[6] * 6]), np.arange(1, 14), PLACES != 4,
    PLACES % 3 == 1,
)
READ = ReadTokens(
    np.arange(8, 16), np.array([6, 6, 6, 6, 6, 6, 3, 7]), np.arange(8, 16),
    np.array([CLOSED, 9, 9, 9, DECIDED, DECIDED, CLOSED, DECIDED]),
    np.arange(8, 16) == 9, np.ones(8, bool),
)


def make_tables(dtype, plans=PLANS):
    size = SteeringSize(7, 3, 3, 4 * 4 * WIDTH)
    tables = SteeringTables(size, 2, 16, WIDTH, torch.empty(0, dtype=dtype))
    fill(tables, plans)
    return tables


def fill(tables, plans):
    older = Site(LAYER, "resid_post", unit(), (ResidualOp(unit()),) * 3)
    for slot, (offset, ops) in enumerate(plans, start=1):
        # What a slot held before must not count, nor an older plan at another layer.
        tables.load({slot: SteeringPlan((older, Site(0, "resid_post", unit())), probes=PROBES)})
        tables.load({slot: SteeringPlan((Site(LAYER, "resid_post", offset, ops),))})
    site = Site(LAYER, "resid_post", None, CONDITIONAL)
    tables.load({6: SteeringPlan((site,), probes=PROBES, conditions=CONDITIONS)})
    tables.load({7: SteeringPlan((), probes=PROBES[1:])})
    captured = {
        (LAYER, False): (np.array([0, 3]), np.array([1, 3])),
        (LAYER, True): (np.array([2]), np.array([4])),
        (0, False): (np.array([4]), np.array([2])),
    }
    # What an earlier step decided: the second condition for token 12's request, not for 13's.
    tables.sums.decided_E[12:14] = torch.tensor([2, 1], dtype=torch.int32)
    tables.write(Step(STEERED, captured, READ))
    tables.captures.fill_rows()
    tables.fill_marks()
    tables.marks_MF[1 + int(tables.marks_MF[0, 0]) :] = 3  # of an earlier step, not to be read


def launch_narrow(given, residual, form, dtype):
    # 8 tokens, of marks that go on to the 14th.
    tables, hidden = make_tables(dtype), given.clone()
    tables.set_form(form)
    kernel.launch(tables, hidden[:8], None if residual is None else residual[:8], LAYER)
    read = (tables.probes.readings_TGR != 0).any(-1).sum(-1).tolist()
    return [(hidden != given).any(-1).tolist(), read]


found = []
for dtype in (torch.float32, torch.bfloat16):
    beside = torch.randn(16, WIDTH).to(dtype)
    for residual, form in ((None, "hidden"), (beside, "sum"), (beside, "hidden")):
        given = torch.randn(16, WIDTH).to(dtype)
        plain, fused = make_tables(dtype), make_tables(dtype)
        plain.set_form(form)
        fused.set_form(form)
        a, b = given.clone(), given.clone()
        for layer in (0, LAYER):
            plain.apply(a, residual, layer)
            kernel.launch(fused, b, residual, layer)
        read = plain.probes.readings_TGR
        sums = torch.from_numpy(plain.fetch_sums(list(range(16))))
        for tables in (plain, fused):
            tables.probes.decide_prompts()
        found.append({
            "changed": (a != given).any(-1).tolist(),
            "changed_by_kernel": (b != given).any(-1).tolist(),
            "own": (read[8:14, 0, 0] > 0).tolist(),
            "prompt": bool(read[9, 2, 0] > -0.9 * read[9, 2, 1]),
            "moved_readings": (read[8:14, 1, 0] != read[8:14, 1, 2]).tolist(),
            "readings": (read - fused.probes.readings_TGR).abs().max().item(),
            "read": (read != 0).any(-1).sum(-1).tolist(),
            "hidden": (a.float() - b.float()).abs().max().item(),
            "ratios": (sums - fused.sums.sums_EL3[:16]).abs().max().item(),
            "counted": sums[:, LAYER, 0].tolist(),
            "elsewhere": sums[:, 0].abs().max().item(),
            "decided": plain.sums.decided_E[9].item() >> 1 & 1,
            "decided_alike": torch.equal(plain.sums.decided_E, fused.sums.decided_E),
            "sums": (plain.captures.stored_ND - fused.captures.stored_ND).abs().max().item(),
            "captured": plain.captures.stored_ND.abs().sum(-1).tolist(),
            "before": torch.equal(plain.captures.stored_ND[4], given[2].float() + (
                0 if form == "hidden" else residual[2].float())),
            "beyond": launch_narrow(given, residual, form, dtype),
        })


class Recording:
    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return lambda *args, **options: launches.append(
            partial(self.function[grid], *args, **options)
        )


# As a captured graph: launched once while idle, replayed under plans of which it knows nothing.
launches, replayed = [], []
graph = make_tables(torch.float32)
graph.write(Step())
own = kernel._read_tokens, kernel._steer_tokens
kernel._read_tokens, kernel._steer_tokens = map(Recording, own)
static, beside = torch.zeros(16, WIDTH), torch.randn(16, WIDTH)
for layer in (0, LAYER):
    kernel.launch(graph, static, beside, layer)
kernel._read_tokens, kernel._steer_tokens = own
for plans in (PLANS[::-1], PLANS):
    plain = make_tables(torch.float32, plans)
    fill(graph, plans)
    graph.captures.stored_ND.zero_()
    given = torch.randn(16, WIDTH)
    a = given.clone()
    static.copy_(given)
    for launch in launches:
        launch()
    for layer in (0, LAYER):
        plain.apply(a, beside, layer)
    replayed.append({
        "changed": (static != given).any(-1).sum().item(),
        "off": max((a - static).abs().max().item(),
                   (plain.captures.stored_ND - graph.captures.stored_ND).abs().max().item(),
                   (plain.probes.readings_TGR - graph.probes.readings_TGR).abs().max().item()),
    })


class Refusing:
    def __getitem__(self, grid):
        raise AssertionError("launched")


idle = make_tables(torch.float32)
idle.write(Step())
kernel.launch(idle, torch.zeros(16, WIDTH), None, LAYER)
kernel._read_tokens = kernel._steer_tokens = Refusing()
launched = []
for idle.serves in (False, True):
    try:
        kernel.launch(idle, torch.zeros(16, WIDTH), None, LAYER)
    except AssertionError:
        launched.append(idle.serves)
print(json.dumps({"cases": found, "launched": launched, "replayed": replayed}))
"""


@pytest.mark.engine
def test_the_kernel_does_what_the_plain_form_does() -> None:
    found = run_script(SCRIPT, TRITON_INTERPRET="1", VLLM_LOGGING_LEVEL="ERROR")
    assert found["launched"] == [False], "an idle step is launched only before requests are served"
    for replay in found["replayed"]:
        assert replay["changed"] >= 7
        assert replay["off"] < 4e-6
    cases = found["cases"]
    assert len(cases) == 6
    assert {holds for case in cases for holds in case["own"]} == {True, False}
    for case, tolerance in zip(cases, [2e-6] * 3 + [0.07] * 3, strict=True):
        own, prompt = case["own"], case["prompt"]
        of_prompt = [False, prompt, prompt, prompt, True, False]
        conditional = [a or b for a, b in zip(own, of_prompt, strict=True)]
        assert case["changed"] == [False, *[True] * 7, *conditional, False, False]
        assert case["changed_by_kernel"] == case["changed"]
        assert case["beyond"] == [[False, *[True] * 7, *[False] * 8], [0] * 16]
        assert case["moved_readings"] == conditional
        assert case["read"] == [0] * 8 + [3] * 6 + [0, 2]
        assert case["readings"] < max(4e-6, tolerance)
        assert case["hidden"] < tolerance
        assert case["ratios"] < max(2e-6, tolerance / 10)
        assert case["counted"] == [
            0, *(float(changed and place != 4) for place, changed in enumerate(case["changed"])
                 if 0 < place < 14), 0, 0,
        ]  # fmt: skip
        assert case["elsewhere"] == 0
        assert (case["decided"], case["decided_alike"]) == (prompt, True)
        assert case["sums"] < max(2e-6, tolerance)
        nobodys, plain, of_another_layer, steered, before = case["captured"]
        assert min(plain, of_another_layer, steered, before) > 1
        assert (nobodys, case["before"]) == (0, True)


COMPILED = '''
import json, re, subprocess, sys, tempfile
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from logsteer_server.engines.vllm import kernel
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.tables import SteeringTables
from logsteer_server.contract.jobs import Policy
from logsteer_server.numerics.cut_kernel import cut_rows
from logsteer_server.numerics.row_kernel import FusedRows
from logsteer_server.numerics.sampling import Cuts

CAPABILITY = int(sys.argv[1])
run, compiled = JITFunction.run, []


class Pretended:
    def get_current_target(self):
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def bind(self, *args, grid, warmup, **options):
    """Bind the arguments and compile, as for a launch, and do not launch."""
    compiled.append(run(self, *args, grid=grid, warmup=True, **options))


def count_spilled(made):
    """Bytes that a thread keeps outside its registers."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        arch = re.search(r"^\\.target (\\w+)", made.asm["ptx"], re.MULTILINE).group(1)
        command = [get_ptxas(CAPABILITY).path, "-v", f"-arch={arch}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\\d+) bytes spill stores", said).group(1))


driver.set_active(Pretended())
JITFunction.run = bind
spilled = {}
for width in (2048, 4096, 8192, 16384):
    hidden = torch.zeros(8, width, dtype=torch.bfloat16)
    tables = SteeringTables(SteeringSize(2, 2, 16, 2**10), 1, 8, width, hidden[:0])
    compiled.clear()
    kernel.launch(tables, hidden, hidden.clone(), 0)
    spilled[width] = [count_spilled(made) for made in compiled]
compiled.clear()
for dtype in (torch.bfloat16, torch.float32):
    logits = torch.zeros(2, 151_936, dtype=dtype)
    FusedRows(logits, torch.zeros(2, dtype=torch.int64))._numbers_4R
spilled["rows"] = [count_spilled(made) for made in compiled]
compiled.clear()
for vocab in (128_256, 50_257):
    p = torch.zeros(2, vocab)
    cuts = Cuts.of([Policy(top_p=0.9)] * 2, vocab, p.dtype, p.device)
    cut_rows(p, cuts.limits, torch.zeros_like(p))
spilled["cuts"] = [count_spilled(made) for made in compiled]
print(json.dumps(spilled))
'''


@pytest.mark.engine
@pytest.mark.parametrize(("capability", "most"), [(80, 8), (90, 0), (100, 0)])
def test_kernels_compile_for_a_gpu_and_stay_in_its_registers(capability: int, most: int) -> None:
    """At width 16,384, four vectors of float32 fill a multiprocessor's registers."""
    spilled = run_script(COMPILED, str(capability), VLLM_LOGGING_LEVEL="ERROR")
    for width, found in spilled.items():
        assert len(found) == 2
        assert max(found) <= (32 if width == "16384" else most), (width, found)

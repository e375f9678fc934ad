"""The steering kernel and the plain form against the same arithmetic in float64.

On CPUs the kernel runs in Triton's interpreter, which shows that it is right, not how fast.
"""

import importlib.util
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu_check.report import Findings, Options, Table
from logsteer_server.contract.plan import ResidualOp, Site, SteeringPlan
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.layout import SteeredTokens, Step
from logsteer_server.engines.vllm.stream import StreamForm
from logsteer_server.engines.vllm.tables import SteeringTables
from logsteer_server.numerics.residual_ops import change_stream

WIDTHS = (24, 64, 768, 4096, 8192, 16384)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMS: tuple[StreamForm, ...] = ("sum", "hidden")

TOKENS, LAYER = 9, 1
CAPTURED = np.array([0, 2, 3]), np.array([1, 3, 2])
PLACES, SLOTS = np.arange(1, 8), np.array([1, 2, 3, 4, 5, 3, 5])
STEP = Step(SteeredTokens(PLACES, SLOTS, PLACES, PLACES > 0), {(LAYER, False): CAPTURED})
"""Of nine tokens the middle seven are steered, by five plans, each for a request of its own, and
three are captured."""
FLOAT32_LIMIT = 1e-5
"""Of the largest value: sums over the width are added up in float32."""


def make_sites(width: int) -> list[Site]:
    """Plans that add, and that do each kind of operation."""
    draw = np.random.default_rng(1)
    size = float(np.sqrt(width))

    def unit() -> np.ndarray:
        vector = draw.normal(size=width).astype(np.float32)
        return np.asarray(vector / np.linalg.norm(vector))

    turn = ResidualOp(unit(), per_component=1, degrees=40)
    clamp = ResidualOp(unit(), per_component=1, low=0.2 * size, high=0.3 * size)
    plans: list[tuple[np.ndarray | None, tuple[ResidualOp, ...]]] = [
        (size * unit(), ()),
        (None, (ResidualOp(unit()),)),
        (size * unit(), (turn, ResidualOp(unit(), per_norm=0.5, keep=0))),
        (None, (clamp,)),
        (None, (ResidualOp(unit(), per_component=1, degrees=-170),)),
    ]
    return [Site(LAYER, "resid_post", offset, ops) for offset, ops in plans]


def make_tables(like: Tensor, width: int, form: StreamForm) -> SteeringTables:
    """Tables with the plans in their slots, where the step of nine tokens is written."""
    tables = SteeringTables(SteeringSize(5, 2, 16, 0), 2, 64, width, like)
    tables.set_form(form)
    for slot, site in enumerate(make_sites(width), start=1):
        tables.load({slot: SteeringPlan((site,))})
    tables.write(STEP)
    if not tables.by_kernel:  # `write` fills the kernel's buffers on CUDA devices alone
        tables.fill_marks()
        tables.captures.fill_rows()
    return tables


def draw_activations(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two parts of a stream [T, D] that has a share along each plan's first direction."""
    torch.manual_seed(width)
    hidden_TD, beside_TD = torch.randn(2, TOKENS, width)
    sites = make_sites(width)
    for token, slot in zip(PLACES, SLOTS, strict=True):
        site = sites[slot - 1]
        along = site.ops[0].direction if site.ops else site.offset
        assert along is not None
        hidden_TD[token] += torch.tensor(0.5 * width**0.5 * along / np.linalg.norm(along))
    return hidden_TD.to(dtype), beside_TD.to(dtype)


def compute_exactly(
    tables: SteeringTables, hidden_TD: Tensor, beside_TD: Tensor, form: StreamForm
) -> dict[str, Tensor]:
    """What the tables (on the CPU) do to the nine tokens, in float64."""
    steered_t, slots_t = map(torch.from_numpy, (PLACES, SLOTS))
    hidden_TD = hidden_TD.double()
    residual_TD = beside_TD.double() if form == "sum" else torch.zeros_like(hidden_TD)
    before_tD = (hidden_TD + residual_TD)[steered_t]
    moved_tD = before_tD + tables.offsets_LSD[LAYER, slots_t].double()
    directions_tKD = tables.directions_LSKD[LAYER, slots_t].double()
    numbers_tKP = tables.numbers_LSKP[LAYER, slots_t].double()
    after_tD = moved_tD + change_stream(moved_tD, directions_tKD, numbers_tKP)
    hidden_TD[steered_t] += after_tD - before_tD
    stored_CD = torch.zeros(4, hidden_TD.shape[1], dtype=torch.float64)
    captured_t, rows_t = map(torch.from_numpy, CAPTURED)
    stored_CD[rows_t] = (hidden_TD + residual_TD)[captured_t]
    ratios_t = (after_tD - before_tD).norm(dim=-1) / before_tD.norm(dim=-1)
    return {"hidden": hidden_TD, "captures": stored_CD, "ratios": ratios_t}


def differ(tables: SteeringTables, hidden_TD: Tensor, exact: dict[str, Tensor]) -> float:
    """The largest error of activations, captures and ratios, each of its own largest value."""
    found = {
        "hidden": hidden_TD,
        "captures": tables.captures.stored_ND,
        "ratios": torch.from_numpy(tables.fetch_sums(PLACES.tolist())[:, LAYER, 1]),
    }
    errors = [
        (found[name].cpu().double() - value).abs().max() / value.abs().max()
        for name, value in exact.items()
    ]
    return max(float(error) for error in errors)


def check_errors(options: Options, found: Findings, launch: Any) -> None:
    """Compare both forms with float64 at every width, dtype and form of the stream."""
    table = Table(
        f"Largest error against float64, as a part of the largest value, of activations, captures "
        f"and ratios: the kernel on {options.device}, and `SteeringTables.apply` on the CPU.",
        ["width", "dtype", *(f"{who}, {form}" for who in ("kernel", "plain") for form in FORMS),
         "limit"],
    )  # fmt: skip
    for width in WIDTHS:
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            # Half precision rounds twice, once after the addition and once after the operations.
            limit = FLOAT32_LIMIT if dtype == torch.float32 else 1.5 * torch.finfo(dtype).eps
            errors: list[float] = []
            for on_device in (True, False):
                for form in FORMS:
                    device = options.device if on_device else "cpu"
                    plain = make_tables(torch.empty(0, dtype=dtype), width, form)
                    given_TD, beside_TD = draw_activations(width, dtype)
                    exact = compute_exactly(plain, given_TD, beside_TD, form)
                    hidden_TD = given_TD.to(device, copy=True)
                    tables = plain
                    if on_device:
                        tables = make_tables(hidden_TD.new_empty(0), width, form)
                        launch(tables, hidden_TD, beside_TD.to(device), LAYER)
                    else:
                        tables.apply(hidden_TD, beside_TD, LAYER)
                    errors.append(differ(tables, hidden_TD, exact))
                    what = f"{'kernel' if on_device else 'plain'}, {width}, {name}, {form}"
                    found.need(what, errors[-1], limit)
                    rest = [0, TOKENS - 1]
                    if not torch.equal(hidden_TD.cpu()[rest], given_TD[rest]):
                        found.failures.append(f"{what}: a token that is not steered has changed")
            table.rows.append([width, name, *errors, limit])
    found.add(table)


def measure(options: Options, found: Findings) -> None:
    """Compare the kernel; bench/gpu-check.md has its time on an H200."""
    if importlib.util.find_spec("triton") is None:
        found.not_run.append("triton is not installed")
        return
    if not options.on_cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # counts only before triton is imported
    from logsteer_server.engines.vllm.kernel import launch

    check_errors(options, found, launch)
    if not options.on_cuda:
        found.notes.append(
            "The kernel ran in Triton's interpreter, on the CPU. In bfloat16 that cuts digits off "
            "where a GPU rounds, hence twice the plain form's error there."
        )

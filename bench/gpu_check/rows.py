"""Reading scored rows over large vocabularies: time, peak memory, error against float64.

The memory is `bench/rows.py`'s to measure, the time too; the exact values are computed here.
"""

import statistics
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.gpu_check.report import Findings, Options, Table
from bench.rows import MIB, PeakMemory, time_runs
from logsteer_server.contract.jobs import Policy
from logsteer_server.engines.vllm.config import widen_columns
from logsteer_server.numerics.hidden_rows import HiddenRows, RowBounds, read_hidden, split_chunks
from logsteer_server.numerics.rows import POLICY_COLUMNS, RowSpec

VOCABS = (128_256, 262_144)
POLICY = Policy(temperature=0.8, top_p=0.95)
SPECS = {
    "logprob": RowSpec(("logprob",)),
    "logprob, rank, entropy": RowSpec(("logprob", "rank", "entropy")),
    "logprob, entropy, log_q, rb_entropy": RowSpec(
        ("logprob", "entropy", "log_q", "rb_entropy"), policy=POLICY
    ),
}
CHUNK = 64 * MIB
LEFT = 32 * 2**30
"""Bytes that a GPU's weights leave, of which policy columns get their part."""
FLAT, PEAKED = 3.0, 8.0
"""Standard deviations of a row's logits."""
LIMIT = 1e-4
"""Nats."""
MARGIN = 192 * MIB
"""Bytes that may be added at the peak beside a chunk, or what policy columns may take."""
EDGE = 1e-6
"""Mass by which a token may miss `top_p` and, in float32, fall on the other side of the cut."""


@dataclass(frozen=True, slots=True)
class Rows:
    """R hidden states, the head that makes logits of them, and the targets that follow them."""

    hidden_RD: Tensor
    head_VD: Tensor
    targets_R: Tensor

    @property
    def bounds(self) -> RowBounds:
        """The bytes that an engine would take on this device."""
        columns = widen_columns(CHUNK, LEFT) if self.hidden_RD.is_cuda else CHUNK
        return RowBounds(logits=CHUNK, columns=columns)

    @classmethod
    def draw(cls, options: Options, vocab: int) -> "Rows":
        """Random ones: flat rows (8 nats) and peaked ones (1.5) in turn; half the targets likely.

        On CPUs they are fewer and narrower, because the head's product is not what is measured.
        """
        torch.manual_seed(vocab)
        rows, width = (2048, 4096) if options.on_cuda else (48, 64)
        dtype = torch.bfloat16 if options.on_cuda else torch.float32
        hidden_RD = torch.randn(rows, width, device=options.device, dtype=dtype)
        hidden_RD[::2] *= FLAT
        hidden_RD[1::2] *= PEAKED
        head_VD = torch.randn(vocab, width, device=options.device, dtype=dtype) / width**0.5
        drawn = cls(hidden_RD, head_VD, torch.randint(vocab, (rows,), device=options.device))
        for first in range(0, rows, 16):
            part = slice(first, first + 8)
            drawn.targets_R[part] = drawn.project(hidden_RD[part]).argmax(-1)
        return drawn

    def project(self, hidden_rD: Tensor) -> Tensor:
        """Logits [r, V]."""
        return hidden_rD @ self.head_VD.T

    def multiply(self) -> Tensor:
        """The product of all rows alone, in chunks of as many bytes; the last chunk's logits."""
        vocab = len(self.head_VD)
        for part in split_chunks(len(self.hidden_RD), CHUNK // (4 * vocab)):
            logits_rV = self.project(self.hidden_RD[part])
        return logits_rV

    def read(self, spec: RowSpec) -> Tensor:
        """What the engines read [R, W]."""
        vocab = len(self.head_VD)
        rows = HiddenRows.of(self.hidden_RD, self.targets_R)
        return read_hidden(rows, self.project, vocab, spec, self.bounds)


def compute_exactly(logits_rV: Tensor, targets_r: Tensor) -> dict[str, Tensor]:
    """Every column of the specs from the same logits, written down anew in float64; and `is_edge`,
    whether rounding decides which tokens `top_p` cuts off.
    """
    z_rV = logits_rV.double()
    log_p_rV = z_rV.log_softmax(-1)
    own_r1 = z_rV.gather(-1, targets_r[:, None])
    scaled_rV, order_rV = (z_rV / POLICY.temperature).sort(dim=-1, descending=True, stable=True)
    p_rV = scaled_rV.softmax(-1)
    beyond_rV = p_rV.cumsum(-1) - p_rV - POLICY.top_p
    kept_rV = beyond_rV < 0
    log_q_rV = scaled_rV.masked_fill(~kept_rV, -torch.inf).log_softmax(-1)
    q_rV = log_q_rV.exp()
    return {
        "logprob": log_p_rV.gather(-1, targets_r[:, None]).squeeze(-1),
        "rank": 1.0 + (z_rV > own_r1).sum(-1),
        "entropy": -(log_p_rV.exp() * log_p_rV).sum(-1),
        "log_q": log_q_rV[order_rV == targets_r[:, None]],
        "rb_entropy": -(q_rV * log_q_rV.masked_fill(~kept_rV, 0.0)).sum(-1),
        "is_edge": beyond_rV.abs().amin(-1) < EDGE,
    }


def find_errors(rows: Rows, spec: RowSpec) -> tuple[float, int, int]:
    """The largest error of any column in nats, targets on the wrong side of the cut, and rows where
    rounding decides the cut, whose policy columns count for neither.
    """
    exact: list[dict[str, Tensor]] = []

    def project(hidden_rD: Tensor) -> Tensor:
        # Here, because a product of another shape may round to other logits.
        logits_rV = rows.project(hidden_rD)
        first = sum(len(found["logprob"]) for found in exact)
        exact.append(compute_exactly(logits_rV, rows.targets_R[first : first + len(logits_rV)]))
        return logits_rV

    vocab = len(rows.head_VD)
    own = HiddenRows.of(rows.hidden_RD, rows.targets_R)
    values_RW = read_hidden(own, project, vocab, spec, rows.bounds).double()
    is_edge_R = torch.cat([found["is_edge"] for found in exact])
    worst, misplaced = 0.0, 0
    for column, name in enumerate(spec.columns):
        own_R, exact_R = values_RW[:, column], torch.cat([found[name] for found in exact])
        if name in POLICY_COLUMNS:
            own_R, exact_R = own_R[~is_edge_R], exact_R[~is_edge_R]
        both_R = own_R.isfinite() & exact_R.isfinite()
        misplaced += int((own_R.isfinite() != exact_R.isfinite()).sum())
        worst = max(worst, float((own_R - exact_R)[both_R].abs().max()))
    return worst, misplaced, int(is_edge_R.sum())


def measure(options: Options, found: Findings) -> None:
    """Read rows of both vocabularies in each way."""
    device = torch.device(options.device)
    runs = 1 if options.quick else 7
    kind = (
        "allocated by torch"
        if options.on_cuda
        else "sampled resident size, without what the reads before have left in use"
    )
    table = Table(
        f"`read_hidden` in chunks of {CHUNK // MIB} MiB, policy columns at temperature "
        f"{POLICY.temperature} and top_p {POLICY.top_p}. Time is the median of {runs}; memory is "
        f"what is added at the peak ({kind}). Of the rows, half of which are flat, those whose cut "
        f"lies within {EDGE:g} of top_p are left out of the policy columns' errors.",
        ["vocabulary", "rows", "columns", "ms", "product alone, ms", "MiB added", "largest error",
         "targets misplaced", "rows at the cut"],
    )  # fmt: skip
    with torch.inference_mode():
        for vocab in VOCABS:
            rows = Rows.draw(options, vocab)
            product = time_runs(rows.multiply, device, runs)
            for columns, spec in SPECS.items():
                with PeakMemory(device) as memory:
                    rows.read(spec)
                times = time_runs(partial(rows.read, spec), device, runs)
                error, misplaced, at_cut = find_errors(rows, spec)
                added = memory.added / MIB
                what = f"{columns}, vocabulary {vocab}"
                found.need(f"{what}, nats", error, LIMIT)
                found.need(f"{what}, targets on the wrong side of the cut", misplaced, 0)
                most = MARGIN + (rows.bounds.columns if spec.looks_at_policy else CHUNK)
                found.need(f"{what}, MiB added", added, most / MIB)
                table.rows.append([
                    vocab, len(rows.hidden_RD), columns, round(statistics.median(times), 1),
                    round(statistics.median(product), 1), round(added, 1), error, misplaced,
                    at_cut,
                ])  # fmt: skip
    found.add(table)

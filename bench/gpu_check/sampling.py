"""The sampling policy and the draw: against their definition in float64, and their time."""

import statistics

import numpy as np
import torch
from torch import Tensor

from bench.gpu_check.report import Findings, Options, Table
from bench.rows import time_runs
from logsteer_server.contract.jobs import Policy
from logsteer_server.numerics.drawing import RowSampler
from logsteer_server.numerics.rows import RowSpec
from logsteer_server.numerics.sampling import shape_rows

VOCABS = (32_000, 262_144)
POLICIES = {
    "temperature 1": Policy(),
    "temperature 0.8, top_p 0.95": Policy(temperature=0.8, top_p=0.95),
    "temperature 0.7, top_k 40": Policy(temperature=0.7, top_k=40),
    "min_p 0.05": Policy(min_p=0.05),
}
SPREAD = 4.0
"""Standard deviation of a row's logits."""
LIMIT = 1e-4
"""Nats, of log q; as a part of 1, of masses that are drawn."""
DRAWS, CHOICES, SIGMAS = 20_000, 12, 6.0


def define(logits_RV: Tensor, policy: Policy) -> tuple[Tensor, Tensor]:
    """Return which tokens are kept, and log q [R, V], by their definition in float64.

    That is temperature, min_p, top_k, top_p, renormalised.
    """
    scaled_RV = logits_RV.double() / policy.temperature
    sorted_RV, order_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)
    p_RV = sorted_RV.softmax(-1)
    kept_RV = p_RV >= policy.min_p * p_RV[:, :1]
    if policy.top_k:
        kept_RV[:, policy.top_k :] = False
    p_RV = p_RV.masked_fill(~kept_RV, 0.0)
    p_RV /= p_RV.sum(-1, keepdim=True)
    if policy.top_p < 1:
        kept_RV &= p_RV.cumsum(-1) - p_RV < policy.top_p
    kept_RV = torch.zeros_like(kept_RV).scatter(-1, order_RV, kept_RV)
    return kept_RV, scaled_RV.masked_fill(~kept_RV, -torch.inf).log_softmax(-1)


def check_policies(options: Options, found: Findings) -> None:
    """Compare log q of every token with the definition, and time the draw."""
    device = torch.device(options.device)
    rows = 256 if options.on_cuda else 4
    table = Table(
        f"`shape_rows` against float64, {rows} rows of logits of standard deviation {SPREAD:g}; "
        "and the time of `RowSampler.draw` for them.",
        ["vocabulary", "policy", "largest error of log q", "mass misplaced", "draw, ms"],
    )
    for vocab in VOCABS:
        torch.manual_seed(vocab)
        logits_RV = SPREAD * torch.randn(rows, vocab, device=device)
        for name, policy in POLICIES.items():
            kept_RV, exact_RV = define(logits_RV, policy)
            log_q_RV = shape_rows(logits_RV, [policy] * rows).logits_RV.double().log_softmax(-1)
            both_RV = kept_RV & log_q_RV.isfinite()
            error = float((log_q_RV - exact_RV)[both_RV].abs().max())
            # Rounding may decide at the cut: what counts is how much mass goes to the wrong side.
            lost_RV = exact_RV.exp().masked_fill(both_RV, 0.0)
            misplaced = float(lost_RV.sum(-1).max())
            sampler = RowSampler([RowSpec((), policy=policy)] * rows, list(range(rows)))
            index_R = np.zeros(rows, dtype=np.uint64)
            times = time_runs(
                lambda s=sampler, z=logits_RV, i=index_R: s.draw(z, i),  # type: ignore[misc]
                device,
                3,
            )
            what = f"{name}, vocabulary {vocab}"
            found.need(f"{what}, log q", error, LIMIT)
            found.need(f"{what}, mass misplaced", misplaced, LIMIT)
            table.rows.append([vocab, name, error, misplaced, statistics.median(times)])
    found.add(table)


def check_draws(options: Options, found: Findings) -> None:
    """Draw from one row again and again: frequencies, and the same tokens as on the CPU."""
    policy = Policy(temperature=0.8, top_p=0.95)
    logits_1V = torch.linspace(-2.0, 2.0, CHOICES)[None]
    q_V = define(logits_1V, policy)[1][0].exp()
    logits_RV = logits_1V.repeat(DRAWS, 1)
    index_R = np.zeros(DRAWS, dtype=np.uint64)

    def draw(device: str) -> Tensor:
        sampler = RowSampler([RowSpec((), policy=policy)] * DRAWS, list(range(DRAWS)))
        return sampler.draw(logits_RV.to(device), index_R).ids_R.cpu()

    drawn_R = draw(options.device)
    freq_V = drawn_R.bincount(minlength=CHOICES) / DRAWS
    sigma_V = (q_V * (1 - q_V) / DRAWS).sqrt()
    worst = float(((freq_V - q_V).abs() / sigma_V.clamp(min=1 / DRAWS)).max())
    found.need(f"frequencies of {DRAWS} draws, in standard deviations", worst, SIGMAS)
    differ = int((drawn_R != draw("cpu")).sum())
    found.need("draws that the CPU makes differently", differ / DRAWS, LIMIT)
    table = Table(
        f"{DRAWS} draws from one row of {CHOICES} tokens, a seed each.",
        ["largest deviation of a frequency, standard deviations", "limit", "unlike the CPU's"],
    )
    table.rows.append([worst, SIGMAS, differ])
    found.add(table)


def measure(options: Options, found: Findings) -> None:
    """Check and time the policy and the draw."""
    with torch.inference_mode():
        check_policies(options, found)
        check_draws(options, found)

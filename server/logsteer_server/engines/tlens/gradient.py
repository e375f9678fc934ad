"""Batches of sequences whose target log-probabilities are derived.

By activations in reverse mode, along a direction of the parameters in forward mode. The rows of a
batch do not touch each other, so the derivative of their sum holds each row's own. Axis letters: B
sequences, T tokens, R scored rows, V vocabulary, D width of an activation.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from logsteer_server.contract.jobs import (
    GradientJob,
    GradientOutput,
    JobFailure,
    JobResult,
)
from logsteer_server.engines.tlens.model import BridgeModel
from logsteer_server.engines.tlens.points import HookFunction, Point
from logsteer_server.engines.tlens.reading import pad_right
from logsteer_server.engines.tlens.steering import Span, SteeredRow, Steering
from logsteer_server.numerics.rows import split_chunks

BYTES_PER_LOGIT = 48
"""Peak bytes per logit while a chunk is derived: float64 values, their tangents, temporaries."""


@dataclass(frozen=True, slots=True)
class Differentiating:
    """A gradient job that is ready to run, with the activations that it is derived by."""

    job_id: int
    job: GradientJob
    steered: SteeredRow | None
    points: tuple[Point, ...]

    @property
    def group(self) -> tuple[Any, ...]:
        """Jobs of one group are derived together."""
        return self.job.delta, self.job.along, tuple(point.key for point in self.points)


@dataclass(slots=True)
class _Rows:
    """The scored rows of a batch: their places among B x T, targets, and which job has them."""

    index_R: Tensor
    targets_R: Tensor
    owners: list[slice]


def differentiate_batch(
    model: BridgeModel,
    batch: Sequence[Differentiating],
    parameters: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
    chunk_bytes: int,
) -> list[tuple[int, JobResult]]:
    """The outputs of gradient jobs of one group, under these parameters in place of the model's.

    `direction` is the tensors of the jobs' `along`, empty where they have none.
    """
    if not direction:
        return model.parameters.under(parameters, lambda: _derive_back(model, batch, chunk_bytes))
    try:
        with forward_ad.dual_level(), torch.no_grad():
            moving = dict(parameters) | _make_duals(model, parameters, direction)
            return model.parameters.under(
                moving, lambda: _derive_forward(model, batch, chunk_bytes)
            )
    except NotImplementedError as error:
        detail = f"an operation of this model has no forward-mode derivative: {error}"
        return [(entry.job_id, JobFailure("unsupported_by_engine", detail)) for entry in batch]


def _make_duals(
    model: BridgeModel, parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    duals = {}
    with warnings.catch_warnings():
        # The first one has torch compile its own formulas, in a way that torch calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, v in direction.items():
            primal = parameters.get(name, model.parameters.by_name[name]).detach()
            duals[name] = forward_ad.make_dual(primal, v.to(primal))  # type: ignore[no-untyped-call]
    return duals


def _derive_back(
    model: BridgeModel, batch: Sequence[Differentiating], chunk_bytes: int
) -> list[tuple[int, JobResult]]:
    leaves: dict[str, Tensor] = {}

    def add_zeros(activation: Tensor, hook: Any) -> Tensor:
        leaf = torch.zeros_like(activation, requires_grad=True)
        leaves[str(hook.name)] = leaf
        return activation + leaf

    points = list(dict.fromkeys(batch[0].points))
    with torch.enable_grad():
        hidden_BTD, rows = _read(model, batch, [(point, add_zeros) for point in points])
        # The head in chunks, so that nothing of size rows x vocabulary is kept for the way back.
        top_BTD = hidden_BTD.detach().requires_grad_()
        logprobs = []
        for part, logits_rV in _project(model, top_BTD, rows, chunk_bytes):
            log_p_rV = _widen(logits_rV).log_softmax(-1)
            logprob_r = log_p_rV.gather(-1, rows.targets_R[part, None])[:, 0]
            logprob_r.sum().backward()  # type: ignore[no-untyped-call]
            logprobs.append(logprob_r.detach())
        wanted = [leaves[point.key] for point in batch[0].points]
        found = torch.autograd.grad(hidden_BTD, wanted, top_BTD.grad)
    logprob_R = torch.cat(logprobs).cpu().numpy()
    results: list[tuple[int, JobResult]] = []
    for b, (entry, own) in enumerate(zip(batch, rows.owners, strict=True)):
        length = len(entry.job.tokens)
        mask_T = torch.from_numpy(entry.job.positions.mask(0, length, entry.job.prompt_len))
        gradients = tuple(
            _widen(gradient[b, :length][mask_T.to(gradient.device)].flatten(1)).cpu().numpy()
            for gradient in found
        )
        trace = entry.steered.trace(length) if entry.steered else None
        output = GradientOutput(logprob_R[own], gradients, trace=trace)
        results.append((entry.job_id, output))
    return results


def _derive_forward(
    model: BridgeModel, batch: Sequence[Differentiating], chunk_bytes: int
) -> list[tuple[int, JobResult]]:
    hidden_BTD, rows = _read(model, batch, [])
    logprobs, derivatives = [], []
    for part, dual_rV in _project(model, hidden_BTD, rows, chunk_bytes):
        logits_rV, change_rV = forward_ad.unpack_dual(dual_rV)  # type: ignore[no-untyped-call]
        log_p_rV = _widen(logits_rV).log_softmax(-1)
        change_rV = torch.zeros_like(logits_rV) if change_rV is None else change_rV
        change_rV = change_rV.double()
        # d log p(x) = dz(x) - sum p dz
        mean_r = (log_p_rV.double().exp() * change_rV).sum(-1)
        targets_r1 = rows.targets_R[part, None]
        derivatives.append(change_rV.gather(-1, targets_r1)[:, 0] - mean_r)
        logprobs.append(log_p_rV.gather(-1, targets_r1)[:, 0])
    logprob_R, derivative_R = (torch.cat(x).cpu().numpy() for x in (logprobs, derivatives))
    return [
        (
            entry.job_id,
            GradientOutput(
                logprob_R[own],
                directional=derivative_R[own],
                trace=entry.steered.trace(len(entry.job.tokens)) if entry.steered else None,
            ),
        )
        for entry, own in zip(batch, rows.owners, strict=True)
    ]


def _read(
    model: BridgeModel,
    batch: Sequence[Differentiating],
    hooks: Sequence[tuple[Point, HookFunction]],
) -> tuple[Tensor, _Rows]:
    """Hidden states of the batch, steered and with further hooks, and its scored rows."""
    steering = Steering([entry.steered for entry in batch])
    tokens_BT = pad_right([entry.job.tokens for entry in batch])
    width = tokens_BT.shape[1]
    spans = [Span(0, 0, len(entry.job.tokens)) for entry in batch]
    with model.hooked([*steering.hooks(spans, width), *hooks]):
        hidden_BTD = model.read(tokens_BT)
    steering.collect()
    index, owners, start = [], [], 0
    for b, entry in enumerate(batch):
        end, count = len(entry.job.tokens) + b * width, len(entry.job.targets)
        index.append(np.arange(end - count, end))
        owners.append(slice(start, start + count))
        start += count
    targets_R = np.concatenate([entry.job.targets for entry in batch]).astype(np.int64)
    device = hidden_BTD.device
    index_R = torch.from_numpy(np.concatenate(index)).to(device)
    return hidden_BTD, _Rows(index_R, torch.from_numpy(targets_R).to(device), owners)


def _project(
    model: BridgeModel, hidden_BTD: Tensor, rows: _Rows, chunk_bytes: int
) -> Iterator[tuple[slice, Tensor]]:
    """The logits of the scored rows, a chunk at a time."""
    size = model.vocab_size * BYTES_PER_LOGIT
    for part in split_chunks(len(rows.index_R), size, chunk_bytes):
        yield part, model.project(hidden_BTD.flatten(0, 1)[rows.index_R[part]])


def _widen(numbers: Tensor) -> Tensor:
    """The numbers in float32 at least."""
    return numbers if numbers.dtype == torch.float64 else numbers.float()

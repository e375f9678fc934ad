"""Differentiating the target log-probabilities of sequences, batch by batch.

With respect to activations in reverse mode, along a direction of the parameters in forward mode.
The rows of a batch do not touch each other, so the derivative of their sum holds each row's own.
Axis letters: B sequences, T tokens, R scored rows, V vocabulary, D width of an activation.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from logsteer_server.contract.gradients import GradientJob, GradientOutput
from logsteer_server.contract.jobs import JobFailure, Scores
from logsteer_server.engines.tlens.model import BridgeModel
from logsteer_server.engines.tlens.parameters import DeltaCache
from logsteer_server.engines.tlens.points import HookFunction, Point, RefusedJobError
from logsteer_server.engines.tlens.queue import (
    EngineLimits,
    Entry,
    ModelQueue,
    Results,
    accept_row,
    read_batch,
)
from logsteer_server.numerics.hidden_rows import split_chunks
from logsteer_server.numerics.sampling import log_softmax

BYTES_PER_LOGIT = 48
"""Peak bytes per logit of a chunk: float64 values, their tangents, temporaries."""
BATCH_SHARE = 4
"""By how much smaller a batch is than one that is scored: it is stored for the backward pass."""


@dataclass(slots=True)
class _ScoredRows:
    """The scored rows of a batch: their places among B x T, targets, and which job has them."""

    index_R: Tensor
    targets_R: Tensor
    owners: list[slice]


class GradientQueue(ModelQueue):
    """Sequences to be differentiated; logits take at most `chunk_bytes` at a time."""

    def __init__(
        self, model: BridgeModel, deltas: DeltaCache, limits: EngineLimits, chunk_bytes: int
    ) -> None:
        tokens = max(1, limits.max_batch_tokens // BATCH_SHARE)
        super().__init__(model, deltas, replace(limits, max_batch_tokens=tokens))
        self._chunk_bytes = chunk_bytes

    def _accept(self, job_id: int, job: GradientJob) -> Entry:
        steered = accept_row(self._model, job)
        points = self._find_points(job)
        if job.input_point and job.input_point.baseline is not None:
            self._model.check_tokens(np.array([job.input_point.baseline]))
        if job.delta or job.along:
            hooked = [*(steered.points if steered else ()), *points]
            self._model.check_delta(hooked, job.delta.cast)
        return Entry(job_id, job, steered, points)

    def _find_points(self, job: GradientJob) -> tuple[Point, ...]:
        points = tuple(self._model.points.find(layer, hook) for layer, hook in job.sites)
        if sum(map(bool, (points, job.along, job.input_point))) != 1:
            detail = "differentiate with respect to activations, a direction or the input: give one"
            raise RefusedJobError("invalid_request", detail)
        widest = max((point.width for point in points), default=0)
        if job.max_width is not None and widest > job.max_width:
            detail = (
                f"the gradients would be {widest} numbers a token, the request may have "
                f"{job.max_width}: name fewer layers, positions or targets"
            )
            raise RefusedJobError("payload_too_large", detail)
        return points

    def _group(self, entry: Entry) -> object:
        keys = tuple(point.key for point in entry.points)
        return entry.job.delta, entry.job.along, entry.job.input_point is None, keys

    def run(self, batch: list[Entry]) -> Results:
        """Return the results of a batch's jobs. Errors: RefusedJobError, for all of them."""
        first = batch[0].job
        if first.along is None:
            return super().run(batch)
        direction = self._deltas.load(first.along)
        parameters = self._deltas.apply(first.delta)
        call_with = self._model.parameters.call_with
        try:
            with forward_ad.dual_level(), torch.no_grad():
                duals = self._make_duals(parameters, direction)
                return call_with(dict(parameters) | duals, lambda: self._run_forward_mode(batch))
        except NotImplementedError as error:
            detail = f"an operation of this model has no forward-mode derivative: {error}"
            failure = JobFailure("unsupported_by_engine", detail)
            return [(entry.job_id, failure) for entry in batch]

    def _make_duals(
        self, parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the parameters that the direction has, as dual numbers with it as tangent.

        Each has the name by which `parameters` has it, whatever the direction calls it.
        """
        resident, duals = self._model.parameters, {}
        with warnings.catch_warnings():
            # The first one has torch compile its own formulas, in a way torch calls deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            for name, v in direction.items():
                own = resident.resolve(name)
                primal = parameters.get(own, resident.by_name[own]).detach()
                dual = forward_ad.make_dual(primal, v.to(primal))  # type: ignore[no-untyped-call]
                duals[own] = dual
        return duals

    def _compute(self, batch: Sequence[Entry]) -> Results:
        if batch[0].job.input_point is not None:
            return self._attribute(batch)
        leaves: dict[str, Tensor] = {}

        def add_zeros(activation: Tensor, hook: Any) -> Tensor:
            leaf = torch.zeros_like(activation, requires_grad=True)
            leaves[str(hook.name)] = leaf
            return activation + leaf

        points = list(dict.fromkeys(batch[0].points))
        with torch.enable_grad():
            hidden_BTD, rows = self._read(batch, [(point, add_zeros) for point in points])
            logprob_R, pull_BTD = self._differentiate_head(hidden_BTD, rows)
            wanted = [leaves[point.key] for point in batch[0].points]
            found = torch.autograd.grad(hidden_BTD, wanted, pull_BTD)
        results: Results = []
        for b, (entry, own) in enumerate(zip(batch, rows.owners, strict=True)):
            length = len(entry.job.tokens)
            mask_T = torch.from_numpy(entry.job.positions.mask(0, length, entry.job.prompt_len))
            gradients = tuple(
                _widen(gradient[b, :length][mask_T.to(gradient.device)].flatten(1)).cpu().numpy()
                for gradient in found
            )
            output = GradientOutput(logprob_R[own], gradients, trace=entry.trace)
            results.append(entry.conclude(output))
        return results

    def _attribute(self, batch: Sequence[Entry]) -> Results:
        points = [entry.job.input_point for entry in batch]
        device = self._model.device
        alphas_B11 = torch.tensor([point.alpha for point in points], device=device)[:, None, None]
        own_B11 = torch.tensor([point.baseline is not None for point in points])[:, None, None]
        tokens_B1 = torch.tensor([point.baseline or 0 for point in points])[:, None]
        base_B1D = self._model.embed(tokens_B1).detach() * own_B11.to(device)
        found: list[Tensor] = []

        def move(embedding_BTD: Tensor) -> Tensor:
            away_BTD = embedding_BTD.detach() - base_B1D
            moved_BTD = base_B1D + alphas_B11.to(away_BTD.dtype) * away_BTD
            found.extend((away_BTD, moved_BTD.requires_grad_()))
            return moved_BTD

        with torch.enable_grad(), self._model.embedding_changed(move):
            hidden_BTD, rows = self._read(batch, [])
            away_BTD, moved_BTD = found
            logprob_R, pull_BTD = self._differentiate_head(hidden_BTD, rows)
            (gradient_BTD,) = torch.autograd.grad(hidden_BTD, [moved_BTD], pull_BTD)
        attributions_BT = (_widen(gradient_BTD) * _widen(away_BTD)).sum(-1).cpu().numpy()
        return [
            entry.conclude(
                GradientOutput(
                    logprob_R[own],
                    attributions=attributions_BT[b, : len(entry.job.tokens)],
                    trace=entry.trace,
                )
            )
            for b, (entry, own) in enumerate(zip(batch, rows.owners, strict=True))
        ]

    def _differentiate_head(
        self, hidden_BTD: Tensor, rows: _ScoredRows
    ) -> tuple[Scores, Tensor | None]:
        """Return the targets' log-probabilities [R], and the gradient of their sum with respect to
        the hidden states.

        In chunks, so that nothing of size rows x vocabulary waits for the backward pass of the
        body.
        """
        top_BTD = hidden_BTD.detach().requires_grad_()
        logprobs = []
        for part, logits_rV in self._project(top_BTD, rows):
            log_p_rV = log_softmax(_widen(logits_rV))
            logprob_r = log_p_rV.gather(-1, rows.targets_R[part, None])[:, 0]
            logprob_r.sum().backward()  # type: ignore[no-untyped-call]
            logprobs.append(logprob_r.detach())
        return torch.cat(logprobs).cpu().numpy(), top_BTD.grad

    def _run_forward_mode(self, batch: Sequence[Entry]) -> Results:
        hidden_BTD, rows = self._read(batch, [])
        logprobs, derivatives = [], []
        for part, dual_rV in self._project(hidden_BTD, rows):
            logits_rV, change_rV = forward_ad.unpack_dual(dual_rV)  # type: ignore[no-untyped-call]
            log_p_rV = log_softmax(_widen(logits_rV))
            change_rV = torch.zeros_like(logits_rV) if change_rV is None else change_rV
            change_rV = change_rV.double()
            # d log p(x) = dz(x) - sum p dz
            mean_r = (log_p_rV.double().exp() * change_rV).sum(-1)
            targets_r1 = rows.targets_R[part, None]
            derivatives.append(change_rV.gather(-1, targets_r1)[:, 0] - mean_r)
            logprobs.append(log_p_rV.gather(-1, targets_r1)[:, 0])
        logprob_R, derivative_R = (torch.cat(x).cpu().numpy() for x in (logprobs, derivatives))
        return [
            entry.conclude(
                GradientOutput(logprob_R[own], directional=derivative_R[own], trace=entry.trace)
            )
            for entry, own in zip(batch, rows.owners, strict=True)
        ]

    def _read(
        self, batch: Sequence[Entry], hooks: Sequence[tuple[Point, HookFunction]]
    ) -> tuple[Tensor, _ScoredRows]:
        """Return the hidden states [B, T, D] of the batch and its scored rows."""
        hidden_BTD = read_batch(self._model, batch, hooks)
        index, owners, start = [], [], 0
        for b, entry in enumerate(batch):
            end, count = len(entry.job.tokens) + b * hidden_BTD.shape[1], len(entry.job.targets)
            index.append(np.arange(end - count, end))
            owners.append(slice(start, start + count))
            start += count
        targets_R = np.concatenate([entry.job.targets for entry in batch]).astype(np.int64)
        device = hidden_BTD.device
        index_R = torch.from_numpy(np.concatenate(index)).to(device)
        return hidden_BTD, _ScoredRows(index_R, torch.from_numpy(targets_R).to(device), owners)

    def _project(self, hidden_BTD: Tensor, rows: _ScoredRows) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits of the scored rows, a chunk at a time."""
        size = self._model.vocab_size * BYTES_PER_LOGIT
        step = max(1, self._chunk_bytes // size)
        for part in split_chunks(len(rows.index_R), step):
            yield part, self._model.project(hidden_BTD.flatten(0, 1)[rows.index_R[part]])


def _widen(numbers: Tensor) -> Tensor:
    """Return the numbers in float32 at least."""
    return numbers if numbers.dtype == torch.float64 else numbers.float()

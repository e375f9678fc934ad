"""Derivatives of sequences' target log-probabilities, batch by batch.

Reverse mode with respect to activations or input embeddings, forward mode along a direction of the
parameters. Rows of a batch are independent, so the gradient of their sum is each row's own.
Axis letters: B sequences, T tokens, R scored rows, V vocabulary, D width of an activation.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from logsteer_server.contract.gradients import GradientJob, GradientOutput
from logsteer_server.contract.jobs import Scores
from logsteer_server.engines.tlens.causal import CausalModel
from logsteer_server.engines.tlens.parameters import DeltaCache
from logsteer_server.engines.tlens.points import HookFunction, Point, RefusedJobError
from logsteer_server.engines.tlens.queue import (
    EngineLimits,
    Entry,
    ModelQueue,
    Results,
    read_batch,
)
from logsteer_server.numerics.sampling import log_softmax

BYTES_PER_LOGIT = 48
"""Peak bytes per logit of a chunk: float64 values, their tangents, temporaries."""
BATCH_SHARE = 4
"""How many times smaller a batch is than in scoring: the backward pass stores activations."""


class GradientQueue(ModelQueue):
    """Sequences to differentiate; a chunk of logits takes at most `chunk_bytes`."""

    def __init__(
        self, model: CausalModel, deltas: DeltaCache, limits: EngineLimits, chunk_bytes: int
    ) -> None:
        tokens = max(1, limits.max_batch_tokens // BATCH_SHARE)
        super().__init__(model, deltas, replace(limits, max_batch_tokens=tokens))
        self._chunk_bytes = chunk_bytes

    def _accept(self, job_id: int, job: GradientJob) -> Entry:
        entry = super()._accept(job_id, job)
        entry.points = tuple(self._model.points.find(layer, hook) for layer, hook in job.sites)
        if job.input_point and job.input_point.baseline is not None:
            self._model.check_tokens(np.array([job.input_point.baseline]))
        if job.delta or job.along:
            hooked = [*(entry.steered.points if entry.steered else ()), *entry.points]
            self._model.check_delta(hooked, job.delta.cast)
        return entry

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
            raise RefusedJobError("unsupported_by_engine", detail) from error

    def _make_duals(
        self, parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the direction's parameters as dual numbers with the direction as tangent.

        Names are those of `parameters`, where the direction may use another one.
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

        hooks = [(point, add_zeros) for point in dict.fromkeys(batch[0].points)]
        logprob_R, found = self._differentiate(batch, leaves, hooks)
        others = []
        for b, entry in enumerate(batch):
            length = len(entry.job.tokens)
            mask_T = torch.from_numpy(entry.job.positions.mask(0, length, entry.job.prompt_len))
            own = (found[point.key][b, :length] for point in entry.points)
            gradients = tuple(
                _widen(own_TD[mask_T.to(own_TD.device)].flatten(1)).cpu().numpy() for own_TD in own
            )
            others.append({"gradients": gradients})
        return _conclude(batch, logprob_R, others)

    def _attribute(self, batch: Sequence[Entry]) -> Results:
        points = [entry.job.input_point for entry in batch]
        own_B11 = torch.tensor([point.baseline is not None for point in points])[:, None, None]
        tokens_B1 = torch.tensor([point.baseline or 0 for point in points])[:, None]
        base_B1D = self._model.embed(tokens_B1).detach()
        base_B1D = base_B1D * own_B11.to(base_B1D.device)
        alphas_B11 = base_B1D.new_tensor([point.alpha for point in points])[:, None, None]
        away, moved = dict[str, Tensor](), dict[str, Tensor]()

        def move(embedding_BTD: Tensor) -> Tensor:
            away["input"] = embedding_BTD.detach() - base_B1D
            moved["input"] = base_B1D + alphas_B11 * away["input"]
            return moved["input"].requires_grad_()

        with self._model.embedding_changed(move):
            logprob_R, found = self._differentiate(batch, moved)
        product_BTD = _widen(found["input"]) * _widen(away["input"])
        attributions_BT = product_BTD.sum(-1).cpu().numpy()
        others = [
            {"attributions": attributions_BT[b, : len(entry.job.tokens)]}
            for b, entry in enumerate(batch)
        ]
        return _conclude(batch, logprob_R, others)

    @torch.enable_grad()
    def _differentiate(
        self,
        batch: Sequence[Entry],
        inputs: Mapping[str, Tensor],
        hooks: Sequence[tuple[Point, HookFunction]] = (),
    ) -> tuple[Scores, dict[str, Tensor]]:
        """Return the targets' log-probabilities [R], and the gradients of their sum with respect to
        `inputs`, which are filled in while the model runs.

        The head is differentiated in chunks, so that nothing of size rows x vocabulary waits for
        the backward pass of the body.
        """
        hidden_BTD = read_batch(self._model, batch, hooks)
        top_BTD = hidden_BTD.detach().requires_grad_()
        logprobs = []
        for targets_r1, logits_rV in self._project(top_BTD, batch):
            log_p_rV = log_softmax(_widen(logits_rV))
            logprob_r = log_p_rV.gather(-1, targets_r1)[:, 0]
            logprob_r.sum().backward()  # type: ignore[no-untyped-call]
            logprobs.append(logprob_r.detach())
        found = torch.autograd.grad(hidden_BTD, list(inputs.values()), top_BTD.grad)
        return torch.cat(logprobs).cpu().numpy(), dict(zip(inputs, found, strict=True))

    def _run_forward_mode(self, batch: Sequence[Entry]) -> Results:
        hidden_BTD = read_batch(self._model, batch)
        logprobs, derivatives = [], []
        for targets_r1, dual_rV in self._project(hidden_BTD, batch):
            logits_rV, change_rV = forward_ad.unpack_dual(dual_rV)  # type: ignore[no-untyped-call]
            log_p_rV = log_softmax(_widen(logits_rV))
            change_rV = torch.zeros_like(logits_rV) if change_rV is None else change_rV
            change_rV = change_rV.double()
            # d log p(x) = dz(x) - sum p dz
            mean_r = (log_p_rV.double().exp() * change_rV).sum(-1)
            derivatives.append(change_rV.gather(-1, targets_r1)[:, 0] - mean_r)
            logprobs.append(log_p_rV.gather(-1, targets_r1)[:, 0])
        logprob_R, derivative_R = (torch.cat(x).cpu().numpy() for x in (logprobs, derivatives))
        others = [{"directional": own_r} for own_r in _split(batch, derivative_R)]
        return _conclude(batch, logprob_R, others)

    def _project(
        self, hidden_BTD: Tensor, batch: Sequence[Entry]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the targets [r, 1] and logits [r, V] of the scored rows, a chunk at a time."""
        width, device = hidden_BTD.shape[1], hidden_BTD.device
        targets = [torch.from_numpy(entry.job.targets.astype(np.int64)) for entry in batch]
        ends = [len(entry.job.tokens) + b * width for b, entry in enumerate(batch)]
        index = [torch.arange(end - len(own), end) for end, own in zip(ends, targets, strict=True)]
        size = max(1, self._chunk_bytes // (self._model.vocab_size * BYTES_PER_LOGIT))
        chunks = (torch.split(torch.cat(own).to(device), size) for own in (index, targets))
        for index_r, target_r in zip(*chunks, strict=True):
            yield target_r[:, None], self._model.project(hidden_BTD.flatten(0, 1)[index_r])


def _split(batch: Sequence[Entry], numbers_R: Scores) -> list[Scores]:
    """Return each job's own rows of those of a batch."""
    counts = [len(entry.job.targets) for entry in batch]
    return np.split(numbers_R, np.cumsum(counts)[:-1])


def _conclude(
    batch: Sequence[Entry], logprob_R: Scores, others: Sequence[Mapping[str, Any]]
) -> Results:
    """Return the jobs' results; `others` are each output's derivatives."""
    return [
        entry.conclude(GradientOutput(own_r, trace=entry.trace, **other))
        for entry, own_r, other in zip(batch, _split(batch, logprob_R), others, strict=True)
    ]


def _widen(numbers: Tensor) -> Tensor:
    """Return the numbers in float32 at least."""
    return numbers if numbers.dtype == torch.float64 else numbers.float()

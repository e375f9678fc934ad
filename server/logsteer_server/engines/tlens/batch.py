"""Batches of sequences that are read in one forward pass, each steered by its own plan.

Sequences are padded on the right, where no token looks, so padding needs no mask and changes
nothing. Axis letters: B sequences, T tokens, D hidden size.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.jobs import Job
from logsteer_server.engines.tlens.cache import RowCache
from logsteer_server.engines.tlens.causal import CausalModel
from logsteer_server.engines.tlens.model import BridgeModel
from logsteer_server.engines.tlens.parameters import DeltaCache
from logsteer_server.engines.tlens.points import HookFunction, Point
from logsteer_server.engines.tlens.probes import TokenRange
from logsteer_server.engines.tlens.queue import EngineLimits, Entry, JobQueue, Results
from logsteer_server.engines.tlens.steering import BatchSteering, SteeredRow


def accept_row(model: CausalModel, job: Job) -> SteeredRow | None:
    """Return how a job's row is steered, None for a job without a plan.

    Errors: RefusedJobError where tokens, plan or parameter delta do not fit the model.
    """
    model.check_tokens(job.tokens)
    steered = None
    if job.plan is not None:
        steered = SteeredRow.place(job.plan, job.prompt_len, model.points)
    if job.delta:
        model.check_delta(steered.points if steered else [], job.delta.cast)
    return steered


class ModelQueue(JobQueue[Entry]):
    """Jobs that are read by the model in batches, under the parameters that they have in common."""

    def __init__(self, model: BridgeModel, deltas: DeltaCache, limits: EngineLimits) -> None:
        super().__init__(limits)
        self._model = model
        self._deltas = deltas

    def _run(self, batch: list[Entry]) -> Results:
        parameters = self._deltas.apply(batch[0].job.delta)
        return self._model.parameters.call_with(parameters, lambda: self._compute(batch))

    @abstractmethod
    def _compute(self, batch: Sequence[Entry]) -> Results:
        """Return the results of a batch, whose parameters the model has now."""


def pad_right(sequences: Sequence[np.ndarray]) -> Tensor:
    """Return the sequences as rows of one int64 tensor [B, T], zeros behind the shorter ones."""
    tokens_BT = torch.zeros((len(sequences), max(map(len, sequences))), dtype=torch.int64)
    for b, tokens in enumerate(sequences):
        tokens_BT[b, : len(tokens)] = torch.from_numpy(tokens)
    return tokens_BT


def read_batch(
    model: CausalModel,
    batch: Sequence[Entry],
    hooks: Sequence[tuple[Point, HookFunction]] = (),
) -> Tensor:
    """Return the hidden states [B, T, D] of a batch, steered, with `hooks` after the steering.

    The jobs have one parameter delta, which the model is under. The traces of the batch's steered
    rows then hold what was measured. Errors: as `CausalModel.read`.
    """
    tokens_BT = pad_right([entry.job.tokens for entry in batch])
    ranges = [TokenRange(0, 0, len(entry.job.tokens)) for entry in batch]
    return _read_pass(
        model, [entry.steered for entry in batch], ranges, hooks,
        tokens_BT=tokens_BT, cast=batch[0].job.delta.cast,
    )  # fmt: skip


def _read_pass(
    model: CausalModel,
    rows: Sequence[SteeredRow | None],
    ranges: Sequence[TokenRange],
    hooks: Sequence[tuple[Point, HookFunction]] = (),
    **read: Any,
) -> Tensor:
    """Read these tokens of rows, steered; `read` has the arguments of `CausalModel.read`."""
    steering = BatchSteering(rows)
    with model.hooked([*steering.hooks(ranges, read["tokens_BT"].shape[1]), *hooks]):
        hidden_BTD = model.read(**read)
    steering.end_pass()
    steering.collect()
    return hidden_BTD


def read_behind_contexts(
    model: CausalModel, batch: Sequence[Entry], lengths: Sequence[int], owners: list[int]
) -> Tensor:
    """Return the hidden states [B, T, D] of what follows each sequence's context.

    A sequence's context is its first `lengths[b]` tokens, which are those of sequence `owners[b]`,
    steered as there; each is read once, and the sequences then look back at its keys and values.
    With the contexts a b c, a b c and d, and behind them e, f g and h, the two passes read

        a b c         e .
        . . d         f g
                      h .

    Nothing may be read by probes, and all blocks must be plain. Otherwise as `read_batch`.
    """
    firsts = list(dict.fromkeys(owners))
    pads = [max(lengths) - lengths[b] for b in firsts]
    width = max(lengths)
    tokens_UT = torch.zeros((len(firsts), width), dtype=torch.int64)
    for u, b in enumerate(firsts):
        tokens_UT[u, pads[u] :] = torch.from_numpy(batch[b].job.tokens[: lengths[b]])
    columns_T = torch.arange(width)
    pads_U1 = torch.tensor(pads)[:, None]
    mask_UT = (columns_T >= pads_U1).long() if any(pads) else None
    # What is measured of a context counts for all its sequences.
    measured = [own and replace(own, counts={}) for own in (batch[b].steered for b in firsts)]
    cache = model.new_cache()
    _read_pass(
        model, measured, [TokenRange(pad, 0, width - pad) for pad in pads],
        tokens_BT=tokens_UT, mask_BT=mask_UT, positions_BT=(columns_T - pads_U1).clamp(min=0),
        cache=cache, cast=batch[0].job.delta.cast,
    )  # fmt: skip
    place = {b: u for u, b in enumerate(firsts)}
    for entry, owner in zip(batch, owners, strict=True):
        if entry.steered and (context := measured[place[owner]]):
            entry.steered.counts |= context.counts
    cache.select([place[owner] for owner in owners], 0)
    return _read_on(model, batch, lengths, cache)


def _read_on(
    model: CausalModel, batch: Sequence[Entry], lengths: Sequence[int], cache: RowCache
) -> Tensor:
    """Return the hidden states of what follows the contexts, which the cache has."""
    rest = [entry.job.tokens[n:] for entry, n in zip(batch, lengths, strict=True)]
    tokens_BT = pad_right(rest)
    before, width = max(lengths), tokens_BT.shape[1]
    lengths_B1 = torch.tensor(lengths)[:, None]
    ends_B1 = torch.tensor([len(tokens) for tokens in rest])[:, None]
    columns_T = torch.arange(-before, width)
    mask_BT = ((columns_T >= -lengths_B1) & (columns_T < ends_B1)).long()
    # Padding has places, too, and a model may have no more than its context.
    positions_BT = (torch.arange(width) + lengths_B1).clamp(max=model.context_length - 1)
    ranges = [TokenRange(0, n, n + len(tokens)) for n, tokens in zip(lengths, rest, strict=True)]
    return _read_pass(
        model, [entry.steered for entry in batch], ranges,
        tokens_BT=tokens_BT, mask_BT=mask_BT, positions_BT=positions_BT,
        cache=cache, cast=batch[0].job.delta.cast,
    )  # fmt: skip

"""Batches of sequences that are read in one forward pass, each steered by its own plan.

Sequences are padded on the right, where no token looks, so padding needs no mask and changes
nothing. Axis letters: B sequences, T tokens, D hidden size.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.jobs import Job
from logsteer_server.engines.tlens.causal import CausalModel
from logsteer_server.engines.tlens.points import HookFunction, Point
from logsteer_server.engines.tlens.steering import BatchSteering, SteeredRow, TokenRange


class SteerableEntry(Protocol):
    """A job's row of a batch; `steered` is None where the job has no plan."""

    @property
    def job(self) -> Job:
        """The job."""
        ...

    @property
    def steered(self) -> SteeredRow | None:
        """How its row is steered."""
        ...


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


def pad_right(sequences: Sequence[np.ndarray]) -> Tensor:
    """Return the sequences as rows of one int64 tensor [B, T], zeros behind the shorter ones."""
    tokens_BT = torch.zeros((len(sequences), max(map(len, sequences))), dtype=torch.int64)
    for b, tokens in enumerate(sequences):
        tokens_BT[b, : len(tokens)] = torch.from_numpy(tokens)
    return tokens_BT


def read_batch(
    model: CausalModel,
    batch: Sequence[SteerableEntry],
    hooks: Sequence[tuple[Point, HookFunction]] = (),
) -> Tensor:
    """Return the hidden states [B, T, D] of a batch, steered, with `hooks` after the steering.

    The jobs have one parameter delta, which the model is under. The traces of the batch's steered
    rows then hold what was measured. Errors: as `CausalModel.read`.
    """
    steering = BatchSteering([entry.steered for entry in batch])
    tokens_BT = pad_right([entry.job.tokens for entry in batch])
    ranges = [TokenRange(0, 0, len(entry.job.tokens)) for entry in batch]
    with model.hooked([*steering.hooks(ranges, tokens_BT.shape[1]), *hooks]):
        hidden_BTD = model.read(tokens_BT, cast=batch[0].job.delta.cast)
    steering.end_pass()
    steering.collect()
    return hidden_BTD

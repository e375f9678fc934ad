"""Batches of sequences that are read once: to score their rows, or to capture activations.

Sequences are padded on the right, where no token looks, so padding needs no mask and changes
nothing. Axis letters: B sequences, T tokens, R scored rows, W values of a row, L layers, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.jobs import (
    CaptureJob,
    CaptureOutput,
    JobResult,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.engines.tlens.model import BridgeModel
from logsteer_server.engines.tlens.points import Point
from logsteer_server.engines.tlens.steering import Span, SteeredRow, Steering
from logsteer_server.numerics.rows import ReferenceFile, RowFiles, RowSpec, read_hidden, unpack


@dataclass(frozen=True, slots=True)
class Scoring:
    """A score job that is ready to run."""

    job_id: int
    job: ScoreJob
    steered: SteeredRow | None

    @property
    def group(self) -> tuple[Any, ...]:
        """Jobs of one group are read together; one that exchanges files is read alone."""
        alone = self.job_id if self.job.export or self.job.reference else None
        return (RowSpec.of(self.job, ()), alone)

    @property
    def rows(self) -> np.ndarray:
        """The positions of the scored rows."""
        count, length = len(self.job.targets), len(self.job.tokens)
        if self.job.shares_row:
            return np.full(count, length - 1)
        return np.arange(length - count, length)


@dataclass(frozen=True, slots=True)
class Capturing:
    """A capture job that is ready to run, with the activations that it reads."""

    job_id: int
    job: CaptureJob
    points: tuple[Point, ...]


def pad_right(sequences: Sequence[np.ndarray]) -> Tensor:
    """The sequences as rows of one int64 tensor [B, T], zeros behind the shorter ones."""
    tokens_BT = torch.zeros((len(sequences), max(map(len, sequences))), dtype=torch.int64)
    for b, tokens in enumerate(sequences):
        tokens_BT[b, : len(tokens)] = torch.from_numpy(tokens)
    return tokens_BT


@torch.inference_mode()
def score_batch(
    model: BridgeModel, batch: Sequence[Scoring], chunk_bytes: int
) -> list[tuple[int, JobResult]]:
    """The outputs of score jobs, read in one forward pass."""
    steering = Steering([scoring.steered for scoring in batch])
    tokens_BT = pad_right([scoring.job.tokens for scoring in batch])
    spans = [Span(0, 0, len(scoring.job.tokens)) for scoring in batch]
    with model.hooked(steering.hooks(spans, tokens_BT.shape[1])):
        hidden_BTD = model.read(tokens_BT)
    steering.collect()
    results: list[tuple[int, JobResult]] = []
    for group in dict.fromkeys(scoring.group for scoring in batch):
        members = [b for b, scoring in enumerate(batch) if scoring.group == group]
        results += _read_group(model, batch, members, hidden_BTD, chunk_bytes)
    return results


def _read_group(
    model: BridgeModel,
    batch: Sequence[Scoring],
    members: Sequence[int],
    hidden_BTD: Tensor,
    chunk_bytes: int,
) -> list[tuple[int, JobResult]]:
    jobs = [batch[b].job for b in members]
    device, width = hidden_BTD.device, hidden_BTD.shape[1]
    index_R = np.concatenate([batch[b].rows + b * width for b in members])
    targets_R = np.concatenate([job.targets for job in jobs])
    reading = RowSpec.of(jobs[0], tuple(sorted(model.eos_ids)))
    values_RW = read_hidden(
        hidden_BTD.flatten(0, 1)[torch.from_numpy(index_R).to(device)],
        torch.from_numpy(targets_R).to(device, torch.int64),
        model.project,
        model.vocab_size,
        reading,
        chunk_bytes,
        _find_files(jobs[0], model.vocab_size),
    )
    found_RW = values_RW.cpu().numpy()
    results: list[tuple[int, JobResult]] = []
    start = 0
    for b, job in zip(members, jobs, strict=True):
        rows = unpack(found_RW[start : start + len(job.targets)], reading)
        start += len(job.targets)
        steered = batch[b].steered
        trace = steered.trace(len(job.tokens)) if steered else None
        output = ScoreOutput(rows.columns, rows.top_ids, rows.top_logprobs, trace=trace)
        results.append((batch[b].job_id, output))
    return results


def _find_files(job: ScoreJob, vocab_size: int) -> RowFiles:
    shape = (len(job.targets), vocab_size)
    return RowFiles(
        ReferenceFile(job.export, *shape) if job.export else None,
        ReferenceFile(job.reference, *shape) if job.reference else None,
    )


@torch.inference_mode()
def capture_batch(model: BridgeModel, batch: Sequence[Capturing]) -> list[tuple[int, JobResult]]:
    """The outputs of capture jobs that read the same points in the same way."""
    first = batch[0]
    found: dict[str, Tensor] = {}
    lengths_B = torch.tensor([len(capturing.job.tokens) for capturing in batch])

    def keep(activation: Tensor, hook: Any) -> None:
        activation_BTD = activation.flatten(2).float()
        last_B = lengths_B.to(activation.device)
        if first.job.read == "last":
            rows_B = torch.arange(len(batch), device=activation.device)
            found[str(hook.name)] = activation_BTD[rows_B, last_B - 1]
            return
        columns_T = torch.arange(activation_BTD.shape[1], device=activation.device)
        own_BT1 = (columns_T < last_B[:, None])[:, :, None]
        # `where`, because padding may hold anything, and 0 times infinity is not 0.
        sums_BD = torch.where(own_BT1, activation_BTD, 0.0).sum(1)
        found[str(hook.name)] = sums_BD / last_B[:, None]

    with model.hooked([(point, keep) for point in dict.fromkeys(first.points)]):
        model.read(pad_right([capturing.job.tokens for capturing in batch]))
    captured_BLD = torch.stack([found[p.key].cpu() for p in first.points], dim=1).numpy()
    return [(capturing.job_id, CaptureOutput(captured_BLD[b])) for b, capturing in enumerate(batch)]

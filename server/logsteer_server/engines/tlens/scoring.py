"""Batches that score rows of sequences or capture activations.

Axis letters: B sequences, T tokens, R scored rows, W values of a row, D hidden size.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from logsteer_server.contract.jobs import CaptureOutput, ScoreOutput
from logsteer_server.engines.tlens.causal import CausalModel
from logsteer_server.engines.tlens.parameters import DeltaCache
from logsteer_server.engines.tlens.points import RefusedJobError
from logsteer_server.engines.tlens.queue import (
    EngineLimits,
    Entry,
    ModelQueue,
    Results,
    read_batch,
)
from logsteer_server.numerics.adjustments import place_targets
from logsteer_server.numerics.hidden_rows import HiddenRows, RowBounds, read_hidden
from logsteer_server.numerics.rows import RowFiles, RowSpec, unpack


class ScoreQueue(ModelQueue):
    """Sequences to score; `bounds` limit the memory of a chunk of rows."""

    def __init__(
        self, model: CausalModel, deltas: DeltaCache, limits: EngineLimits, bounds: RowBounds
    ) -> None:
        super().__init__(model, deltas, limits)
        self._bounds = bounds

    def _group(self, entry: Entry) -> object:
        # Rows with equal columns share chunks; a job that reads or writes a file runs alone.
        alone = entry.job_id if entry.job.export or entry.job.reference else None
        return entry.job.delta, RowSpec.of(entry.job, ()), alone

    @torch.inference_mode()
    def _compute(self, batch: Sequence[Entry]) -> Results:
        hidden_BTD = read_batch(self._model, batch)
        jobs = [entry.job for entry in batch]
        width = hidden_BTD.shape[1]
        index_R = np.concatenate([job.rows + b * width for b, job in enumerate(jobs)])
        targets_R = np.concatenate([job.targets for job in jobs])
        spec, vocab_size = RowSpec.of(jobs[0], self._model.eos_ids), self._model.vocab_size
        before = []
        for job in jobs if spec.policy.adjustments else ():
            prompt, device = job.tokens[: job.prompt_len], hidden_BTD.device
            before += place_targets(prompt, job.targets, job.shares_row, device)
        others = [job.alternatives for job in jobs if job.alternatives is not None]
        one, sizes = jobs[0], (vocab_size, hidden_BTD.shape[-1])
        values_RW = read_hidden(
            HiddenRows.take(hidden_BTD.flatten(0, 1), index_R, targets_R, before, others),
            self._model.project,
            vocab_size,
            spec,
            self._bounds,
            RowFiles.open(one.export, one.reference, one.exchange, sizes),
        )
        found_RW = values_RW.cpu().numpy()
        results: Results = []
        start = 0
        for entry in batch:
            columns = unpack(found_RW[start : start + len(entry.job.targets)], spec)
            start += len(entry.job.targets)
            readings = entry.steered.take_readings() if entry.steered else None
            output = ScoreOutput(columns, trace=entry.trace, readings=readings)
            results.append(entry.conclude(output))
        return results


class CaptureQueue(ModelQueue):
    """Sequences to capture activations of, without scores."""

    def _accept(self, job_id: int, job: Any) -> Entry:
        entry = super()._accept(job_id, job)
        if not len(job.places):
            raise RefusedJobError("invalid_request", "positions: none of the tokens is at them")
        return entry

    @torch.inference_mode()
    def _compute(self, batch: Sequence[Entry]) -> Results:
        read_batch(self._model, batch)
        return [entry.conclude(CaptureOutput(trace=entry.trace)) for entry in batch]

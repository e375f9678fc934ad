"""Scoring the rows of sequences, batch by batch.

Axis letters: B sequences, T tokens, R scored rows, W values of a row, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.finite import find_failure
from logsteer_server.contract.jobs import ScoreJob, ScoreOutput
from logsteer_server.engines.tlens.batch import accept_row, read_batch
from logsteer_server.engines.tlens.model import BridgeModel
from logsteer_server.engines.tlens.parameters import DeltaCache
from logsteer_server.engines.tlens.queue import EngineLimits, JobQueue, Results
from logsteer_server.engines.tlens.steering import SteeredRow
from logsteer_server.numerics.hidden_rows import HiddenRows, RowBounds, read_hidden
from logsteer_server.numerics.row_files import ReferenceFile, RowFiles
from logsteer_server.numerics.rows import RowSpec, unpack


@dataclass(frozen=True, slots=True)
class ScoreEntry:
    """A score job that is ready to run."""

    job_id: int
    job: ScoreJob
    steered: SteeredRow | None

    @property
    def head_group(self) -> object:
        """What jobs whose rows go through the head together have in common.

        A job that exchanges files goes by itself.
        """
        alone = self.job_id if self.job.export or self.job.reference else None
        return RowSpec.of(self.job, ()), alone

    @property
    def rows(self) -> np.ndarray:
        """The positions of the scored rows."""
        count, length = len(self.job.targets), len(self.job.tokens)
        if self.job.shares_row:
            return np.full(count, length - 1)
        return np.arange(length - count, length)


class ScoreQueue(JobQueue[ScoreEntry]):
    """Sequences whose rows are to be scored, within bounds of what that takes at once."""

    def __init__(
        self, model: BridgeModel, deltas: DeltaCache, limits: EngineLimits, bounds: RowBounds
    ) -> None:
        super().__init__(limits)
        self._model = model
        self._deltas = deltas
        self._bounds = bounds

    def _accept(self, job_id: int, job: ScoreJob) -> ScoreEntry:
        return ScoreEntry(job_id, job, accept_row(self._model, job))

    def _run(self, batch: list[ScoreEntry]) -> Results:
        parameters = self._deltas.apply(batch[0].job.delta)
        return self._model.parameters.call_with(parameters, lambda: self._score(batch))

    @torch.inference_mode()
    def _score(self, batch: Sequence[ScoreEntry]) -> Results:
        hidden_BTD = read_batch(self._model, batch)
        results: Results = []
        for group in dict.fromkeys(entry.head_group for entry in batch):
            members = [b for b, entry in enumerate(batch) if entry.head_group == group]
            results += self._score_group(batch, members, hidden_BTD)
        return results

    def _score_group(
        self, batch: Sequence[ScoreEntry], members: Sequence[int], hidden_BTD: Tensor
    ) -> Results:
        """Return the results of some of a batch's sequences, whose rows share a spec."""
        jobs = [batch[b].job for b in members]
        width = hidden_BTD.shape[1]
        index_R = np.concatenate([batch[b].rows + b * width for b in members])
        targets_R = np.concatenate([job.targets for job in jobs])
        spec = RowSpec.of(jobs[0], self._model.eos_ids)
        values_RW = read_hidden(
            HiddenRows.take(hidden_BTD.flatten(0, 1), index_R, targets_R),
            self._model.project,
            self._model.vocab_size,
            spec,
            self._bounds,
            _find_files(jobs[0], self._model.vocab_size),
        )
        found_RW = values_RW.cpu().numpy()
        results: Results = []
        start = 0
        for b, job in zip(members, jobs, strict=True):
            rows = unpack(found_RW[start : start + len(job.targets)], spec)
            start += len(job.targets)
            steered = batch[b].steered
            trace = steered.trace(len(job.tokens)) if steered else None
            readings = steered.take_readings() if steered else None
            output = ScoreOutput(
                rows.columns, rows.top_ids, rows.top_logprobs, trace=trace, readings=readings
            )
            results.append((batch[b].job_id, find_failure(job, output) or output))
        return results


def _find_files(job: ScoreJob, vocab_size: int) -> RowFiles:
    return RowFiles(
        ReferenceFile(job.export, vocab_size) if job.export else None,
        ReferenceFile(job.reference, vocab_size) if job.reference else None,
    )

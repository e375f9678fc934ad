"""Capturing the activations of sequences, batch by batch.

Axis letters: B sequences, T tokens, N tokens of a batch that are read, L layers, D width of an
activation.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.jobs import CaptureJob, CaptureOutput
from logsteer_server.engines.tlens.batch import ModelQueue, accept_row, read_batch
from logsteer_server.engines.tlens.points import RefusedJobError
from logsteer_server.engines.tlens.queue import Entry, Results


class CaptureQueue(ModelQueue):
    """Sequences whose activations are to be captured."""

    def _accept(self, job_id: int, job: CaptureJob) -> Entry:
        steered = accept_row(self._model, job)
        if not job.layers:
            raise RefusedJobError("invalid_request", "layers: name at least one")
        if not len(job.places):
            raise RefusedJobError("invalid_request", "positions: none of the tokens is at them")
        points = tuple(self._model.points.find(layer, job.hook) for layer in job.layers)
        if len({point.width for point in points}) > 1:
            detail = f"{job.hook} is not equally wide in layers {list(job.layers)}; ask apart"
            raise RefusedJobError("invalid_request", detail)
        if job.delta:
            self._model.check_delta(list(points))
        return Entry(job_id, job, steered, points)

    def _group(self, entry: Entry) -> object:
        return entry.job.delta, entry.job.layers, entry.job.hook, entry.job.read

    @torch.inference_mode()
    def _compute(self, batch: Sequence[Entry]) -> Results:
        points, takes_mean = batch[0].points, batch[0].job.read == "mean"
        found: dict[str, Tensor] = {}
        width = max(len(entry.job.tokens) for entry in batch)
        places = [entry.job.places for entry in batch]
        counts_B = torch.tensor([len(own) for own in places])
        index_N = torch.from_numpy(np.concatenate([p + b * width for b, p in enumerate(places)]))
        owner_N = torch.arange(len(batch)).repeat_interleave(counts_B)

        def capture(activation: Tensor, hook: Any) -> None:
            device = activation.device
            read_ND = activation.flatten(2).flatten(0, 1)[index_N.to(device)].float()
            if takes_mean:
                sums_BD = read_ND.new_zeros(len(batch), read_ND.shape[1])
                sums_BD.index_add_(0, owner_N.to(device), read_ND)
                read_ND = sums_BD / counts_B.to(device)[:, None]
            found[str(hook.name)] = read_ND.cpu()

        read_batch(self._model, batch, [(point, capture) for point in dict.fromkeys(points)])
        captured_LND = torch.stack([found[point.key] for point in points])
        results: Results = []
        end = 0
        for entry in batch:
            begin, end = end, end + entry.job.num_rows
            # A copy, which holds nothing of the others in the batch.
            own_LTD = captured_LND[:, begin:end].numpy().copy()
            results.append(entry.conclude(CaptureOutput(own_LTD, trace=entry.trace)))
        return results

"""Capturing the activations of sequences, batch by batch.

Axis letters: B sequences, T tokens, L layers, D width of an activation.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from logsteer_server.contract.jobs import CaptureJob, CaptureOutput
from logsteer_server.engines.tlens.batch import pad_right
from logsteer_server.engines.tlens.model import BridgeModel
from logsteer_server.engines.tlens.points import Point, RefusedJobError
from logsteer_server.engines.tlens.queue import EngineLimits, JobQueue, Results


@dataclass(frozen=True, slots=True)
class CaptureEntry:
    """A capture job that is ready to run, with the activations that it captures."""

    job_id: int
    job: CaptureJob
    points: tuple[Point, ...]


class CaptureQueue(JobQueue[CaptureEntry]):
    """Sequences whose activations are to be captured."""

    def __init__(self, model: BridgeModel, limits: EngineLimits) -> None:
        super().__init__(limits)
        self._model = model

    def _accept(self, job_id: int, job: CaptureJob) -> CaptureEntry:
        self._model.check_tokens(job.tokens)
        if not job.layers:
            raise RefusedJobError("invalid_request", "layers: name at least one")
        points = tuple(self._model.points.find(layer, job.hook) for layer in job.layers)
        if len({point.width for point in points}) > 1:
            detail = f"{job.hook} is not equally wide in layers {list(job.layers)}; ask apart"
            raise RefusedJobError("invalid_request", detail)
        return CaptureEntry(job_id, job, points)

    def _group(self, entry: CaptureEntry) -> object:
        return entry.job.layers, entry.job.hook, entry.job.read

    @torch.inference_mode()
    def _run(self, batch: list[CaptureEntry]) -> Results:
        points, read = batch[0].points, batch[0].job.read
        found: dict[str, Tensor] = {}
        lengths_B = torch.tensor([len(entry.job.tokens) for entry in batch])

        def capture(activation: Tensor, hook: Any) -> None:
            activation_BTD = activation.flatten(2).float()
            last_B = lengths_B.to(activation.device)
            if read == "last":
                rows_B = torch.arange(len(batch), device=activation.device)
                found[str(hook.name)] = activation_BTD[rows_B, last_B - 1]
                return
            columns_T = torch.arange(activation_BTD.shape[1], device=activation.device)
            own_BT1 = (columns_T < last_B[:, None])[:, :, None]
            # `where`, because padding may hold anything, and 0 times infinity is not 0.
            sums_BD = torch.where(own_BT1, activation_BTD, 0.0).sum(1)
            found[str(hook.name)] = sums_BD / last_B[:, None]

        with self._model.hooked([(point, capture) for point in dict.fromkeys(points)]):
            self._model.read(pad_right([entry.job.tokens for entry in batch]))
        captured_BLD = torch.stack([found[p.key].cpu() for p in points], dim=1).numpy()
        return [(entry.job_id, CaptureOutput(captured_BLD[b])) for b, entry in enumerate(batch)]

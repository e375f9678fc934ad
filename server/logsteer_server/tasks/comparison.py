"""Two resident models on the same windows: how far their next-token distributions are apart.

The reference scores a window first and leaves its log-probabilities in a file; the model reads
them while it scores the same window. The file lives as long as the window is at work.
"""

import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from logsteer.errors import api_error
from logsteer_server.contract.jobs import ScoreJob, ScoreOutput
from logsteer_server.models.resident import Resident, WorkClock


@asynccontextmanager
async def export_rows(
    model: Resident, jobs: Sequence[ScoreJob], directory: Path | None
) -> AsyncIterator[list[str]]:
    """Files with the unsteered model's log-probabilities at each job's rows, while they are needed.

    They lie in `directory`, or where the system keeps temporary files.
    """
    _, info = model.require()
    with tempfile.TemporaryDirectory(prefix="logsteer-", dir=directory) as scratch:
        files = [str(Path(scratch, str(i))) for i in range(len(jobs))]
        for file, job in zip(files, jobs, strict=True):
            with Path(file).open("wb") as stream:
                stream.truncate(4 * len(job.targets) * info.vocab_size)
        exports = [replace(j, export=f, plan=None) for j, f in zip(jobs, files, strict=True)]
        async for _ in model.score(exports, WorkClock()):
            pass
        yield files


class Comparison:
    """Scores jobs on a model and collects its divergence from a reference.

    Errors: APIError `invalid_request` where the two have different vocabularies.
    """

    def __init__(
        self, model: Resident, reference: Resident, max_bytes: int, directory: Path | None
    ) -> None:
        codec, info = model.require()
        other_codec, other_info = reference.require()
        if (codec.digest, info.vocab_size) != (other_codec.digest, other_info.vocab_size):
            detail = (
                f"{reference.id} and {model.id} have different vocabularies, so their "
                "distributions cannot be compared; name a reference with the same tokenizer."
            )
            raise api_error("invalid_request", detail, param="reference")
        self.context_length = min(info.context_length, other_info.context_length)
        self._model = model
        self._reference = reference
        self._bytes_per_row = 4 * info.vocab_size
        self._max_bytes = max_bytes
        self._directory = directory
        self._divergences: list[npt.NDArray[np.float32]] = []
        self._agreements: list[npt.NDArray[np.float32]] = []

    async def score(
        self, jobs: Sequence[ScoreJob], clock: WorkClock
    ) -> AsyncIterator[tuple[int, ScoreOutput]]:
        """Index and output of each job as the model ends it."""
        for first, count in self._split(jobs):
            part = jobs[first : first + count]
            async with export_rows(self._reference, part, self._directory) as files:
                compared = [
                    replace(job, reference=file, columns=(*job.columns, "kl", "top1_agrees"))
                    for job, file in zip(part, files, strict=True)
                ]
                async for index, output in self._model.score(compared, clock):
                    self._divergences.append(output.columns["kl"])
                    self._agreements.append(output.columns["top1_agrees"])
                    yield first + index, output

    def _split(self, jobs: Sequence[ScoreJob]) -> Iterator[tuple[int, int]]:
        """Runs of jobs, as start and count, whose log-probabilities fit on disk together."""
        start = size = 0
        for index, job in enumerate(jobs):
            own = len(job.targets) * self._bytes_per_row
            if size and size + own > self._max_bytes:
                yield start, index - start
                start, size = index, 0
            size += own
        if start < len(jobs):
            yield start, len(jobs) - start

    def summarize(self) -> dict[str, Any]:
        """The fields of `Divergence`, over the tokens scored so far."""
        values = np.concatenate([*self._divergences, np.zeros(0)]).astype(np.float64)
        agreements = np.concatenate([*self._agreements, np.zeros(0)])
        if not len(values):
            return {
                "reference": self._reference.id,
                "num_tokens": 0,
                **dict.fromkeys(("kl_mean", "kl_median", "kl_p99", "kl_max", "top1_agreement")),
            }
        return {
            "reference": self._reference.id,
            "kl_mean": float(values.mean()),
            "kl_median": float(np.median(values)),
            "kl_p99": float(np.quantile(values, 0.99)),
            "kl_max": float(values.max()),
            "top1_agreement": float(agreements.mean()),
            "num_tokens": len(values),
        }

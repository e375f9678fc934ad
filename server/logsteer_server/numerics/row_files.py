"""Files through which one engine gives another the log-probabilities of whole rows.

Axis letters: R rows, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class ReferenceFile:
    """Pass log-probabilities of rows over V tokens from one engine to another, on disk.

    The file is as large as it gets before anything is written. It is read and written, not mapped:
    a disk that fails is an error then, and not the end of the process.
    """

    def __init__(self, path: str, vocab_size: int) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self.error: OSError | None = None
        """Why what was written is not there."""

    def write(self, first: int, log_probs_rV: Tensor) -> None:
        """Store rows `first` onward, if that can be done; `error` says why not."""
        rows_rV = log_probs_rV.to("cpu", torch.float32).contiguous().numpy()
        try:
            with Path(self._path).open("r+b") as file:
                file.seek(4 * self._vocab_size * first)
                file.write(rows_rV.data)
        except OSError as error:
            self.error = error

    def read(self, first: int, count: int, device: torch.device) -> Tensor:
        """Load rows [first, first + count) to a device. Errors: OSError."""
        size = count * self._vocab_size
        rows = np.fromfile(self._path, np.float32, size, offset=4 * self._vocab_size * first)
        if len(rows) < size:
            raise OSError(f"{self._path} ends before row {first + count}")
        return torch.from_numpy(rows.reshape(count, self._vocab_size)).to(device)


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Where log-probabilities are written to or read from; `first` is the first row's place."""

    export: ReferenceFile | None = None
    reference: ReferenceFile | None = None
    first: int = 0

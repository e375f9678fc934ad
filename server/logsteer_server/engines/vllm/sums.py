"""Sums of what steering has changed, by request and layer, on the device that changes it.

Axis letters: E entries, L layers, S steps; lower case n: tokens of a step.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logsteer_server.engines.vllm import staging


class TraceSums:
    """Give requests entries, and keep the sums of each: of tokens changed, and of their ratios.

    `sums_EL2[e, l]`: both numbers of a request at a layer, float64; `decided_E[e]`: the bits of its
    conditions, as its prompt's last token decided them. Entry 0 is nobody's. The buffers never
    move, because captured graphs hold them. A ratio has 24 binary digits and a sum 53, so the order
    of adding up shows only where ratios that differ by a factor of 2^29 / tokens meet.

        sums = TraceSums(entries=8, layers=2, like=...)
        entry = sums.take()                                            1
        sums.add(1, np.array([entry, entry]), tensor([[0.1, 0.0]]))
        sums.fetch([entry])                                            [[[0, 0], [1, 0.1]]]
    """

    def __init__(self, entries: int, layers: int, like: Tensor) -> None:
        shape = (entries + 1, layers, 2)
        if like.is_cuda:
            self.sums_EL2 = like.new_zeros(shape, dtype=torch.float64)
        else:  # of numpy's zeros only those that are written to take memory
            self.sums_EL2 = torch.from_numpy(np.zeros(shape))
        self.decided_E = like.new_zeros((entries + 1,), dtype=torch.int32)
        self._unused = list(range(entries, 0, -1))
        self._used: list[int] = []

    def take(self) -> int:
        """Return an entry whose sums are 0. Errors: RuntimeError where none is left.

        Those that were released are set to 0 together, once all others have been given out.
        """
        if not self._unused:
            if not self._used:
                room = len(self.decided_E) - 1
                raise RuntimeError(
                    f"more requests are steered or read at once than there is room for, {room}: "
                    "raise max_num_batched_tokens, of which that is twice as many"
                )
            index_e = staging.send(np.array(self._used), self.sums_EL2)
            self.sums_EL2.index_fill_(0, index_e, 0)
            self.decided_E.index_fill_(0, index_e, 0)
            self._unused, self._used = self._used[::-1], []
        return self._unused.pop()

    def release(self, entry: int) -> None:
        """Take an entry back."""
        self._used.append(entry)

    def add(self, layer: int, entries_n: npt.NDArray[np.int64], ratios_Sn: Tensor) -> None:
        """Add the ratios of tokens in steps alike to the sums of their entries.

        The plain form, for CPUs. A ratio that is not finite counts as changed.
        """
        ratios = ratios_Sn.double().numpy()
        both_n2 = np.stack([(ratios != 0).sum(0), ratios.sum(0)], axis=1)
        np.add.at(self.sums_EL2[:, layer].numpy(), entries_n, both_n2)

    def fetch(self, entries: list[int]) -> npt.NDArray[np.float64]:
        """Return the sums of some entries: float64 [E, L, 2], tokens changed and sum of ratios."""
        index_e = staging.send(np.array(entries), self.sums_EL2)
        found: npt.NDArray[np.float64] = staging.fetch(self.sums_EL2.index_select(0, index_e))
        return found

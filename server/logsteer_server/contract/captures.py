"""Captures: which activations of a job's tokens are read, and what was read.

Axis letters: L layers, T tokens, D width of an activation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.plan import Positions

CaptureRead = Literal["each", "last", "mean"]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Capture:
    """Activations at `hook` of each of `layers`, of the tokens at `positions`.

    `read` says of which of these: `each`, the `last`, or the `mean` over them but for attention
    sinks (`numerics.sinks`). An activation is what leaves its hook, steering included; with
    `before`, what the steering at that hook is given.
    """

    layers: tuple[int, ...]
    hook: str = "resid_post"
    read: CaptureRead = "last"
    positions: Positions = field(default_factory=Positions)
    before: bool = False

    def resolve(self, prompt: npt.NDArray[np.int32]) -> "Capture":
        """Return the capture for a sequence with this prompt, as `Positions.resolve`."""
        return replace(self, positions=self.positions.resolve(prompt))

    def find_places(self, num_read: int, prompt_len: int, num_certain: int) -> Places:
        """Return the positions of the tokens that are captured of the first `num_read`.

        Where only `num_certain` of these are certain to be read, each of the others may come to be
        the last one, and is captured too.
        """
        mask = self.positions.mask(0, num_read, prompt_len)
        found: Places = np.flatnonzero(mask)
        if self.read != "last":
            return found
        return found[max(0, int(np.searchsorted(found, num_certain)) - 1) :]


@dataclass(frozen=True, slots=True, eq=False)
class CapturedActivations:
    """Activations [L, T, D], float32, in the order of the capture's layers and of its tokens.

    `places` [T] are the tokens' positions; a mean is one activation of all of them. `sinks` has by
    layer the tokens that it leaves out.
    """

    activations_LTD: npt.NDArray[np.float32]
    places: Places
    sinks: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Sequence["CapturedActivations"]) -> "CapturedActivations":
        """Return those of tokens that follow one another as one."""
        return cls(
            np.concatenate([part.activations_LTD for part in parts], axis=1),
            np.concatenate([part.places for part in parts]),
            parts[-1].sinks,
        )

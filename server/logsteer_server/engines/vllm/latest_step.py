"""The step that was looked at last: one that goes on from it need not be looked at anew."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(slots=True)
class LatestStep:
    """The R requests of a step: where their tokens begin [R + 1], and each one's next position [R].

    `repeats`: while the same requests go on, a token each, what is found of all their next tokens
    is the same.
    """

    req_ids: list[str]
    starts_R: Indices
    next_R: Indices
    repeats: bool

    def is_followed_by(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> bool:
        """Return whether a step has the next token of each request, of which the same is found."""
        return (
            self.repeats
            and self.req_ids == req_ids
            and np.array_equal(self.starts_R, starts_R)
            and np.array_equal(self.next_R, computed_R)
        )

"""The tokens of a forward pass, which steering, probes and captures choose from.

Axis letters: B rows, T columns, N tokens of the pass.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PassTokens:
    """The tokens that a forward pass [B, T] reads, row by row, without its padding.

    `place_N` counts columns across the rows; `position_N` counts a sequence's tokens. Row b has the
    tokens from `starts[b]` up to `starts[b + 1]`. Prompts of 2 and 4 tokens, padded on the left,

        column    0    1    2    3
        row 0     pad  pad  0    1
        row 1     0    1    2    3

    have places 2, 3, 4, 5, 6, 7, positions 0, 1, 0, 1, 2, 3, and starts 0, 2, 6.
    """

    place_N: Integers
    position_N: Integers
    starts: list[int]

    @classmethod
    def of(cls, first_B: Integers, end_B: Integers, num_columns: int) -> "PassTokens":
        """Return the tokens of rows whose column 0 has position `first_B`, below 0 for padding, and
        whose sequences end before position `end_B`.
        """
        position_BT = first_B[:, None] + np.arange(num_columns)
        is_token_BT = (position_BT >= 0) & (position_BT < end_B[:, None])
        place_N = np.flatnonzero(is_token_BT)
        starts = [0, *is_token_BT.sum(1).cumsum().tolist()]
        return cls(place_N, position_BT.ravel()[place_N], starts)

    def of_row(self, row: int) -> slice:
        """Return where a row's tokens are among N."""
        return slice(self.starts[row], self.starts[row + 1])

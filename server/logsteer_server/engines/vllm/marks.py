"""What the tokens of a step are for: what the host finds, and as the kernel reads it.

Lower case letters are tokens of a step: t those that are steered, r those that are read, m all that
are marked; F fields of a mark.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from logsteer_server.engines.vllm.captures import Captured, Indices

CLOSED, DECIDED = -1, -2
"""In place of the token whose reading decides for another: none, as that stands before the prompt's
end; or one of an earlier step, whose decision the request's entry has."""


class Mark(IntEnum):
    """Fields of a marked token, int32: its place in the step; its slot in the steering tables and
    in the probe tables, 0 for none; its request's entry; whether it was not counted before; the
    place of the token that decides for it, or CLOSED, or DECIDED; whether it is captured.
    """

    PLACE = 0
    SLOT = 1
    READ_SLOT = 2
    ENTRY = 3
    COUNTED = 4
    SOURCE = 5
    CAPTURED = 6
    UNUSED = 7  # 32 bytes are what a GPU loads at once


def no_tokens() -> Indices:
    """Return the places of no token."""
    return np.zeros(0, np.int64)


def no_flags() -> npt.NDArray[np.bool_]:
    """Return the flags of no token."""
    return np.zeros(0, np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class SteeredTokens:
    """Steered tokens of a step: places in it, slots, their requests' entries, and whether what is
    done to them has not been counted before.
    """

    index_t: Indices = field(default_factory=no_tokens)
    slots_t: Indices = field(default_factory=no_tokens)
    entries_t: Indices = field(default_factory=no_tokens)
    is_new_t: npt.NDArray[np.bool_] = field(default_factory=no_flags)


@dataclass(frozen=True, slots=True, eq=False)
class ReadTokens:
    """The tokens of a step that are read: places in it, slots, and their requests' entries.

    `sources_r`: the place of the prompt's last token, whose reading decides where a condition asks
    for that, or CLOSED, or DECIDED. `is_end_r`: whether a token is that last one, and decides.
    `is_kept_r`: whether its readings are wanted on the host. `reads_after`: whether anybody wants
    to know those behind a change; conditions do not.
    """

    index_r: Indices = field(default_factory=no_tokens)
    slots_r: Indices = field(default_factory=no_tokens)
    entries_r: Indices = field(default_factory=no_tokens)
    sources_r: Indices = field(default_factory=no_tokens)
    is_end_r: npt.NDArray[np.bool_] = field(default_factory=no_flags)
    is_kept_r: npt.NDArray[np.bool_] = field(default_factory=no_flags)
    reads_after: bool = True


NONE_STEERED, NONE_READ = SteeredTokens(), ReadTokens()


@dataclass(frozen=True, slots=True)
class Step:
    """What the tokens of one step are for: steered, captured, read."""

    steered: SteeredTokens = NONE_STEERED
    captured: Captured = field(default_factory=dict)
    read: ReadTokens = NONE_READ

    def is_same(self, other: "Step") -> bool:
        """Return whether both steer and read the very same arrays of tokens, and capture none."""
        return (
            self.steered is other.steered
            and self.read is other.read
            and not self.captured
            and not other.captured
        )

    @property
    def is_idle(self) -> bool:
        """Whether no token is marked."""
        return not (len(self.steered.index_t) or self.captured or len(self.read.index_r))


def pack_marks(step: Step) -> npt.NDArray[np.int32]:
    """Return the marked tokens of a step, in order, behind a row that says how many: [1 + m, F].

    Of four tokens of which the third is steered by slot 2, for the request of entry 5:

        [[1, 0, 0, 0, 0, 0, 0, 0], [2, 2, 0, 5, 1, -1, 0, 0]]
    """
    steered, read = step.steered, step.read
    captured = [index_t for index_t, _ in step.captured.values()]
    places = np.concatenate([steered.index_t, read.index_r, *captured])
    marked_m = np.unique(places)
    packed = np.zeros((1 + len(marked_m), len(Mark)), np.int32)
    packed[0, 0] = len(marked_m)
    packed_mF = packed[1:]
    packed_mF[:, Mark.PLACE] = marked_m
    packed_mF[:, Mark.SOURCE] = CLOSED
    rows_r = np.searchsorted(marked_m, read.index_r)
    packed_mF[rows_r, Mark.READ_SLOT] = read.slots_r
    packed_mF[rows_r, Mark.ENTRY] = read.entries_r
    packed_mF[rows_r, Mark.SOURCE] = read.sources_r
    rows_t = np.searchsorted(marked_m, steered.index_t)
    packed_mF[rows_t, Mark.SLOT] = steered.slots_t
    packed_mF[rows_t, Mark.ENTRY] = steered.entries_t
    packed_mF[rows_t, Mark.COUNTED] = steered.is_new_t
    for index_t in captured:
        packed_mF[np.searchsorted(marked_m, index_t), Mark.CAPTURED] = 1
    return packed

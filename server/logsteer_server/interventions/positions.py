"""Which tokens each vector of a steering object changes, and the parts of a plan that follow.

Vectors with positions of their own overlap. A plan has a part for each combination of them, so that
a token belongs to one part at most:

    "happy" at all, "loud" at completion        prompt    completion
    parts       {all}                           ▇▇▇▇▇▇
                {all, completion}                         ▇▇▇▇▇▇▇▇▇▇
                {completion}                    no token has only this one
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from logsteer.errors import api_error
from logsteer.schemas import Steering
from logsteer.schemas.steering import PositionName, PositionRule, SlicePositions
from logsteer_server.contract.plan import Positions

Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens."""

Slices = tuple[tuple[int, int], ...]

MAX_POSITIONS = 4
"""Different positions of the vectors of a request: their combinations are 15 at most."""
MAX_PARTS = 2 ** (MAX_POSITIONS - 1)
"""Those combinations that a vector acts in."""


@dataclass(frozen=True, slots=True)
class FindIds:
    """Finds a prompt's tokens of these ids."""

    ids: tuple[int, ...]

    def __call__(self, prompt: npt.NDArray[np.int32]) -> Slices:
        """Return the places of the tokens, as slices."""
        return tuple((n, n + 1) for n in np.flatnonzero(np.isin(prompt, self.ids)).tolist())


@dataclass(frozen=True, slots=True)
class FindAfter:
    """Finds the tokens of a prompt after the first place where a text stands in it."""

    text: str
    decode: Decode = field(compare=False)

    def __call__(self, prompt: npt.NDArray[np.int32]) -> Slices:
        """Return the rest of the prompt, as a slice; none where the text is not there."""
        ids = prompt.tolist()
        if self.text not in self.decode(ids):
            return ()
        without, having = 0, len(ids)
        while having - without > 1:
            middle = (without + having) // 2
            if self.text in self.decode(ids[:middle]):
                having = middle
            else:
                without = middle
        return ((having, len(ids)),) if having < len(ids) else ()


def place_positions(
    given: PositionName | SlicePositions | PositionRule, decode: Decode | None = None
) -> Positions:
    """Return the positions that a request names; `decode` is needed for those of a text."""
    if isinstance(given, str):
        return Positions(given)
    if given.slices is not None:
        return Positions("slices", tuple(given.slices))
    assert isinstance(given, PositionRule)
    if given.last is not None:
        return Positions("last", number=given.last)
    if given.every is not None:
        return Positions("every", number=given.every)
    if given.token_ids is not None:
        return Positions("slices", find=FindIds(tuple(given.token_ids)))
    assert given.after is not None
    if decode is None:
        raise ValueError("positions: after takes a tokenizer; give slices")
    return Positions("slices", find=FindAfter(given.after, decode))


@dataclass(frozen=True, slots=True)
class PlacedVectors:
    """The positions of each vector, and those of the parts that they come to.

    `parts_of` has the numbers of the parts that each vector acts in.
    """

    parts: list[Positions]
    parts_of: list[tuple[int, ...]]
    names: str
    """The positions in the words of the request."""


def place_vectors_positions(steering: Steering, decode: Decode | None) -> PlacedVectors:
    """Return where the vectors act. Errors: APIError for too many different positions."""
    given = [use.positions or steering.positions for use in steering.vectors]
    placed = [place_positions(one, decode) for one in given]
    distinct = list(dict.fromkeys(placed))
    if len(distinct) > MAX_POSITIONS:
        detail = (
            f"The vectors have {len(distinct)} different positions, at most {MAX_POSITIONS} are "
            "allowed, because every combination of them takes a slot: use fewer."
        )
        raise api_error("invalid_request", detail, param="steering.vectors")
    numbers = range(len(distinct))
    subsets = [
        subset for size in range(1, len(distinct) + 1) for subset in combinations(numbers, size)
    ]
    parts_of = [
        tuple(n for n, subset in enumerate(subsets) if distinct.index(positions) in subset)
        for positions in placed
    ]
    names = dict.fromkeys(one if isinstance(one, str) else one.kind for one in given)
    return PlacedVectors([_join(distinct, s) for s in subsets], parts_of, ", ".join(names))


def _join(distinct: Sequence[Positions], active: tuple[int, ...]) -> Positions:
    """Return the tokens at all of the active positions and at none of the others."""
    first, *within = (distinct[number] for number in active)
    without = tuple(one for number, one in enumerate(distinct) if number not in active)
    return replace(first, within=tuple(within), without=without)

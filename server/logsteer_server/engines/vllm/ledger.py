"""Which tokens of a step are steered, and what was measured of them, an account a request.

A step has tokens of many requests, one request after another, and while decoding one token of each.
So all of it is arithmetic on arrays over the step's tokens T. Account 0 is nobody's: unsteered.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.plan import Positions

Indices = npt.NDArray[np.int64]

_ACCOUNT = np.dtype(
    [("first", "i8"), ("end", "i8"), ("slot", "i8"), ("counted", "i8"), ("steered", "i8")]
)
_ENDLESS = 2**62

MAX_UNBOOKED = 64
"""Steps whose measurements wait to be booked together."""


Ratios = dict[int, npt.NDArray[np.float32]]
"""|change| / |activation| of a step's steered tokens, by layer."""


@dataclass(frozen=True, slots=True, eq=False)
class SteeredTokens:
    """Steered tokens of a step: places in it, positions in their requests, accounts, slots."""

    index_t: Indices
    positions_t: Indices
    accounts_t: Indices
    slots_t: Indices


@dataclass(slots=True)
class _Latest:
    """A step that was looked at, and what was measured of it and of those that went on from it.

    `lasts`: while the same requests go on, a token each, all their next tokens are steered alike.
    """

    req_ids: list[str]
    starts_R: Indices
    next_R: Indices
    tokens: SteeredTokens
    is_new_t: npt.NDArray[np.bool_]
    lasts: bool
    ratios: list[Ratios] = field(default_factory=list)

    def goes_on(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> bool:
        """Whether a step has the next token of each of its requests."""
        return (
            self.lasts
            and self.req_ids == req_ids
            and np.array_equal(self.starts_R, starts_R)
            and np.array_equal(self.next_R, computed_R)
        )


class Ledger:
    """The accounts of the running requests of one rank.

    Tokens in front of an account's `counted` are in it already: preemption makes the model read
    them again.
    """

    def __init__(self, layers: int) -> None:
        self._accounts = np.zeros(1, _ACCOUNT)
        self._changed_AL = np.zeros((1, layers), np.int64)
        self._ratios_AL = np.zeros((1, layers))
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        self._sliced: dict[int, Positions] = {}
        self._latest: _Latest | None = None

    def __len__(self) -> int:
        return len(self._numbers)

    def open(
        self, req_id: str, slot: int, positions: Positions, prompt_len: int, begin: int
    ) -> None:
        """Open the account of a request whose first `begin` tokens the prefix cache holds.

        Those were steered when they were computed.
        """
        self._book()
        if not self._free:
            old = len(self._accounts)
            self._free = list(range(old, 2 * old))
            self._accounts = np.resize(self._accounts, 2 * old)
            self._changed_AL = np.resize(self._changed_AL, (2 * old, self._changed_AL.shape[1]))
            self._ratios_AL = np.resize(self._ratios_AL, (2 * old, self._ratios_AL.shape[1]))
        number = self._free.pop()
        first, end = positions.bounds(prompt_len)
        cached = positions.count(begin, prompt_len)
        self._accounts[number] = (first, _ENDLESS if end is None else end, slot, begin, cached)
        self._changed_AL[number] = 0
        self._ratios_AL[number] = 0
        self._numbers[req_id] = number
        if len(positions.slices) > 1:
            self._sliced[number] = positions

    def close(self, req_id: str) -> None:
        """Close the account of a request that has ended, where it has one."""
        self._book()
        number = self._numbers.pop(req_id, None)
        if number is not None:
            self._sliced.pop(number, None)
            self._free.append(number)

    def find(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> SteeredTokens:
        """The steered tokens of a step.

        Args:
            req_ids: the R requests of the step, in the order of their tokens.
            starts_R: [R + 1], where each one's tokens begin, and where the last one's end.
            computed_R: the position of each one's first token.

        """
        latest = self._latest
        if latest is not None and latest.goes_on(req_ids, starts_R, computed_R):
            latest.next_R += 1
            return latest.tokens
        self._book()
        accounts_R = np.array([self._numbers.get(req_id, 0) for req_id in req_ids])
        counts_R = np.diff(starts_R)
        accounts_T = np.repeat(accounts_R, counts_R)
        positions_T = np.arange(starts_R[-1]) - np.repeat(starts_R[:-1] - computed_R, counts_R)
        rows_T = self._accounts[accounts_T]
        steered_T = (positions_T >= rows_T["first"]) & (positions_T < rows_T["end"])
        for number, positions in self._sliced.items():
            own_t = np.nonzero(accounts_T == number)[0]
            steered_T[own_t] &= positions.contain(positions_T[own_t])
        index_t = np.nonzero(steered_T)[0]
        accounts_t = accounts_T[index_t]
        positions_t = positions_T[index_t]
        is_new_t = positions_t >= self._accounts["counted"][accounts_t]
        ends_T = rows_T["end"]
        stays_T = (steered_T & (ends_T == _ENDLESS)) | (positions_T >= ends_T)
        lasts = len(positions_T) == len(req_ids) and bool(stays_T.all() and is_new_t.all())
        found = SteeredTokens(index_t, positions_t, accounts_t, rows_T["slot"][index_t])
        self._latest = _Latest(list(req_ids), starts_R, computed_R + 1, found, is_new_t, lasts)
        return found

    def count(self, ratios: Ratios) -> None:
        """Take in what was measured of the tokens that were found last."""
        assert self._latest is not None
        self._latest.ratios.append(ratios)
        if len(self._latest.ratios) == MAX_UNBOOKED:
            self._book()

    def _book(self) -> None:
        """Put what was measured into the accounts, and forget the step."""
        latest, self._latest = self._latest, None
        if latest is None or not latest.ratios:
            return
        steps, tokens = len(latest.ratios), latest.tokens
        accounts_n = tokens.accounts_t[latest.is_new_t]
        np.maximum.at(self._accounts["counted"], tokens.accounts_t, tokens.positions_t + steps)
        np.add.at(self._accounts["steered"], accounts_n, steps)
        for layer in latest.ratios[0]:
            ratios_Sn = np.stack([ratios[layer] for ratios in latest.ratios])[:, latest.is_new_t]
            np.add.at(self._changed_AL[:, layer], accounts_n, (ratios_Sn > 0).sum(0))
            np.add.at(self._ratios_AL[:, layer], accounts_n, ratios_Sn.sum(0))

    def read(self, req_id: str) -> tuple[int, dict[int, tuple[int, float]]]:
        """Tokens of a request read under steering; by layer, those changed and the ratios' sum."""
        self._book()
        number = self._numbers[req_id]
        changed_L, ratios_L = self._changed_AL[number], self._ratios_AL[number]
        layers = {int(i): (int(changed_L[i]), float(ratios_L[i])) for i in changed_L.nonzero()[0]}
        return int(self._accounts["steered"][number]), layers

"""Which tokens of a step are steered, and what was measured of them, an account a request.

A step has tokens of many requests, one request after another, and while decoding one token of each.
So all of it is arithmetic on arrays over the step's tokens T. Account 0 is nobody's: unsteered.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logsteer_server.engines.plan import Positions

Indices = npt.NDArray[np.int64]

_ACCOUNT = np.dtype(
    [("first", "i8"), ("end", "i8"), ("slot", "i8"), ("counted", "i8"), ("steered", "i8")]
)
_ENDLESS = 2**62


@dataclass(frozen=True, slots=True)
class SteeredTokens:
    """Steered tokens of a step: places in it, positions in their requests, accounts, slots."""

    index_t: Indices
    positions_t: Indices
    accounts_t: Indices
    slots_t: Indices


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

    def __len__(self) -> int:
        return len(self._numbers)

    def open(
        self, req_id: str, slot: int, positions: Positions, prompt_len: int, begin: int
    ) -> None:
        """Open the account of a request whose first `begin` tokens the prefix cache holds.

        Those were steered when they were computed.
        """
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
        return SteeredTokens(index_t, positions_T[index_t], accounts_t, rows_T["slot"][index_t])

    def count(self, tokens: SteeredTokens, ratios_Lt: dict[int, npt.NDArray[np.float32]]) -> None:
        """Book what a step measured at its steered layers: |change| / |activation| a token."""
        is_new_t = tokens.positions_t >= self._accounts["counted"][tokens.accounts_t]
        accounts_n = tokens.accounts_t[is_new_t]
        np.maximum.at(self._accounts["counted"], tokens.accounts_t, tokens.positions_t + 1)
        np.add.at(self._accounts["steered"], accounts_n, 1)
        for layer, ratios_t in ratios_Lt.items():
            ratios_n = ratios_t[is_new_t]
            np.add.at(self._changed_AL[:, layer], accounts_n, ratios_n > 0)
            np.add.at(self._ratios_AL[:, layer], accounts_n, ratios_n)

    def read(self, req_id: str) -> tuple[int, dict[int, tuple[int, float]]]:
        """Tokens of a request read under steering; by layer, those changed and the ratios' sum."""
        number = self._numbers[req_id]
        changed_L, ratios_L = self._changed_AL[number], self._ratios_AL[number]
        layers = {int(i): (int(changed_L[i]), float(ratios_L[i])) for i in changed_L.nonzero()[0]}
        return int(self._accounts["steered"][number]), layers

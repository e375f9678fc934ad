"""Which tokens of a step are steered, and what was measured of them, by request.

A step reads tokens of many requests, one request after another: parts of prompts, and one token of
each request that is being decoded. So all of it is arithmetic on arrays over the step's tokens T.
Axis letters: R requests of a step, E entries of the recorder, L layers, S steps; lower case t: the
steered tokens of a step, and n those of them that were not read before.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.plan import Positions

Indices = npt.NDArray[np.int64]

_ENTRY = np.dtype(
    [("first", "i8"), ("end", "i8"), ("slot", "i8"), ("recorded", "i8"), ("steered", "i8")]
)
_ENDLESS = 2**62

MAX_STEPS = 64
"""Steps whose measurements are added up together."""


Ratios = dict[int, npt.NDArray[np.float32]]
"""|change| / |activation| of a step's steered tokens, by layer."""


@dataclass(frozen=True, slots=True, eq=False)
class SteeredTokens:
    """Steered tokens of a step: places in it, positions in their requests, entries, slots."""

    index_t: Indices
    positions_t: Indices
    entries_t: Indices
    slots_t: Indices


@dataclass(slots=True)
class _LatestStep:
    """A step that was looked at, and what was measured of it and of steps like it that followed.

    `repeats`: while the same requests go on, a token each, all their next tokens are steered alike.
    """

    req_ids: list[str]
    starts_R: Indices
    next_R: Indices
    tokens: SteeredTokens
    is_new_t: npt.NDArray[np.bool_]
    repeats: bool
    ratios: list[Ratios] = field(default_factory=list)

    def is_followed_by(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> bool:
        """Return whether a step has the next token of each request, steered as this one's."""
        return (
            self.repeats
            and self.req_ids == req_ids
            and np.array_equal(self.starts_R, starts_R)
            and np.array_equal(self.next_R, computed_R)
        )


class TraceRecorder:
    """Find the steered tokens of each step, and record what was measured of them by request.

    It serves one rank. Each steered request has an entry: the positions [first, end) around its
    steered tokens, its slot in the steering tables, and sums of what was measured. Tokens in front
    of `recorded` are in the sums already: preemption makes the model read them again. Entry 0 is
    that of all requests that are not steered.

    Of two requests, `b` is not steered, and `a` is by the plan in slot 2, everywhere. A step reads
    tokens 5 and 6 of `b` and the first three of `a`:

        begin("a", 2, Positions("all"), prompt_len=4, num_cached=0)

        tokens T         b5   b6   a0   a1   a2      starts_R = [0, 2, 5], computed_R = [5, 0]
        entry             0    0    1    1    1
        find(["b", "a"], starts_R, computed_R):      index_t = [2, 3, 4], slots_t = [2, 2, 2]
        record({7: [0.1, 0.2, 0.3]}):                what the table measured of them at layer 7
        read("a"):                                   (3, {7: (3, 0.6)})

    Were `a` preempted here, the next step would read a0 to a3: `find` names all four, which are
    steered again, and `record` adds what was measured of a3 alone.
    """

    def __init__(self, layers: int) -> None:
        self._entries = np.zeros(1, _ENTRY)
        self._changed_EL = np.zeros((1, layers), np.int64)
        self._ratios_EL = np.zeros((1, layers))
        self._entry_of: dict[str, int] = {}
        self._free: list[int] = []
        self._sliced: dict[int, Positions] = {}
        self._latest: _LatestStep | None = None

    def __len__(self) -> int:
        return len(self._entry_of)

    def begin(
        self, req_id: str, slot: int, positions: Positions, prompt_len: int, num_cached: int
    ) -> None:
        """Begin the entry of a request whose first `num_cached` tokens the prefix cache holds.

        Those were steered when they were computed.
        """
        self._add_up()
        if not self._free:
            old = len(self._entries)
            self._free = list(range(old, 2 * old))
            self._entries = np.resize(self._entries, 2 * old)
            self._changed_EL = np.resize(self._changed_EL, (2 * old, self._changed_EL.shape[1]))
            self._ratios_EL = np.resize(self._ratios_EL, (2 * old, self._ratios_EL.shape[1]))
        entry = self._free.pop()
        first, end = positions.bounds(prompt_len)
        steered = positions.count(num_cached, prompt_len)
        self._entries[entry] = (first, _ENDLESS if end is None else end, slot, num_cached, steered)
        self._changed_EL[entry] = 0
        self._ratios_EL[entry] = 0
        self._entry_of[req_id] = entry
        if len(positions.slices) > 1:
            self._sliced[entry] = positions

    def end(self, req_id: str) -> None:
        """Remove the entry of a request that has ended, if it has one."""
        self._add_up()
        entry = self._entry_of.pop(req_id, None)
        if entry is not None:
            self._sliced.pop(entry, None)
            self._free.append(entry)

    def find(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> SteeredTokens:
        """Return the steered tokens of a step.

        Args:
            req_ids: the R requests of the step, in the order of their tokens.
            starts_R: [R + 1], where each one's tokens begin, and where the last one's end.
            computed_R: the position of each one's first token.

        """
        latest = self._latest
        if latest is not None and latest.is_followed_by(req_ids, starts_R, computed_R):
            latest.next_R += 1
            return latest.tokens
        self._add_up()
        entries_R = np.array([self._entry_of.get(req_id, 0) for req_id in req_ids])
        counts_R = np.diff(starts_R)
        entries_T = np.repeat(entries_R, counts_R)
        positions_T = np.arange(starts_R[-1]) - np.repeat(starts_R[:-1] - computed_R, counts_R)
        fields_T = self._entries[entries_T]
        steered_T = (positions_T >= fields_T["first"]) & (positions_T < fields_T["end"])
        for entry, positions in self._sliced.items():
            own_t = np.nonzero(entries_T == entry)[0]
            steered_T[own_t] &= positions.contain(positions_T[own_t])
        index_t = np.nonzero(steered_T)[0]
        entries_t = entries_T[index_t]
        positions_t = positions_T[index_t]
        is_new_t = positions_t >= self._entries["recorded"][entries_t]
        ends_T = fields_T["end"]
        stays_T = (steered_T & (ends_T == _ENDLESS)) | (positions_T >= ends_T)
        repeats = len(positions_T) == len(req_ids) and bool(stays_T.all() and is_new_t.all())
        found = SteeredTokens(index_t, positions_t, entries_t, fields_T["slot"][index_t])
        self._latest = _LatestStep(
            list(req_ids), starts_R, computed_R + 1, found, is_new_t, repeats
        )
        return found

    def record(self, ratios: Ratios) -> None:
        """Record what was measured of the tokens that were found last."""
        assert self._latest is not None
        self._latest.ratios.append(ratios)
        if len(self._latest.ratios) == MAX_STEPS:
            self._add_up()

    def _add_up(self) -> None:
        """Add what was measured to the sums of the entries, and forget the step."""
        latest, self._latest = self._latest, None
        if latest is None or not latest.ratios:
            return
        steps, tokens = len(latest.ratios), latest.tokens
        entries_n = tokens.entries_t[latest.is_new_t]
        np.maximum.at(self._entries["recorded"], tokens.entries_t, tokens.positions_t + steps)
        np.add.at(self._entries["steered"], entries_n, steps)
        for layer in latest.ratios[0]:
            ratios_Sn = np.stack([ratios[layer] for ratios in latest.ratios])[:, latest.is_new_t]
            np.add.at(self._changed_EL[:, layer], entries_n, (ratios_Sn != 0).sum(0))
            np.add.at(self._ratios_EL[:, layer], entries_n, ratios_Sn.sum(0))

    def read(self, req_id: str) -> tuple[int, dict[int, tuple[int, float]]]:
        """Return a request's steered tokens; by layer, those changed and their ratios' sum.

        The sum is NaN or infinite where an activation or its change was.
        """
        self._add_up()
        entry = self._entry_of[req_id]
        changed_L, ratios_L = self._changed_EL[entry], self._ratios_EL[entry]
        layers = {int(i): (int(changed_L[i]), float(ratios_L[i])) for i in ratios_L.nonzero()[0]}
        return int(self._entries["steered"][entry]), layers

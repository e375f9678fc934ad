"""The readings of a sequence's probes, and the evaluation of its conditions, step by step.

Axis letters: T tokens, G probes, C conditions, R numbers of a reading.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.plan import Condition, Positions, Readings, SteeringPlan
from logsteer_server.numerics.residual_ops import READINGS, hold_all

Values = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """The probes and conditions of one sequence, as plain data for workers.

    `first_kept`: the first position whose readings are returned; None for conditions alone.
    `positions`, by condition: those of the sites that it controls, to count the tokens at which it
    holds.
    """

    prompt_len: int
    num_probes: int
    first_kept: int | None
    positions: tuple[tuple[Positions, ...], ...]
    conditions: tuple[Condition, ...]

    @classmethod
    def of(cls, plan: SteeringPlan, prompt_len: int) -> "ReadRequest":
        """Return the request of a plan for a sequence whose prompt has this length."""
        first_kept = plan.first_kept(prompt_len)
        positions = tuple(map(plan.find_positions, range(len(plan.conditions))))
        return cls(prompt_len, len(plan.probes), first_kept, positions, plan.conditions)


@dataclass(slots=True, eq=False)
class SequenceReadings:
    """The readings of one sequence so far.

    `counted`: tokens before it were counted, or came from the prefix cache.
    """

    request: ReadRequest
    counted: int = 0
    _decided_C: npt.NDArray[np.bool_] = field(init=False)
    """Whether each condition holds at the prompt's last token; false before that was read."""
    _passed_C: npt.NDArray[np.int64] = field(init=False)
    _last_C: npt.NDArray[np.int64] = field(init=False)
    _parts: list[tuple[int, Values]] = field(default_factory=list)
    _next: int | None = field(init=False)
    """The first position whose readings are kept and were not returned yet."""

    def __post_init__(self) -> None:
        self._passed_C = np.zeros(len(self.request.conditions), np.int64)
        self._decided_C = np.zeros(len(self.request.conditions), np.bool_)
        self._next = self.request.first_kept

    @property
    def passed(self) -> tuple[int, ...]:
        """By condition, the number of tokens at its positions at which it held."""
        return tuple(self._passed_C.tolist())

    def passed_before(self, end: int) -> tuple[int, ...]:
        """Return `passed` for the tokens before `end`; at most one later token was read."""
        if self.counted <= end:
            return self.passed
        return tuple((self._passed_C - self._last_C).tolist())

    def hold(self, begin: int, values_TGR: Values) -> npt.NDArray[np.bool_]:
        """Return whether each condition holds at the tokens from position `begin` on: bool [T, C].

        The prompt's last token decides the conditions on the prompt, for itself and later ones.
        """
        holds_TC = hold_all(self.request.conditions, values_TGR)
        after_last_T = np.arange(begin, begin + len(values_TGR)) - (self.request.prompt_len - 1)
        if (is_last_T := after_last_T == 0).any():
            self._decided_C = holds_TC[is_last_T][0]
        for c, condition in enumerate(self.request.conditions):
            if condition.of == "prompt":
                holds_TC[:, c] = (after_last_T >= 0) & self._decided_C[c]
        return holds_TC

    def add(self, begin: int, values_TGR: Values) -> None:
        """Add the readings of the tokens from position `begin` on."""
        request, end = self.request, begin + len(values_TGR)
        own_TGR = values_TGR[:, : request.num_probes]
        holds_TC = self.hold(begin, own_TGR)
        if request.conditions and end > self.counted:
            new = max(0, self.counted - begin)
            passed_TC = np.zeros((end - begin - new, len(request.conditions)), np.int64)
            for c, of_sites in enumerate(request.positions):
                for positions in of_sites:
                    steered_T = positions.mask(begin + new, end, request.prompt_len)
                    passed_TC[:, c] += holds_TC[new:, c] & steered_T
            self._passed_C += passed_TC.sum(0)
            self._last_C = passed_TC[-1]
            self.counted = end
        if self._next is not None and end > self._next:
            first = max(begin, self._next)
            self._parts.append((first, own_TGR[first - begin :]))

    def pop(self, end: int | None = None) -> Readings | None:
        """Return the kept readings of the tokens before `end` since the last call; None without.

        Of a token read twice, it returns the later one.
        """
        if not self._parts:
            return None
        first = min(begin for begin, _ in self._parts)
        last = max(begin + len(values) for begin, values in self._parts)
        values_TGR = np.zeros((last - first, self.request.num_probes, READINGS), np.float32)
        for begin, values in self._parts:
            values_TGR[begin - first : begin - first + len(values)] = values
        self._next = last if end is None else max(first, min(end, last))
        count = self._next - first
        self._parts = [(self._next, values_TGR[count:])]
        return Readings(first, values_TGR[:count])

"""The draw: uniform numbers that follow from seeds, and the tokens that they draw.

A token is a function of its row's logits, policy and seed and of its place in the continuation, so
it is the same on every engine and device, in every batch, and when it is drawn once more. Axis
letters: R rows, V vocabulary.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.jobs import Policy
from logsteer_server.numerics.sampling import PolicyRows, is_greedy, pick_rows

CHUNK_LOGITS = {"cpu": 2**18, "cuda": 2**24}
"""Logits that are shaped at once: few enough for a CPU's caches, and enough to keep a GPU busy."""


def mix_bits(state: np.ndarray) -> np.ndarray:
    """Return the output of SplitMix64 at these states, uint64.

    Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014, with the
    constants of Stafford's variant 13, as Java's SplittableRandom has them.
    """
    mixed = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: np.ndarray = mixed ^ (mixed >> np.uint64(31))
    return result


def find_uniform(seed_R: np.ndarray, index_R: np.ndarray) -> np.ndarray:
    """Return the uniform number of each seed and place in its sequence: float64 in [0, 1 - 2^-52].

    Both are uint64. A seed's first output of SplitMix64 is the state that its own sequence starts
    from, so that the sequences of neighbouring seeds have nothing to do with one another.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    start_R = mix_bits(seed_R + step)
    bits_R = mix_bits(start_R + (index_R + np.uint64(1)) * step)
    uniform_R: np.ndarray = (bits_R >> np.uint64(12)) * 2.0**-52
    return uniform_R


def draw_rows(q_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Return the token that each row's uniform number draws from q [R]: its inverse CDF.

    From q = 0.5, 0.2, 0.3 the numbers 0.1, 0.5 and 0.69 draw the tokens 0, 1 and 1. Numbers of at
    most 1 - 2^-52, times the sum of q, stay below it however they are rounded; so no token with
    q = 0 is drawn. From a row that is not a number any token may be.
    """
    cumulated_RV = q_RV.cumsum(-1, dtype=torch.float64)
    points_R1 = uniform_R[:, None] * cumulated_RV[:, -1:]
    # `right`: the first token whose sum lies above the point, and not one whose sum equals it.
    ids_R = torch.searchsorted(cumulated_RV, points_R1, right=True).squeeze(-1)
    return ids_R.clamp(max=q_RV.shape[-1] - 1)


def find_best(logits_RV: Tensor) -> Tensor:
    """Return the most probable token of each row [R], of equal ones the first."""
    return logits_RV.argmax(-1)


class RowSampler:
    """Draw the next tokens of R rows, each by its own policy and seed, for as many steps as wanted.

    Args:
        policies: of the rows.
        seeds: of the rows; any integers, which count modulo 2^64.
        argmax: does what `find_best` does, where an engine has a faster one.

    """

    def __init__(
        self,
        policies: Sequence[Policy],
        seeds: Sequence[int],
        argmax: Callable[[Tensor], Tensor] = find_best,
    ) -> None:
        self._argmax = argmax
        self._num_rows = len(policies)
        drawn = [r for r, policy in enumerate(policies) if not is_greedy(policy)]
        self._drawn = np.array(drawn, dtype=np.int64)
        self._policies = [policies[r] for r in drawn]
        self._seed_R = np.array([seeds[r] % 2**64 for r in drawn], dtype=np.uint64)
        self._rows: Tensor | slice = slice(None)
        self._chunks: list[tuple[slice, PolicyRows]] = []

    def draw(self, logits_RV: Tensor, index_R: np.ndarray) -> Tensor:
        """Return the token of each row [R]; `index_R` counts those that it had before.

        The logits of all steps have one vocabulary and are on one device.
        """
        if not self._policies:
            return self._argmax(logits_RV)
        if not self._chunks:
            self._rows = pick_rows(self._drawn.tolist(), self._num_rows, logits_RV.device)
            self._chunks = self._make_chunks(logits_RV.shape[-1], logits_RV.device)
        uniform = find_uniform(self._seed_R, index_R[self._drawn].astype(np.uint64))
        uniform_R = torch.from_numpy(uniform).to(logits_RV.device, non_blocking=True)
        own_RV = logits_RV[self._rows]
        drawn_R = torch.cat([
            draw_rows(policies.shape(own_RV[part]).q_RV, uniform_R[part])
            for part, policies in self._chunks
        ])  # fmt: skip
        if len(drawn_R) == self._num_rows:
            return drawn_R
        ids_R = self._argmax(logits_RV)
        ids_R[self._rows] = drawn_R
        return ids_R

    def _make_chunks(self, size: int, device: torch.device) -> list[tuple[slice, PolicyRows]]:
        """Return the policies of as many rows as are shaped at once, and which rows they are."""
        step = max(1, CHUNK_LOGITS[device.type] // size)
        starts = range(0, len(self._policies), step)
        parts = [slice(start, start + step) for start in starts]
        return [
            (part, PolicyRows(self._policies[part], size, torch.float32, device)) for part in parts
        ]

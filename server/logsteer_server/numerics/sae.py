"""Encoders of sparse autoencoders: the strongest features of activations.

Formulas and names are SAELens' (6.54, `sae_lens/saes`). Axis letters: T tokens, D width of an
activation, F features of a block, K features that are kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]

BLOCK_BYTES = 2**25
"""Bytes of weights, and of tokens x features, in memory at once."""
LAYER_NORM_EPS = 1e-5
NO_FEATURE = -1
"""The id after the last active feature of a token."""


class ReadTensor(Protocol):
    """A reader of tensors."""

    def __call__(self, name: str, *index: Any) -> Floats:
        """Return a tensor in float32, or the part that an index selects."""
        ...


@dataclass(frozen=True, slots=True)
class SaeEncoder:
    """An encoder of `size` features of activations of `width` numbers.

    With x an activation, multiplied by `scale` and normalised, and less b_dec where it `centres`:

        z = x W_enc + b_enc                  gated: x W_enc exp(r_mag) + b_mag
        standard  z where z > 0              jumprelu  z where z > 0 and z > threshold
        topk      z where z > 0 and among the k largest of the token, each times the norm of its
                  decoder row where it `rescales`
        gated     z where z > 0 and x W_enc + b_gate > 0
    """

    architecture: str
    size: int
    width: int
    read: ReadTensor
    centres: bool = True
    scale: float = 1.0
    normalization: str = "none"
    k: int | None = None
    rescales: bool = False

    def encode(self, x_TD: Floats, top: int) -> tuple[Ids, Floats]:
        """Return the ids and activations of each token's strongest features [T, K], descending.

        K never exceeds `top`; `NO_FEATURE` and 0 follow the last active feature. At most one block
        of features is in memory.
        """
        count = min(top, self.size, self.k or self.size)
        inputs_TD = self._prepare(x_TD)
        ids_TK = np.full((len(x_TD), count), NO_FEATURE, np.int32)
        best_TK = np.zeros((len(x_TD), count), np.float32)
        step = max(1, BLOCK_BYTES // (4 * self.width))
        for begin in range(0, self.size, step):
            block = _FeatureBlock(self, slice(begin, min(begin + step, self.size)))
            for rows in _split(len(x_TD), block.size):
                found_TF = block.activate(inputs_TD[rows])
                _merge(ids_TK[rows], best_TK[rows], found_TF, begin)
        return ids_TK, best_TK

    def _prepare(self, x_TD: Floats) -> Floats:
        with np.errstate(all="ignore"):  # non-finite activations are flagged elsewhere
            x_TD = np.float32(self.scale) * x_TD
            if self.normalization == "layer_norm":
                x_TD = x_TD - x_TD.mean(-1, keepdims=True)
                x_TD /= x_TD.std(-1, keepdims=True, ddof=1) + np.float32(LAYER_NORM_EPS)
            elif self.normalization == "constant_norm_rescale":
                x_TD = x_TD * (self.width**0.5 / np.linalg.norm(x_TD, axis=-1, keepdims=True))
            return x_TD - self.read("b_dec") if self.centres else x_TD


class _FeatureBlock:
    """A block of an encoder's features, with their weights in memory."""

    def __init__(self, encoder: SaeEncoder, own: slice) -> None:
        self.size = own.stop - own.start
        read = encoder.read
        self._weights_DF = read("W_enc", slice(None), own)
        is_gated = encoder.architecture == "gated"
        self._bias_F = read("b_mag" if is_gated else "b_enc", own)
        self._gate_F = read("b_gate", own) if is_gated else None
        self._growth_F: Any = 1.0
        if is_gated:
            self._growth_F = np.exp(read("r_mag", own))
        elif encoder.rescales:
            norms_F = np.linalg.norm(read("W_dec", own), axis=-1)
            self._growth_F, self._bias_F = norms_F, self._bias_F * norms_F
        jumps = encoder.architecture == "jumprelu"
        self._threshold_F = np.maximum(read("threshold", own), 0) if jumps else np.float32(0)

    def activate(self, inputs_TD: Floats) -> Floats:
        """Return the activations [T, F]; 0 for a NaN."""
        with np.errstate(all="ignore"):
            product_TF = inputs_TD @ self._weights_DF
            z_TF = product_TF * self._growth_F + self._bias_F
            is_on_TF = z_TF > self._threshold_F
            if self._gate_F is not None:
                is_on_TF &= product_TF + self._gate_F > 0
        found: Floats = np.where(is_on_TF, z_TF, np.float32(0))
        return found


def _split(count: int, width: int) -> Iterator[slice]:
    """Yield slices of rows, each of at most BLOCK_BYTES."""
    step = max(1, BLOCK_BYTES // (4 * width))
    for begin in range(0, count, step):
        yield slice(begin, begin + step)


def _merge(ids_TK: Ids, best_TK: Floats, found_TF: Floats, first: int) -> None:
    """Merge a block's features, whose ids begin at `first`, into the best so far, in place."""
    count = best_TK.shape[1]
    own = min(count, found_TF.shape[1])
    places_Tk = np.argpartition(-found_TF, own - 1, axis=1)[:, :own]
    all_TC = np.concatenate([best_TK, np.take_along_axis(found_TF, places_Tk, 1)], axis=1)
    all_ids_TC = np.concatenate([ids_TK, (places_Tk + first).astype(np.int32)], axis=1)
    all_ids_TC[all_TC == 0] = NO_FEATURE
    # Ties are in the order of ids.
    order_TK = np.lexsort((all_ids_TC, -all_TC), axis=1)[:, :count]
    best_TK[:] = np.take_along_axis(all_TC, order_TK, 1)
    ids_TK[:] = np.take_along_axis(all_ids_TC, order_TK, 1)

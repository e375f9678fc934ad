"""Attention that shows overflow, and where padding has no effect.

Scores beyond the range of their dtype make attention NaN, and so show that a changed model has
failed. Two ways of computing attention hide that. torch's fused attention on CPUs gives 0 where the
scores of few keys are NaN, and where all are -inf; attention in parts lets a token whose every
score is -inf attend to keys that the mask hides: their scores are the dtype's least number.

In float64 transformers' attention in parts makes NaN of padding in front: its softmax is float32,
in which the mask's least number is -inf. Axis letters: B sequences, H heads, T queries, C keys, S
size of a head.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class CheckedAttention(TorchFunctionMode):
    """A context in which attention is NaN where scores overflow, and 0 for padding.

    `mask_BC` is 0 where a query or key is padding; None: nowhere. Every torch function in the
    context passes through Python: enter it only where it is needed.
    """

    def __init__(self, mask_BC: Tensor | None) -> None:
        super().__init__()
        self._mask_BC = mask_BC

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the function's result, corrected where the function is attention."""
        options = kwargs or {}
        found = func(*args, **options)
        if func is functional.scaled_dot_product_attention:
            return found + _check_scores(*args[:2]).to(found.dtype)
        if func is functional.softmax and found.ndim == 4:
            return self._correct(found, args[0] if args else options["input"])
        return found

    def _correct(self, pattern_BHTC: Tensor, scores_BHTC: Tensor) -> Tensor:
        """Return the pattern with NaN for queries that see nothing finite, 0 for padding."""
        least = torch.finfo(scores_BHTC.dtype).min
        is_lost_BHT1 = scores_BHTC.detach().amax(-1, keepdim=True) <= least / 2
        pattern_BHTC = pattern_BHTC.masked_fill(is_lost_BHT1, torch.nan)
        if self._mask_BC is not None:
            mask_BT = self._mask_BC[:, -pattern_BHTC.shape[2] :].to(pattern_BHTC.device)
            pattern_BHTC = pattern_BHTC.masked_fill(mask_BT[:, None, :, None] == 0, 0)
        return pattern_BHTC


@torch.no_grad()
def _check_scores(queries_BHTS: Tensor, keys_BHCS: Tensor) -> Tensor:
    """Return [B, 1, 1, 1]: NaN for sequences whose scores may overflow by their bound
    S max|q| max|k|, else 0.
    """
    # Fused attention sums scores in float32 at least.
    wide = torch.promote_types(queries_BHTS.dtype, torch.float32)
    query_B111, key_B111 = (
        numbers_BHTS.abs().amax((1, 2, 3), keepdim=True).to(wide)
        for numbers_BHTS in (queries_BHTS, keys_BHCS)
    )
    bound_B111 = queries_BHTS.shape[-1] * query_B111 * key_B111
    return bound_B111 - bound_B111

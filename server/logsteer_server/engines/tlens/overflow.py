"""Attention that shows overflow, and where padding stays without effect.

Scores beyond what their dtype holds make attention NaN, by which a changed model is seen to have
failed. Two ways of computing hide that. torch's fused attention on CPUs gives 0 where the scores of
few keys are NaN, and where all are -inf; attention in parts leaves a token whose every score is
-inf with those that the mask hides, since their scores are the dtype's least number.

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
    """A context in which queries that are padding read nothing in attention in parts.

    With `shows_overflow` attention is NaN wherever scores of what a query sees are not finite.
    `mask_BC` is 0 where a query or key is padding; None: nowhere.
    """

    def __init__(self, mask_BC: Tensor | None, *, shows_overflow: bool) -> None:
        super().__init__()
        self._mask_BC = mask_BC
        self._shows_overflow = shows_overflow

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what the function returns, corrected where it is attention."""
        options = kwargs or {}
        found = func(*args, **options)
        if func is functional.scaled_dot_product_attention and self._shows_overflow:
            return show_overflow(found, *args, **options)
        if func is functional.softmax and found.ndim == 4:
            return self._correct(found, args[0] if args else options["input"])
        return found

    def _correct(self, pattern_BHTC: Tensor, scores_BHTC: Tensor) -> Tensor:
        """Return the pattern with NaN for queries that see nothing finite, 0 for padding."""
        if self._shows_overflow:
            with torch.no_grad():
                least = torch.finfo(scores_BHTC.dtype).min
                is_lost_BHT1 = scores_BHTC.amax(-1, keepdim=True) <= least / 2
            if is_lost_BHT1.any():
                pattern_BHTC = pattern_BHTC.masked_fill(is_lost_BHT1, torch.nan)
        if self._mask_BC is not None:
            mask_BT = self._mask_BC[:, -pattern_BHTC.shape[2] :].to(pattern_BHTC.device)
            pattern_BHTC = pattern_BHTC.masked_fill(mask_BT[:, None, :, None] == 0, 0)
        return pattern_BHTC


def show_overflow(
    read_BHTS: Tensor,
    queries_BHTS: Tensor,
    keys_BHCS: Tensor,
    _: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    **__: Any,
) -> Tensor:
    """Return what `scaled_dot_product_attention` of these gave, NaN where it hides overflow."""
    # Scores are summed in float32 at least; unless a bound on them leaves it, nothing was lost.
    wide = torch.promote_types(queries_BHTS.dtype, torch.float32)
    ends = torch.stack([*torch.aminmax(queries_BHTS), *torch.aminmax(keys_BHCS)]).abs()
    largest_query, largest_key = ends.view(2, 2).amax(1).tolist()
    if queries_BHTS.shape[-1] * largest_query * largest_key <= torch.finfo(wide).max:
        return read_BHTS
    groups = queries_BHTS.shape[1] // keys_BHCS.shape[1]
    keys_BHCS = keys_BHCS.repeat_interleave(groups, 1)
    is_lost_BHTC = ~(queries_BHTS.to(wide) @ keys_BHCS.to(wide).mT).isfinite()
    if is_causal:
        is_lost_BHTC = is_lost_BHTC.tril()
    elif attn_mask is not None:
        least = 0 if attn_mask.dtype == torch.bool else torch.finfo(attn_mask.dtype).min / 2
        is_lost_BHTC = is_lost_BHTC & (attn_mask > least)
    return read_BHTS.masked_fill(is_lost_BHTC.any(-1, keepdim=True), torch.nan)

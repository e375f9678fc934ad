"""Penalties, biases and bans: changes of logits that depend on the tokens before a row.

They are part of a sampling policy and come before its temperature. The definitions are vLLM's, so
that a client may send either server the same request. Axis letters: R rows, V vocabulary, N tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from logsteer_server.contract.jobs import Adjustments


@dataclass(slots=True)
class TokenHistory:
    """The tokens of one sequence on a device: the prompt's distinct ids, and the tokens after it.

    `following_N` has room for all tokens that may follow; a row uses those before it.
    """

    prompt_N: Tensor
    following_N: Tensor

    @classmethod
    def of(cls, prompt: np.ndarray, following: np.ndarray, device: torch.device) -> "TokenHistory":
        """Return the history of these ids."""
        both = (torch.from_numpy(ids.astype(np.int64)) for ids in (np.unique(prompt), following))
        return cls(*(ids.to(device) for ids in both))

    @classmethod
    def begin(cls, prompt: np.ndarray, max_tokens: int, device: torch.device) -> "TokenHistory":
        """Return the history of a prompt that nothing follows yet, at most `max_tokens` tokens."""
        return cls.of(prompt, np.zeros(max_tokens), device)


def place_targets(
    prompt: np.ndarray, targets: np.ndarray, shares_row: bool, device: torch.device
) -> list[tuple[TokenHistory, int]]:
    """Return, for each target of a score job, its history and its number of tokens after the
    prompt.
    """
    history = TokenHistory.of(prompt, targets, device)
    return [(history, 0 if shares_row else row) for row in range(len(targets))]


def adjust_rows(
    logits_RV: Tensor,
    adjustments: Sequence[Adjustments],
    histories: Sequence[TokenHistory],
    counts: Sequence[int],
) -> Tensor:
    """Return logits with each row's adjustments; `counts`: its tokens after the prompt so far.

    First, logits of banned tokens are set to minus infinity, and biases are added. Then the logit
    of each token in the prompt or after it is divided by the repetition penalty if positive, and
    else multiplied by it. Last, for a token after the prompt, the frequency penalty is subtracted
    once per occurrence, and the presence penalty once.
    """
    adjusted_RV = logits_RV.clone()
    following = [one.following_N[:count] for one, count in zip(histories, counts, strict=True)]
    for row, (own, following_N) in enumerate(zip(adjustments, following, strict=True)):
        _ban(adjusted_RV[row], own, following_N)
    if any(own.has_penalty for own in adjustments):
        times_RV = _count(following, adjusted_RV)
        seen_RV = (times_RV > 0) | (_count([one.prompt_N for one in histories], adjusted_RV) > 0)
        numbers = [(own.repetition, own.frequency, own.presence) for own in adjustments]
        repetition_R1, frequency_R1, presence_R1 = adjusted_RV.new_tensor(numbers).T[..., None]
        factor_RV = torch.where(adjusted_RV > 0, 1 / repetition_R1, repetition_R1)
        adjusted_RV = torch.where(seen_RV, adjusted_RV * factor_RV, adjusted_RV)
        adjusted_RV -= frequency_R1 * times_RV + presence_R1 * (times_RV > 0)
    return adjusted_RV


def _count(ids: Sequence[Tensor], like_RV: Tensor) -> Tensor:
    """Count each token's occurrences in each row's ids [R, V]."""
    rows, size = like_RV.shape
    padded_RN = pad_sequence(list(ids), batch_first=True, padding_value=size)
    times_RW = like_RV.new_zeros((rows, size + 1))
    padded_RN = padded_RN.to(like_RV.device)
    one = like_RV.new_ones(()).expand(padded_RN.shape)
    return times_RW.scatter_add_(1, padded_RN, one)[:, :size]


def _ban(logits_V: Tensor, own: Adjustments, following_N: Tensor) -> None:
    """Set the logits of banned tokens to minus infinity, and add biases, in place."""
    if own.allowed is not None:
        allowed = list(own.allowed)
        kept_V = torch.full_like(logits_V, -torch.inf)
        kept_V[allowed] = logits_V[allowed]
        logits_V.copy_(kept_V)
    if len(following_N) < own.min_tokens:
        logits_V[list(own.end_ids)] = -torch.inf
    for *front, last in own.bad_words:
        if len(front) > len(following_N):
            continue
        matches = following_N[len(following_N) - len(front) :] == following_N.new_tensor(front)
        matches = matches.all().to(logits_V.device)
        logits_V[last] = torch.where(matches, -torch.inf, logits_V[last])
    if own.bias:
        ids, values = zip(*own.bias, strict=True)
        logits_V[list(ids)] += logits_V.new_tensor(values)

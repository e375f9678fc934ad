"""Keys and values of a batch of continuations, in memory that has room for those to come.

All rows end in the same column, and shorter ones have padding in front: so rows may leave, and
those of another batch may join, whatever their lengths. Axis letters: B rows, H heads, T columns,
D head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

ROOM = 64
"""Columns that a layer gets beyond those it needs, at least; it gets half as many again."""


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A layer whose keys and values are written behind one another, and copied only to get room.

    `keys` and `values` [B, H, T, D] are views of memory with more columns.
    """

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._rooms: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the columns, and return all keys and values."""
        before = self.get_seq_length()
        end = before + key_states.shape[-2]
        if self._rooms is None or end > self._rooms[0].shape[-2]:
            self._rooms = self._make_room(key_states, end), self._make_room(value_states, end)
            if before:
                self._rooms[0][:, :, :before] = self.keys
                self._rooms[1][:, :, :before] = self.values
        keys, values = self._rooms
        keys[:, :, before:end] = key_states
        values[:, :, before:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        self.is_initialized = True
        return self.keys, self.values

    def _make_room(self, states: Tensor, columns: int) -> Tensor:
        batch, heads, _, size = states.shape
        self.dtype, self.device = states.dtype, states.device
        return states.new_empty(batch, heads, columns + max(ROOM, columns // 2), size)

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Have these as keys and values from now on."""
        self._rooms = None
        self.keys, self.values = keys, values


PLAIN_LAYERS = (RoomyLayer, DynamicSlidingWindowLayer)
"""Kinds of layers whose rows can be padded in front."""


class RowCache(DynamicCache):  # type: ignore[misc]
    """The keys and values of rows that all end in the same column."""

    layers: list[Any]

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.layers = [
            RoomyLayer() if type(layer) is DynamicLayer else layer for layer in self.layers
        ]

    def select(self, rows: Sequence[int], cut: int) -> None:
        """Have these rows, which may repeat, without their first `cut` columns, all padding."""
        rows_B = torch.tensor(rows)
        for layer in self._filled_layers():
            columns = layer.get_seq_length() - cut
            kept = min(columns, layer.keys.shape[-2])
            own_B = rows_B.to(layer.keys.device)
            keys, values = (states[own_B, :, -kept:] for states in (layer.keys, layer.values))
            _replace(layer, keys, values, columns)

    def absorb(self, other: "RowCache") -> None:
        """Take the rows of another cache in, behind its own; the shorter ones are padded in front.

        Where memory runs out, nothing has changed.
        """
        joined: list[tuple[Any, Tensor, Tensor, int]] = []
        for own, new in zip(self._filled_layers(), other._filled_layers(), strict=True):
            keys, values = _join(own.keys, new.keys), _join(own.values, new.values)
            joined.append((own, keys, values, max(own.get_seq_length(), new.get_seq_length())))
        for layer, keys, values, columns in joined:
            _replace(layer, keys, values, columns)

    def _filled_layers(self) -> list[Any]:
        return [layer for layer in self.layers if layer.get_seq_length()]


def _join(own: Tensor, new: Tensor) -> Tensor:
    """Return the rows of both, padded in front to the columns of the longer."""
    width = max(own.shape[-2], new.shape[-2])
    padded = (pad(states, (0, 0, width - states.shape[-2], 0)) for states in (own, new))
    return torch.cat(list(padded))


def _replace(layer: Any, keys: Tensor, values: Tensor, columns: int) -> None:
    """Have a layer hold these keys and values, the last of so many columns."""
    if isinstance(layer, RoomyLayer):
        layer.replace(keys, values)
    else:  # of a sliding window, which holds the last columns alone
        layer.keys, layer.values, layer.cumulative_length = keys, values, columns

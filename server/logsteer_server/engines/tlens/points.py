"""Hook points: the activations of each layer that can be steered and captured, and the tokens of
a forward pass, which steering, probes and captures choose from.

A bridge's points are found by experiment: two short sequences go through the model, and a point
counts if it fires with one activation per token that the logits depend on. Axis letters: B rows, T
columns, N tokens of a pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from logsteer_server.contract.jobs import JobFailure

SHORT_NAMES = {
    "resid_pre": "hook_resid_pre",
    "resid_mid": "hook_resid_mid",
    "resid_post": "hook_resid_post",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
}
"""Names of activations in every engine, and the bridge's names for them."""

RECOMPUTING = (".hook_normalized", ".hook_scale")
"""Points to leave alone: a hook on them makes the bridge compute every row by another formula."""

PROBE_LENGTH = 23
"""Tokens of a test sequence: as many as no model has heads, so that an axis of 23 is of tokens."""

HOOK_LEVEL = 1001
"""The level under which hooks are added, by which they are removed again."""

HookFunction = Callable[..., Tensor | None]

Integers = npt.NDArray[np.int64]


class RefusedJobError(Exception):
    """A job does not fit the model; `failure` is its result."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.failure = JobFailure(code, detail)


@dataclass(frozen=True, slots=True)
class Point:
    """One activation, [B, T, *shape]; `key` is the same for all names of the activation.

    Activations with a smaller `order` come earlier in a forward pass. `is_shared`: the residual
    stream, which also bypasses the hooked module.
    """

    layer: int
    key: str
    hook: Any
    shape: tuple[int, ...]
    order: int
    is_shared: bool = False

    @property
    def width(self) -> int:
        """Numbers per token, over all heads."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class BlockEdge:
    """The residual stream where it enters or leaves a block."""

    name: str
    block: nn.Module
    enters: bool

    def attach(self, function: HookFunction) -> RemovableHandle:
        """Call a function on it until the handle is removed."""
        if self.enters:
            change = partial(self._change_input, function)
            return self.block.register_forward_pre_hook(change, with_kwargs=True)
        return self.block.register_forward_hook(partial(self._change_output, function))

    def _change_input(
        self, function: HookFunction, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._apply(function, args[0]), *args[1:]), options
        changed = self._apply(function, options["hidden_states"])
        return args, options | {"hidden_states": changed}

    def _change_output(self, function: HookFunction, _: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._apply(function, output[0]), *output[1:])
        return self._apply(function, output)

    def _apply(self, function: HookFunction, stream: Tensor) -> Tensor:
        changed = function(stream, hook=self)
        return stream if changed is None else changed


def act_on_stream(function: HookFunction) -> HookFunction:
    """Return a hook that writes another's result into the activation itself.

    The bridge's hook_resid_mid is the input of the MLP's norm: a new tensor would change the MLP's
    input and not the residual stream.
    """

    def act(activation: Tensor, hook: Any) -> Tensor | None:
        changed = function(activation, hook)
        return None if changed is None else activation.copy_(changed)

    return act


class PointMap:
    """The points of each layer by short name or by the bridge's name."""

    def __init__(self, layers: list[dict[str, Point]]) -> None:
        self._layers = layers

    @property
    def names(self) -> tuple[str, ...]:
        """The names that every layer has, the short ones first."""
        shared = [n for n in self._layers[0] if all(n in layer for layer in self._layers)]
        short = [name for name in SHORT_NAMES if name in shared]
        hidden = {*SHORT_NAMES, *SHORT_NAMES.values()}
        return (*short, *(name for name in shared if name not in hidden))

    def list_widths(self, hidden_size: int) -> dict[str, int]:
        """Return the largest width of each activation that is not `hidden_size` wide."""
        widths = {name: max(layer[name].width for layer in self._layers) for name in self.names}
        return {name: width for name, width in widths.items() if width != hidden_size}

    def find(self, layer: int, name: str) -> Point:
        """Return the point of that name. Errors: RefusedJobError for an unknown name."""
        if not 0 <= layer < len(self._layers):
            detail = f"there is no layer {layer}; the model's are 0 to {len(self._layers) - 1}"
            raise RefusedJobError("invalid_request", detail)
        point = self._layers[layer].get(name.removeprefix(f"blocks.{layer}."))
        if point is None:
            known = ", ".join(self.names)
            detail = f"layer {layer} has no activation {name!r} to change or read; it has {known}"
            raise RefusedJobError("unsupported_by_engine", detail)
        return point


def find_points(
    hooks: Mapping[str, Any], num_layers: int, probe: Callable[[int], Tensor]
) -> PointMap:
    """Return the useful points among a bridge's hooks.

    `probe(length)` runs two sequences of that length and returns a number that depends on them.
    """
    hooks = {name: hook for name, hook in hooks.items() if not name.endswith(RECOMPUTING)}
    named = {id(hook): hook for name, hook in hooks.items() if name.startswith("blocks.")}
    added: dict[int, Tensor] = {}  # in the order of the forward pass

    def add_zeros(activation: Tensor, hook: Any) -> Tensor | None:
        if not isinstance(activation, Tensor) or not activation.is_floating_point():
            return None
        added[id(hook)] = torch.zeros_like(activation, requires_grad=True)
        return activation + added[id(hook)]

    try:
        for hook in named.values():
            hook.add_hook(add_zeros, level=HOOK_LEVEL)
        with torch.enable_grad():
            probe(PROBE_LENGTH).backward()  # type: ignore[no-untyped-call]
    finally:
        for hook in named.values():
            hook.remove_hooks("fwd", level=HOOK_LEVEL)
    found: dict[int, tuple[int, tuple[int, ...]]] = {
        i: (order, tuple(zeros.shape[2:]))
        for order, (i, zeros) in enumerate(added.items())
        if zeros.shape[:2] == (2, PROBE_LENGTH) and zeros.ndim > 2
        if zeros.grad is not None and bool((zeros.grad != 0).any())
    }
    layers: list[dict[str, Point]] = []
    for layer in range(num_layers):
        prefix = f"blocks.{layer}."
        points: dict[str, Point] = {}
        for name, hook in hooks.items():
            if name.startswith(prefix) and id(hook) in found:
                order, shape = found[id(hook)]
                own = name.removeprefix(prefix)
                is_shared = own == SHORT_NAMES["resid_mid"]
                points[own] = Point(layer, str(hook.name or name), hook, shape, order, is_shared)
        points |= {s: points[full] for s, full in SHORT_NAMES.items() if full in points}
        layers.append(points)
    return PointMap(layers)


@dataclass(frozen=True, slots=True)
class PassTokens:
    """The tokens that a forward pass [B, T] reads, row by row, without its padding.

    `place_N` counts columns across the rows; `position_N` counts a sequence's tokens. Row b has the
    tokens from `starts[b]` up to `starts[b + 1]`. Prompts of 2 and 4 tokens, padded on the left,

        column    0    1    2    3
        row 0     pad  pad  0    1
        row 1     0    1    2    3

    have places 2, 3, 4, 5, 6, 7, positions 0, 1, 0, 1, 2, 3, and starts 0, 2, 6.
    """

    place_N: Integers
    position_N: Integers
    starts: list[int]

    @classmethod
    def of(cls, first_B: Integers, end_B: Integers, num_columns: int) -> "PassTokens":
        """Return the tokens of rows whose column 0 has position `first_B`, below 0 for padding, and
        whose sequences end before position `end_B`.
        """
        position_BT = first_B[:, None] + np.arange(num_columns)
        is_token_BT = (position_BT >= 0) & (position_BT < end_B[:, None])
        place_N = np.flatnonzero(is_token_BT)
        starts = [0, *is_token_BT.sum(1).cumsum().tolist()]
        return cls(place_N, position_BT.ravel()[place_N], starts)

    def of_row(self, row: int) -> slice:
        """Return where a row's tokens are among N."""
        return slice(self.starts[row], self.starts[row + 1])

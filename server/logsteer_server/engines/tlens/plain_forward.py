"""The plain forward: a bridged model's body without the bridge's components where no hook is set.

The bridge puts several Python calls around each of transformers' modules, which for one new token
cost more than the arithmetic. A block without hooks is the same block without them.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.generalized_components.block import BlockBridge

from logsteer_server.engines.tlens.placement import bring_inputs
from logsteer_server.engines.tlens.points import Point


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module with transformers' modules in the bridge's places, parameters shared."""
    if isinstance(module, GeneralizedComponent):
        original = module.original_component
        if original is None:
            raise ValueError(f"{type(module).__name__} stands for no module of transformers")
        return unwrap(original)
    plain = copy.copy(module)
    plain.__dict__["_modules"] = {
        name: child and unwrap(child) for name, child in module._modules.items()
    }
    plain.__dict__["_forward_pre_hooks"] = module._forward_pre_hooks.copy()
    plain.__dict__["_forward_pre_hooks_with_kwargs"] = module._forward_pre_hooks_with_kwargs.copy()
    # A forward of the instance runs the original: accelerate's, or one that the bridge has put in.
    forward = plain.__dict__.pop("forward", None)
    if isinstance(forward, MethodType):
        plain.__dict__["forward"] = MethodType(forward.__func__, plain)
    bring_inputs(plain, module)
    return plain


class PlainForward:
    """A model's body whose blocks are bridged only where hooks need it.

    A block with a hook inside is the bridge's own. One that is hooked only where the residual
    stream enters or leaves it is transformers' block between two hook points. Of five blocks with
    hooks on resid_post of layer 1 and mlp_out of layer 3, `bridge` makes these

        0 transformers'   1 transformers' + hooks   2 transformers'   3 bridged   4 transformers'

    `is_plain`: whether no block is bridged now. `plain_blocks`: those of transformers.
    Errors: ValueError where the body has no list of the bridge's blocks.
    """

    def __init__(self, body: nn.Module, blocks: Sequence[Any]) -> None:
        self.body = unwrap(body)
        names = [
            name
            for name, module in body.named_modules()
            if isinstance(module, nn.ModuleList)
            and len(module) == len(blocks)
            and all(a is b for a, b in zip(module, blocks, strict=True))
        ]
        if not names:
            raise ValueError("the body does not hold the bridge's blocks")
        self._layers = cast(nn.ModuleList, self.body.get_submodule(names[0]))
        self.plain_blocks: list[nn.Module] = list(self._layers)
        self._bridged = list(blocks)
        # A kind of block with a forward of its own may do more at its edges.
        self._hooked = [
            _HookedBlock(block, plain) if type(block).forward is BlockBridge.forward else block
            for block, plain in zip(blocks, self.plain_blocks, strict=True)
        ]
        self.is_plain = True

    def bridge(self, points: Sequence[Point]) -> None:
        """Make hooks on these points act, and leave the other blocks plain."""
        self.is_plain = self.stays_plain(points)
        layers = list(self.plain_blocks)
        for point in sorted(points, key=lambda point: not point.is_edge):
            blocks = self._hooked if point.is_edge else self._bridged
            layers[point.layer] = blocks[point.layer]
        for index, layer in enumerate(layers):
            self._layers._modules[str(index)] = layer

    @contextmanager
    def widened(self) -> Iterator[list["WideBlock"]]:
        """Compute all blocks in float32, one at a time, in every call of the body in this context.

        A block's parameters are widened for as long as its call takes.
        """
        blocks = [WideBlock(plain) for plain in self.plain_blocks]
        try:
            for index, block in enumerate(blocks):
                self._layers._modules[str(index)] = block
            yield blocks
        finally:
            self.bridge([])

    def stays_plain(self, points: Sequence[Point]) -> bool:
        """Return whether no hook on these points needs a bridged block."""
        return all(p.is_edge and isinstance(self._hooked[p.layer], _HookedBlock) for p in points)


class _BlockAround(nn.Module):
    """A block that stands in a plain block's place and runs it."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the plain block too: a body asks for its kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("plain"), name)


class _HookedBlock(_BlockAround):
    """A plain block between the two hook points of the bridge's block."""

    def __init__(self, block: Any, plain: nn.Module) -> None:
        super().__init__(plain)
        self.hook_in, self.hook_out = block.hook_in, block.hook_out

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Return the block's output, its hidden states hooked."""
        output = self.plain(self.hook_in(hidden_states), *args, **options)
        if isinstance(output, tuple):
            return (self.hook_out(output[0]), *output[1:])
        return self.hook_out(output)


class WideBlock(_BlockAround):
    """A plain block computed in float32 at least, on the input of its first call in every call.

    So what differs between the calls' `outputs` is how they were computed, and not rounding, which
    in half precision hides much.
    """

    def __init__(self, plain: nn.Module) -> None:
        super().__init__(plain)
        self.outputs: list[torch.Tensor] = []
        self._given: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Return the block's output, in the dtype of its input."""
        if self._given is None:
            self._given = _widen(hidden_states)
        tensors = {**dict(self.plain.named_parameters()), **dict(self.plain.named_buffers())}
        tensors, args, options = tree_map_only(torch.Tensor, _widen, (tensors, args, options))
        output = torch.func.functional_call(self.plain, tensors, (self._given, *args), options)
        first: torch.Tensor = output[0] if isinstance(output, tuple) else output
        self.outputs.append(first)
        narrow = first.to(hidden_states.dtype)
        return (narrow, *output[1:]) if isinstance(output, tuple) else narrow


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def agree(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Return whether two tensors differ by at most the tolerance times the largest number."""
    a, b = a.float(), b.float()
    return bool((a - b).abs().max() <= tolerance * b.abs().max())

"""Devices that are pretended: tensors on the CPU that say they are elsewhere, and do not mix.

So a model can be spread over several devices, by accelerate and with its hooks, on a machine that
has none; numbers are the CPU's. An operation on tensors of two devices raises, as on GPUs.

    lazy:0 + lazy:1     RuntimeError
    lazy:0 + cpu        RuntimeError, but for a CPU's tensor without axes, or one that is an index
    x.to("lazy:1")      x there
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import modeling_utils
from transformers.integrations.accelerate import infer_auto_device_map

from logsteer_server.engines.tlens import model

KIND = "lazy"
"""A kind of device that torch knows without support for it, and runs backward passes for."""

_CPU = torch.device("cpu")
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class PlacedTensor(Tensor):
    """A tensor on a pretended device; `inner` has its numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> "PlacedTensor":
        # In inference mode torch gives no view of such a tensor a place among the views.
        with torch.inference_mode(False):
            placed = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=device,
            )
        placed.inner = inner
        return placed

    def data_ptr(self) -> int:
        """Return the address of the numbers, by which accelerate knows shared parameters."""
        return self.inner.data_ptr()

    def __repr__(self) -> str:
        return f"PlacedTensor({self.inner!r}, {self.device})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})


class _Pretence(TorchDispatchMode):
    """Makes new tensors where they are asked for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})


class _TensorFactory(TorchFunctionMode):
    """Has what makes tensors without asking the other mode do it on pretended devices, too."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.tensor and _is_pretended(device):
            return func(*args, **kwargs | {"device": _CPU}).to(device)
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            indices = [torch.tensor(i) if isinstance(i, list) else i for i in args[1]]
            return func(args[0], tuple(indices))
        if func is Tensor.tolist and isinstance(args[0], PlacedTensor):
            return args[0].inner.tolist()
        return func(*args, **kwargs)


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    # In inference mode, operations made of others come here whole.
    with _Pretence():
        result = func.decompose(*args, **kwargs)
    if result is not NotImplemented:
        return result
    device = _find_device(func, args, kwargs)
    if _is_pretended(kwargs.get("device")):
        kwargs = kwargs | {"device": _CPU}
    args, kwargs = tree_map_only(PlacedTensor, lambda tensor: tensor.inner, (args, kwargs))
    result = func(*args, **kwargs)
    if device.type != KIND:
        return result
    return tree_map_only(Tensor, lambda tensor: PlacedTensor(tensor, device), result)


def _is_pretended(device: Any) -> bool:
    return device is not None and torch.device(device).type == KIND


def _find_device(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device:
    """Return where an operation's result is. Errors: RuntimeError where devices are mixed."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not tensors:
        return _CPU
    name = func._schema.name
    if name in ("aten::copy_", "aten::_to_copy"):
        return tensors[0].device
    devices = {tensor.device for tensor in tensors if tensor.dim()}
    if name in _INDEXING:
        devices -= {_CPU}
    elif not devices:
        devices = {tensor.device for tensor in tensors} - {_CPU}
    if len(devices) > 1:
        raise RuntimeError(f"{name}: tensors are on {sorted(map(str, devices))}")
    return next(iter(devices), tensors[0].device)


@contextmanager
def pretend(count: int) -> Iterator[None]:
    """Have GPUs be pretended devices: everything with models on them belongs in the context."""

    def spread(causal: Any, *_: Any) -> dict[str, str]:
        """Return the device of each part, as accelerate finds it for GPUs of little memory."""
        blocks = [m for m in causal.modules() if type(m).__name__ in causal._no_split_modules]
        whole, block = (sum(p.nbytes for p in m.parameters()) for m in (causal, blocks[0]))
        memory = dict.fromkeys(range(count - 1), whole // count + block) | {count - 1: 2**60}
        places = infer_auto_device_map(causal, memory, causal._no_split_modules)
        return {name: f"{KIND}:{place}" for name, place in places.items()}

    with pytest.MonkeyPatch.context() as patch, _Pretence(), _TensorFactory():
        patch.setattr(torch.cuda, "device_count", lambda: count)
        patch.setattr(model, "place_model", lambda spec: "balanced")
        patch.setattr(modeling_utils, "_get_device_map", spread)
        # The pretence holds in this thread.
        patch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
        yield

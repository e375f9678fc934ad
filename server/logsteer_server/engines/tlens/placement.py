"""Placement of a model on one device, or of its blocks on several GPUs.

Each GPU holds consecutive blocks, and the first one also embeddings, final norm, head and
positions. So tied parameters have one place, and inputs and outputs are on one device for any
number of GPUs. Accelerate places the weights, and has each module of transformers move its inputs
to its own device; here the bridge's modules do so, too.
"""

import copy
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.engines.machine import show_devices


def place_model(spec: EngineSpec) -> tuple[str, ...]:
    """Return the devices of a model, in the order of its blocks.

    GPUs are chosen by CUDA_VISIBLE_DEVICES, which counts only until CUDA is first used. Errors:
    ValueError where the specification asks for what cannot be.
    """
    if spec.tensor_parallel > 1:
        raise ValueError("transformer_lens spreads layers, not tensors: set pipeline_parallel")
    num_gpus = spec.pipeline_parallel
    if spec.devices == "cpu":
        if num_gpus > 1:
            raise ValueError("pipeline_parallel spreads layers over GPUs; leave it out for a CPU")
        return ("cpu",)
    if not isinstance(spec.devices, str):
        if num_gpus not in (1, len(spec.devices)):
            raise ValueError(f"pipeline_parallel is {num_gpus}, devices {list(spec.devices)}")
        show_devices(spec.devices)
        num_gpus = len(spec.devices)
    found = torch.cuda.device_count()
    if not found and isinstance(spec.devices, str) and num_gpus == 1:
        return ("cpu",)
    if found < num_gpus:
        raise ValueError(f"devices: {num_gpus} GPUs are wanted, and {found} are here")
    return tuple(f"cuda:{index}" for index in range(num_gpus))


def load_options(devices: Sequence[str], config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return the bridge's options for loading a model on these devices."""
    if len(devices) == 1:
        return {"device": devices[0]}
    free = [measure_free_bytes(device) for device in devices]
    return {"device_map": spread_blocks(_sketch(config, dtype), devices, free)}


def measure_free_bytes(device: str) -> int:
    """Return a GPU's free memory."""
    return torch.cuda.mem_get_info(device)[0]


def spread_blocks(
    model: nn.Module, devices: Sequence[str], free_bytes: Sequence[int]
) -> dict[str, str]:
    """Return the device of each part of a model, by name: an equal share of each one's free memory.

    A block goes where its middle falls. Embeddings of 3 bytes and 6 blocks of 2, over two devices
    with equally much free memory, whose shares end at 7.5 and 15, are spread as

        embeddings 0-3    first     blocks 0, 1   3-5-7      first
        block 2    7-9    second    blocks 3-5    9-11-13-15 second

    Errors: ValueError where no list of blocks is found.
    """
    prefix, blocks = find_blocks(model)
    sizes = [_count_bytes(block) for block in blocks]
    ends = list(accumulate(sizes, initial=_count_bytes(model) - sum(sizes)))
    shares = [share * ends[-1] / sum(free_bytes) for share in accumulate(free_bytes)]
    found = dict.fromkeys(_name_the_rest(model, prefix), devices[0])
    for index, (end, size) in enumerate(zip(ends[1:], sizes, strict=True)):
        place = min(bisect(shares, end - size / 2), len(devices) - 1)
        found[f"{prefix}.{index}"] = devices[place]
    return found


def follow_devices(causal: nn.Module) -> None:
    """Have the bridge's modules move their inputs to the devices of the modules they wrap.

    Some use the weights of transformers' module without calling its forward, so that accelerate's
    hook does not run. On one device there are no such hooks, and nothing changes.
    """
    for module in causal.modules():
        if isinstance(module, GeneralizedComponent) and module.original_component is not None:
            bring_inputs(module, module.original_component)


def bring_inputs(module: nn.Module, placed: nn.Module) -> None:
    """Have a module move its inputs to the device on which accelerate has placed another one.

    Accelerate places each part that `spread_blocks` names, as a whole.
    """
    hook = getattr(placed, "_hf_hook", None)
    if hook is None or not hook.place_submodules:
        return

    def bring(_: nn.Module, args: Any, options: Any) -> Any:
        return hook.pre_forward(placed, *args, **options)

    module.register_forward_pre_hook(bring, with_kwargs=True)


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
    for hooks in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks"):
        plain.__dict__[hooks] = module.__dict__[hooks].copy()
    # A forward of the instance runs the original: accelerate's, or one that the bridge has put in.
    forward = plain.__dict__.pop("forward", None)
    if isinstance(forward, MethodType):
        plain.__dict__["forward"] = MethodType(forward.__func__, plain)
    bring_inputs(plain, module)
    return plain


def _sketch(config: Any, dtype: torch.dtype) -> nn.Module:
    """Return the model that the bridge will load, on the meta device."""
    from transformer_lens.model_bridge.sources.transformers.helpers import (
        get_hf_model_class_for_architecture,
    )

    architecture = (config.architectures or [""])[0]
    with torch.device("meta"):
        model = get_hf_model_class_for_architecture(architecture).from_config(config, dtype=dtype)
    model.tie_weights()
    sketch: nn.Module = model
    return sketch


def find_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of a language model's blocks."""
    decoder = model.get_decoder()
    count = model.config.get_text_config().num_hidden_layers
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return f"{prefix}.{name}".strip("."), module
    raise ValueError(
        f"{type(model).__name__}: no list of {count} layers, to hook or to spread over GPUs; "
        "serve it with vllm"
    )


def _name_the_rest(model: nn.Module, prefix: str) -> list[str]:
    """Return names that cover a model except the list of this name and its parents."""
    names = []
    module, path = model, ""
    for step in prefix.split("."):
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        children = [name for name, child in module.named_children() if name != step]
        names += [path + name for name in [*(name for name, _ in tensors), *children]]
        module, path = module.get_submodule(step), f"{path}{step}."
    return names


def _count_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())

"""Placement of a model on one device, or of its blocks on several GPUs.

Accelerate spreads the weights evenly over the GPUs, and has each module of transformers move its
inputs to its own device; here the bridge's modules do so, too.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.engines.machine import show_devices


def place_model(spec: EngineSpec) -> str:
    """Return the `device_map` of a model: a device, or `balanced` for several GPUs.

    GPUs are chosen by CUDA_VISIBLE_DEVICES, which counts only until CUDA is first used. Errors:
    ValueError where the specification asks for what cannot be.
    """
    if spec.tensor_parallel > 1:
        raise ValueError("transformer_lens spreads layers, not tensors: set pipeline_parallel")
    num_gpus = spec.pipeline_parallel
    if spec.devices == "cpu":
        if num_gpus > 1:
            raise ValueError("pipeline_parallel spreads layers over GPUs; leave it out for a CPU")
        return "cpu"
    if not isinstance(spec.devices, str):
        if num_gpus not in (1, len(spec.devices)):
            raise ValueError(f"pipeline_parallel is {num_gpus}, devices {list(spec.devices)}")
        num_gpus = len(spec.devices)
    if isinstance(spec.devices, str) and num_gpus == 1:
        return "cuda:0" if torch.cuda.device_count() else "cpu"
    show_devices(range(num_gpus) if isinstance(spec.devices, str) else spec.devices)
    if (found := torch.cuda.device_count()) < num_gpus:
        raise ValueError(f"devices: {num_gpus} GPUs are wanted, and {found} are here")
    return "balanced" if num_gpus > 1 else "cuda:0"


def copy_modules(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose modules have the dictionaries of the original's tensors.

    So the copy takes no memory, and a tensor replaced in one of them is replaced in both.
    """
    own = [d for module in model.modules() for d in (module._parameters, module._buffers)]
    return copy.deepcopy(model, {id(tensors): tensors for tensors in own})


def follow_devices(causal: nn.Module) -> None:
    """Have the bridge's modules move their inputs to the devices of the modules they wrap.

    Some use the weights of transformers' module without calling its forward, so that accelerate's
    hook does not run. On one device there are no such hooks, and nothing changes.
    """
    for module in causal.modules():
        if isinstance(module, GeneralizedComponent) and module.original_component is not None:
            _bring_inputs(module, module.original_component)


def _bring_inputs(module: nn.Module, placed: nn.Module) -> None:
    """Have a module move its inputs to the device on which accelerate has placed another one."""
    hook = getattr(placed, "_hf_hook", None)
    if hook is None or not hook.place_submodules:
        return

    def bring(_: nn.Module, args: Any, options: Any) -> Any:
        return hook.pre_forward(placed, *args, **options)

    module.register_forward_pre_hook(bring, with_kwargs=True)


def find_blocks(model: Any) -> nn.ModuleList:
    """Return the list of a language model's blocks. Errors: ValueError where there is none."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(model).__name__}: no list of {count} layers to hook; serve it with vllm"
    )

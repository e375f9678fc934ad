"""Tries the kernels for quantised layers on this CPU and prints what they gave, as JSON.

A process of its own, because oneDNN reads `ONEDNN_MAX_CPU_ISA` once, and vLLM leaves none clean.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear import (
    Int8ScaledMMLinearLayerConfig,
    MPLinearLayerConfig,
    choose_mp_linear_kernel,
    init_int8_linear_kernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from logsteer_server.engines.vllm import cpu_kernels
from tests.probes import finish

WIDTHS = [400, 200]
"""Rows of two layers that vLLM makes one of: more than a block of ours together."""
K = 2500


def make_layer(config: Int8ScaledMMLinearLayerConfig) -> Any:
    """A layer with random weights, as a checkpoint gives it."""
    torch.manual_seed(1)
    layer: Any = nn.Module()
    layer.logical_widths = WIDTHS
    scale = 1e-4 + torch.rand(sum(WIDTHS) if config.is_channelwise else len(WIDTHS)) / 1000
    has_zero = config.is_static_input_scheme and not config.input_symmetric
    tensors = {
        "weight": torch.randint(-128, 128, (sum(WIDTHS), K), dtype=torch.int8),
        "weight_scale": scale[:, None] if config.is_channelwise else scale,
        "input_scale": torch.tensor([0.03]) if config.is_static_input_scheme else None,
        "input_zero_point": torch.tensor([-17], dtype=torch.int8) if has_zero else None,
        "azp_adj": None,
    }
    for name, tensor in tensors.items():
        parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, parameter)
    return layer


def compare(config: Int8ScaledMMLinearLayerConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What our kernel and vLLM's make of a layer: their errors, in the largest output."""
    torch.set_default_dtype(torch.float32)
    layer, vllm_layer = make_layer(config), make_layer(config)
    weight_NK = layer.weight.long()
    torch.set_default_dtype(dtype)
    kernel = init_int8_linear_kernel(
        config.is_channelwise, config.is_static_input_scheme, config.input_symmetric, "probe"
    )
    vllm_kernel = CPUInt8ScaledMMLinearKernel(config, kernel.layer_param_names)
    kernel.process_weights_after_loading(layer)
    vllm_kernel.process_weights_for_onednn(vllm_layer)
    x, bias = torch.randn(2, 5, K), torch.randn(sum(WIDTHS))
    x[0, 0] = 10 * x[0, 0].abs()
    codes, scale, zero = ops.onednn_scaled_int8_quant(
        x.view(-1, K), layer.input_scale, layer.input_zero_point, config.input_symmetric
    )
    shifted = codes.long() - (0 if zero is None else zero.long())
    rescaled = (shifted @ weight_NK.T).double() * scale.double()
    wanted = (rescaled * layer.weight_scale.double().view(-1) + bias.double()).view(2, 5, -1)

    def error(found: Tensor) -> float:
        assert found.dtype == dtype
        return float((found.double() - wanted).abs().max() / wanted.abs().max())

    return {
        "products": layer.int8_products,
        "error": error(kernel.apply_weights(layer, x, bias)),
        "vllm_error": error(vllm_kernel._apply_weights_onednn(vllm_layer, x, bias)),
    }


def is_exact() -> bool:
    """Whether the products in blocks are those of integers, the largest of which float32 rounds."""
    x = torch.randint(-128, 128, (3, K), dtype=torch.int8)
    weight = torch.randint(-128, 128, (sum(WIDTHS), K), dtype=torch.int8)
    x[0] = weight[0] = -128
    return torch.equal(
        torch.ops.logsteer.multiply_int8(x, weight), (x.long() @ weight.long().T).float()
    )


def refusal_of_float32() -> str:
    """What is said to weights of 4 bits in float32."""
    config = MPLinearLayerConfig(
        full_weight_shape=(128, 128),
        partition_weight_shape=(128, 128),
        weight_type=scalar_types.uint4b8,
        act_type=torch.float32,
        group_size=32,
        zero_points=False,
    )
    try:
        return choose_mp_linear_kernel(config).__name__
    except ValueError as error:
        return str(error)


def main() -> None:
    """Compare all configurations and print the numbers."""
    current_platform.import_kernels()
    cpu_kernels.install_kernels()
    flags = itertools.product((False, True), repeat=3)
    configs = [Int8ScaledMMLinearLayerConfig(*given) for given in flags]
    layers = [
        {"dtype": str(dtype), **vars(config), **compare(config, dtype)}
        for dtype in (torch.float32, torch.bfloat16)
        for config in configs
    ]
    finish({"layers": layers, "is_exact": is_exact(), "float32": refusal_of_float32()})


if __name__ == "__main__":
    main()

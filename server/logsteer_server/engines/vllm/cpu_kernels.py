"""Corrected kernels for quantised layers on CPUs.

INT8: on a CPU without VNNI, oneDNN adds pairs of products of 8-bit integers in 16 bits, which
saturate: activations are shifted by 128, so that 255 * 127 + 255 * 127 = 64770 becomes 32767. The
kernel here tests vLLM's at load with the layer's configuration. If its products are wrong, it
computes them in float32, exactly.

4 bits: vLLM's kernel fails in its first step on float32, so it is refused there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.platforms import PlatformEnum
from vllm.utils.torch_utils import direct_register_custom_op

from logsteer_server.contract.engine import Int8Products
from logsteer_server.engines.vllm.operation import LIBRARY

BLOCK_K = 1024
"""The longest sum of products that float32 holds exactly: 1024 * 128 * 128 = 2**24."""
BLOCK_N = 512
"""Rows of weights converted to float32 at a time: 2 MiB with BLOCK_K, which fit a core's cache."""
PROBE_N, PROBE_K = 32, 64
PROBE_TOLERANCE = 0.02
"""Relative error allowed in products of the largest numbers: saturation is off by a quarter, zero
points and bfloat16 by about a hundredth."""


def multiply_int8(codes_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return the exact products of the rows of two int8 matrices, [T, N], as float32.

    Every partial sum in a block is an integer of at most 2**24, so float32 is exact in any order of
    the terms. The blocks' sums are added as int32.
    """
    floats_TK = codes_TK.float()
    product_TN = torch.empty(len(codes_TK), len(weight_NK), dtype=torch.float32)
    for start in range(0, len(weight_NK), BLOCK_N):
        rows_NK = weight_NK[start : start + BLOCK_N]
        sums_TN = torch.zeros(len(codes_TK), len(rows_NK), dtype=torch.int32)
        for block_NK, block_TK in zip(
            torch.split(rows_NK, BLOCK_K, 1), torch.split(floats_TK, BLOCK_K, 1), strict=True
        ):
            sums_TN += (block_TK @ block_NK.float().T).to(torch.int32)
        product_TN[:, start : start + BLOCK_N] = sums_TN
    return product_TN


def _shape_product(codes_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return the shape of `multiply_int8`'s result, for the compiler."""
    return torch.empty(codes_TK.shape[0], weight_NK.shape[0], dtype=torch.float32)


direct_register_custom_op("multiply_int8", multiply_int8, [], _shape_product, LIBRARY)


class CheckedInt8Kernel(CPUInt8ScaledMMLinearKernel):  # type: ignore[misc]
    """Compute INT8 layers with oneDNN if its products are exact, otherwise in float32 blocks."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare a layer, and record on it how it is computed.

        It always tests oneDNN: vLLM's AMX kernel does not support float32, although vLLM chooses it
        for float32, too.
        """
        name = self.layer_param_names[0]
        weight_NK = getattr(layer, name).data
        self.process_weights_for_onednn(layer)
        if self._is_exact():
            self.linear_method = self._apply_weights_onednn
            layer.int8_products = "integer"
        else:
            del self.dnnl_handler
            setattr(layer, name, nn.Parameter(weight_NK, requires_grad=False))
            self.linear_method = self._apply_blocks
            layer.int8_products = "float32_blocks"

    def _is_exact(self) -> bool:
        """Test oneDNN on the largest numbers, with the layer's configuration and dtype.

        oneDNN treats a static zero point of 0 specially, so both 0 and 1 are tested.
        """
        has_zero = self.config.is_static_input_scheme and not self.config.input_symmetric
        signs_K = _probe_signs().to(torch.get_default_dtype())
        for zero in (0, 1) if has_zero else (None,):
            kernel = CPUInt8ScaledMMLinearKernel(self.config, self.layer_param_names)
            probe = _make_probe(self.layer_param_names, self.config.is_static_input_scheme, zero)
            kernel.process_weights_for_onednn(probe)
            for count in (1, 4):
                product_TN = kernel._apply_weights_onednn(probe, signs_K.repeat(count, 1))
                if ((product_TN.float() / PROBE_K - 1).abs() > PROBE_TOLERANCE).any():
                    return False
        return True

    def _apply_blocks(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T + bias, with the same quantised activations as vLLM's kernel.

        An element is scale_t * scale_n * sum over k of (code_tk - zero_t) * weight_nk; vLLM has
        precomputed scale_n * (sum over k of weight_nk).
        """
        weight_NK, scale_N1, input_scale, input_zero, weight_sum_1N = self._get_layer_params(layer)
        codes_TK, scale_T1, zero_T1 = ops.onednn_scaled_int8_quant(
            x.reshape(-1, x.shape[-1]), input_scale, input_zero, self.config.input_symmetric
        )
        product_TN: Tensor = torch.ops.logsteer.multiply_int8(codes_TK, weight_NK)
        product_TN = product_TN * scale_N1.view(-1)
        if zero_T1 is not None:
            product_TN = product_TN - zero_T1 * weight_sum_1N
        product_TN = product_TN * scale_T1
        if bias is not None:
            product_TN = product_TN + bias
        return product_TN.to(x.dtype).view(*x.shape[:-1], len(weight_NK))


def _probe_signs() -> Tensor:
    """Return 1 for the first half of the probe's inputs and -1 for the second [K]."""
    return torch.where(torch.arange(PROBE_K) < PROBE_K // 2, 1, -1)


def _make_probe(names: Sequence[str], is_static: bool, zero: int | None) -> Any:
    """Return a layer as loaded, with these parameter names, that maps the signs to PROBE_K.

    Its weights and its activations are 127 and -127, with scales of 1/127.
    """
    weight, weight_scale, input_scale, input_zero, adjustment = names
    probe: Any = nn.Module()
    probe.logical_widths = [PROBE_N]
    probe.bias = None
    scale = torch.full((1,), 1 / 127, dtype=torch.float32)
    tensors: dict[str, Tensor | None] = {
        weight: (127 * _probe_signs()).to(torch.int8).repeat(PROBE_N, 1),
        weight_scale: scale.repeat(PROBE_N)[:, None],
        input_scale: scale if is_static else None,
        input_zero: None if zero is None else torch.full((1,), zero, dtype=torch.int8),
        adjustment: None,
    }
    for name, tensor in tensors.items():
        parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        probe.register_parameter(name, parameter)
    return probe


class HalfInt4Kernel(CPUWNA16LinearKernel):  # type: ignore[misc]
    """Compute layers with 4-bit weights as vLLM does, and refuse float32."""

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Return whether the kernel supports a layer, and the reason if not."""
        if c.act_type == torch.float32:
            return False, "it has no float32; set dtype to float16 or bfloat16"
        found: tuple[bool, str | None] = super().can_implement(c)
        return found


def install_kernels() -> None:
    """Make vLLM choose these kernels for models loaded from now on.

    They are the only ones for INT8 layers: zentorch's kernel rounds scales to bfloat16.
    """
    linear._POSSIBLE_INT8_KERNELS[PlatformEnum.CPU] = [CheckedInt8Kernel]
    linear._POSSIBLE_KERNELS[PlatformEnum.CPU] = [
        HalfInt4Kernel if kernel is CPUWNA16LinearKernel else kernel
        for kernel in linear._POSSIBLE_KERNELS[PlatformEnum.CPU]
    ]


def find_int8_products(model: nn.Module) -> Int8Products | None:
    """Return how a model's INT8 layers are computed; None without such layers."""
    found = (getattr(module, "int8_products", None) for module in model.modules())
    return next((products for products in found if products), None)

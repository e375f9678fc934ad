"""Shapes of a checkpoint's matrices, read from the headers of its files, packed ones included.

    model.….weight                        one number an element: the shape is the tensor's
    model.….weight_packed, .weight_shape  compressed-tensors: the second holds the shape
    model.….qweight, .qzeros, .scales     GPTQ packs rows of the transposed matrix, AWQ its columns
    model.….weight, .weight.quant_state.… bitsandbytes in 4 bits: the second holds it, as JSON

GPTQ's and AWQ's layouts are those of AutoGPTQ and AutoAWQ; scales are [groups, outputs] in both.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from safetensors import safe_open

Shape = list[int]

UNPACKED = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8"}
"""Types of tensors that hold one number of a weight each; others hold several."""
TOLD = ".weight_shape"
STATE = ".weight.quant_state.bitsandbytes__"


def read_weight_shapes(path: Path | str) -> dict[str, Shape]:
    """Return the shapes of a checkpoint's parameters, by name, as far as its files say them.

    Those in safetensors files; a matrix is [outputs, inputs], however it is packed. Errors: OSError
    and SafetensorError.
    """
    shapes: dict[str, Shape] = {}
    packed: dict[str, Shape] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                module, is_told, _ = name.partition(STATE)
                if name.endswith(TOLD):
                    shapes[f"{name.removesuffix(TOLD)}.weight"] = tensors.get_tensor(name).tolist()
                elif is_told:
                    state = tensors.get_tensor(name).astype(np.uint8).tobytes()
                    with suppress(ValueError, KeyError):
                        shapes[f"{module}.weight"] = json.loads(state)["shape"]
                else:
                    tensor = tensors.get_slice(name)
                    known = shapes if tensor.get_dtype() in UNPACKED else packed
                    known[name] = list(tensor.get_shape())
    return shapes | _unpack(packed, shapes)


def _unpack(packed: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of what GPTQ or AWQ has packed: [outputs, inputs]."""
    found = {}
    for name, weight in packed.items():
        module, is_packed, rest = name.rpartition(".qweight")
        scales, zeros = shapes.get(f"{module}.scales"), packed.get(f"{module}.qzeros")
        if is_packed and not rest and scales is not None and zeros is not None:
            outputs = scales[1]
            rows, columns = weight
            inputs = rows if columns < outputs else rows * outputs // zeros[1]
            found[f"{module}.weight"] = [outputs, inputs]
    return found

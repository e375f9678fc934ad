"""Prints whether vLLM's INT8 product on this CPU is what integer arithmetic says.

A process of its own, because the operators of vLLM's library can be registered only once.
"""

import importlib.util
from pathlib import Path

import torch


def is_exact() -> bool:
    """Compare a product of the largest numbers with their integer product."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.submodule_search_locations is not None
    # The build for AVX2 runs everywhere, and oneDNN in it chooses its kernels by the CPU.
    (folder,) = found.submodule_search_locations
    torch.ops.load_library(str(Path(folder) / "_C_AVX2.abi3.so"))
    x = torch.full((4, 64), 127, dtype=torch.int8)
    weight = torch.full((32, 64), 127, dtype=torch.int8).t()
    scale = torch.ones(32, 1)
    handler = torch.ops._C.create_onednn_scaled_mm_handler(
        weight, scale, torch.float32, True, False, 128
    )
    product = torch.empty(4, 32)
    torch.ops._C.onednn_scaled_mm(
        product, x, torch.ones(4, 1), None, None, None, torch.tensor(handler)
    )
    return torch.equal(product.to(torch.int64), x.to(torch.int64) @ weight.to(torch.int64))


if __name__ == "__main__":
    print(is_exact())

"""LoRA adapters as what they add to a model's parameters."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from logsteer_server.numerics.lora import (
    AdapterConfig,
    AdapterLayoutError,
    check_shapes,
    pair_factors,
)


def read_updates(file: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return scale * B A of every update, float64, by the name of its parameter.

    `file` is an opened safetensors file. Errors: AdapterLayoutError for one that does not fit.
    """
    config = AdapterConfig.read(file.metadata() or {})
    updates = {}
    for factors in pair_factors(file.keys()):
        name = f"{factors.module}.weight"
        parameter = parameters.get(name)
        if parameter is None:
            raise AdapterLayoutError(f"the model has no parameter {name}")
        if not parameter.is_floating_point():
            raise AdapterLayoutError(f"{name} is quantised in the model, and cannot be added to")
        # Before anything is multiplied: small factors may have a product of any size.
        down, up = (file.get_slice(key).get_shape() for key in (factors.down, factors.up))
        check_shapes(factors, down, up, parameter.shape, transposed=config.transposed)
        down_RI, up_OR = (file.get_tensor(key).double() for key in (factors.down, factors.up))
        update_OI: Tensor = config.scale * (up_OR @ down_RI)
        updates[name] = update_OI.T if config.transposed else update_OI
    return updates

"""The custom operation `logsteer::steer`, which stands at every activation that can be steered:
behind every decoder layer, and at what else the model's `hooks` name.

Compiled graphs and captured CUDA graphs contain it; the tables of the running model, which it finds
in vLLM's forward context, say what it does.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)

from logsteer_server.engines.vllm.points import SiteNumbers, find_points
from logsteer_server.engines.vllm.stream import split_output
from logsteer_server.engines.vllm.tables import SteeringTables

TABLES = "logsteer.steering_tables"
"""Where vLLM's forward context has the tables of the model that runs."""


def steer(hidden_TD: Tensor, residual_TD: Tensor | None, layer: LayerNameType) -> None:
    """Steer an activation in place, as the tables of the running model say.

    `layer` is its number among the tables' (`points.SiteNumbers`), typed as vLLM types the names of
    its own layers: the compiler then takes layers that differ in nothing else for the same, and
    compiles one.
    """
    tables: SteeringTables = get_forward_context().no_compile_layers[TABLES]
    number = int(_resolve_layer_name(layer))
    if hidden_TD.is_cuda:
        from logsteer_server.engines.vllm.kernel import launch

        launch(tables, hidden_TD, residual_TD, number)
    else:
        tables.apply(hidden_TD, residual_TD, number)


def _shape_only(hidden_TD: Tensor, residual_TD: Tensor | None, layer: LayerNameType) -> None:
    """Stand in for `steer`, which has no output, while the compiler traces."""


LIBRARY = torch.library.Library("logsteer", "FRAGMENT")  # type: ignore[no-untyped-call]
direct_register_custom_op("steer", steer, ["hidden_TD"], _shape_only, LIBRARY)


def find_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """Return a model's `count` decoder layers by their number; none where it has no such list.

    Of a model that also sees or hears, those of its language model: other towers may have as many.
    """
    language: Any = model
    if supports_multimodal(model):
        language = language.get_language_model()
    for module in language.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return []


def append_operation(
    layers: list[nn.Module], tables: SteeringTables, hooks: tuple[str, ...]
) -> None:
    """Put the operation at these activations of this pipeline stage's layers, not compiled yet.

    It is left out where an activation is not found, or not understood; there nothing is steered.
    """
    numbers = SiteNumbers(hooks, len(layers))
    for number, layer in enumerate(layers):
        if isinstance(layer, PPMissingLayer):
            continue
        for hook, point in find_points(layer).items():
            if hook in hooks:
                name = _encode_layer_name(str(numbers.number(hook, number)))
                point.attach(partial(_steer_output, tables, name))


def _steer_output(tables: SteeringTables, layer: LayerNameType, output: Any) -> None:
    """Steer an activation in place, in the form of a decoder layer's output."""
    parts = split_output(output)
    if parts is None:
        return
    hidden_TD, residual_TD = parts
    # A CPU with idle tables need not call; graphs, compiled or captured, always have the operation.
    if torch.compiler.is_compiling() or hidden_TD.is_cuda or not tables.is_idle:
        torch.ops.logsteer.steer(hidden_TD, residual_TD, layer)

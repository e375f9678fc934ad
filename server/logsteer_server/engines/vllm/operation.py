"""The custom operation `logsteer::steer`, which stands at every activation that can be steered:
behind every decoder layer, and at what else the model's `hooks` name.

Compiled graphs and captured CUDA graphs contain it; the tables of the running model, which it finds
in vLLM's forward context, say what it does.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)

from logsteer_server.engines.vllm.points import (
    ModulePoint,
    Place,
    SharingProbe,
    SiteNumbers,
    find_points,
)
from logsteer_server.engines.vllm.stream import split_output
from logsteer_server.engines.vllm.tables import SteeringTables

TABLES = "logsteer.steering_tables"
"""Where vLLM's forward context has the tables of the model that runs."""


def steer(hidden_TD: Tensor, residual_TD: Tensor | None, layer: LayerNameType) -> None:
    """Steer an activation in place, as the tables of the running model say.

    `layer` is its number among the tables' (`points.SiteNumbers`), typed as vLLM types the names of
    its own layers: the compiler then takes layers that differ in nothing else for the same, and
    compiles one. On a CPU it may name several, as `name_group` does.
    """
    tables: SteeringTables = get_forward_context().no_compile_layers[TABLES]
    if hidden_TD.is_cuda:
        from logsteer_server.engines.vllm.kernel import launch

        launch(tables, hidden_TD, residual_TD, int(_resolve_layer_name(layer)))
    elif not tables.is_idle:
        for number, is_whole in _read_group(str(_resolve_layer_name(layer))):
            tables.apply(hidden_TD, residual_TD if is_whole else None, number)


HIDDEN_ALONE = "h"


def name_group(numbers: Sequence[int], whole: Sequence[bool]) -> str:
    """Return the name of activations that one call steers, those without the residual marked.

    The numbers 3 and 37, of which 3 is `hidden` alone, are `3h,37`.
    """
    marks = ["" if is_whole else HIDDEN_ALONE for is_whole in whole]
    return ",".join(f"{number}{mark}" for number, mark in zip(numbers, marks, strict=True))


@cache
def _read_group(name: str) -> tuple[tuple[int, bool], ...]:
    parts = name.split(",")
    return tuple((int(p.rstrip(HIDDEN_ALONE)), not p.endswith(HIDDEN_ALONE)) for p in parts)


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


def find_places(layers: list[nn.Module], hooks: tuple[str, ...]) -> dict[Place, ModulePoint]:
    """Return where this pipeline stage's layers seem to have these activations."""
    return {
        (hook, number): point
        for number, layer in enumerate(layers)
        if not isinstance(layer, PPMissingLayer)
        for hook, point in find_points(layer).items()
        if hook in hooks
    }


def append_operation(
    layers: list[nn.Module],
    tables: SteeringTables,
    hooks: tuple[str, ...],
    sharing: SharingProbe | None = None,
) -> list[RemovableHandle]:
    """Put the operation at these activations of this pipeline stage's layers, not compiled yet.

    It is left out where an activation is not found, or not understood; there nothing is steered.
    Activations that share tensors, as a probe has seen, share a call at the last of them. Return
    what takes the operation away again.
    """
    numbers, places = SiteNumbers(hooks, len(layers)), find_places(layers, hooks)
    groups = [[place] for place in places] if sharing is None else sharing.list_groups()
    handles = []
    for group in groups:
        whole = [len(group) == 1 or sharing is None or sharing.has_residual(p) for p in group]
        if not any(whole):  # all that there is
            whole = [True] * len(group)
        name = _encode_layer_name(name_group([numbers.number(*p) for p in group], whole))
        handles.append(places[group[-1]].attach(partial(_steer_output, tables, name)))
    return handles


def _steer_output(tables: SteeringTables, layer: LayerNameType, output: Any) -> None:
    """Steer an activation in place, in the form of a decoder layer's output."""
    parts = split_output(output)
    if parts is None:
        return
    hidden_TD, residual_TD = parts
    # A CPU with idle tables need not call; graphs, compiled or captured, always have the operation.
    if torch.compiler.is_compiling() or hidden_TD.is_cuda or not tables.is_idle:
        torch.ops.logsteer.steer(hidden_TD, residual_TD, layer)

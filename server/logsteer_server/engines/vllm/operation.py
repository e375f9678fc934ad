"""The custom operation `logsteer::steer`, attached to every activation that can be steered: every
decoder layer's output, and the other activations that the model's `hooks` name.

Compiled graphs and captured CUDA graphs contain it. It works by the tables of the running model,
from vLLM's forward context.
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
"""The key of the running model's tables in vLLM's forward context."""


def steer(hidden_TD: Tensor, residual_TD: Tensor | None, layer: LayerNameType) -> None:
    """Steer an activation in place by the tables of the running model.

    `layer` is its number in the tables (`points.SiteNumbers`), with the type of vLLM's own layer
    names: the compiler then compiles layers that differ in nothing else only once. On a CPU it may
    name several activations, as `name_group` does.
    """
    tables: SteeringTables = get_forward_context().no_compile_layers[TABLES]
    if hidden_TD.is_cuda:
        from logsteer_server.engines.vllm.kernel import launch

        launch(tables, hidden_TD, residual_TD, int(_resolve_layer_name(layer)))
    elif not tables.is_idle:
        for number, is_whole in _parse_group(str(_resolve_layer_name(layer))):
            tables.apply(hidden_TD, residual_TD if is_whole else None, number)


HIDDEN_ALONE = "h"


def name_group(numbers: Sequence[int], whole: Sequence[bool]) -> str:
    """Return the name of activations that one call steers; `h` marks those without the residual.

    The numbers 3 and 37, of which 3 is `hidden` alone, give `3h,37`.
    """
    marks = ["" if is_whole else HIDDEN_ALONE for is_whole in whole]
    return ",".join(f"{number}{mark}" for number, mark in zip(numbers, marks, strict=True))


@cache
def _parse_group(name: str) -> tuple[tuple[int, bool], ...]:
    parts = name.split(",")
    return tuple((int(p.rstrip(HIDDEN_ALONE)), not p.endswith(HIDDEN_ALONE)) for p in parts)


def _shape_only(hidden_TD: Tensor, residual_TD: Tensor | None, layer: LayerNameType) -> None:
    """Do nothing, as the compiler traces `steer`, which has no output."""


LIBRARY = torch.library.Library("logsteer", "FRAGMENT")  # type: ignore[no-untyped-call]
direct_register_custom_op("steer", steer, ["hidden_TD"], _shape_only, LIBRARY)


def find_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """Return a model's `count` decoder layers in order; empty if it has no list of that length.

    In a multimodal model, search the language model only: other towers may have as many layers.
    """
    language: Any = model
    if supports_multimodal(model):
        language = language.get_language_model()
    for module in language.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return []


def find_places(layers: list[nn.Module], hooks: tuple[str, ...]) -> dict[Place, ModulePoint]:
    """Return the likely places of these hooks' activations in this pipeline stage's layers."""
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
    """Attach the operation to these hooks in this pipeline stage's layers, before compilation.

    An activation that is not found, or has an unknown form, is not steered. Activations that share
    tensors by a `SharingProbe` share a call, at the last of them. Return the handles that remove
    the operation.
    """
    numbers, places = SiteNumbers(hooks, len(layers)), find_places(layers, hooks)
    groups = [[place] for place in places] if sharing is None else sharing.list_groups()
    handles = []
    for group in groups:
        whole = [len(group) == 1 or sharing is None or sharing.has_residual(p) for p in group]
        if not any(whole):  # no activation of the group has a residual
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
    # On a CPU with idle tables the call is skipped; compiled or captured graphs always contain it.
    if torch.compiler.is_compiling() or hidden_TD.is_cuda or not tables.is_idle:
        torch.ops.logsteer.steer(hidden_TD, residual_TD, layer)

"""The custom operation `logsteer::steer`, which stands behind every decoder layer.

Compiled graphs and captured CUDA graphs contain it; the tables of the running model, which it finds
in vLLM's forward context, say what it does.
"""

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from logsteer_server.engines.vllm.tables import SteeringTables

TABLES = "logsteer.steering_tables"
"""Where vLLM's forward context keeps the tables of the model that runs."""


def steer(hidden_TD: Tensor, residual_TD: Tensor | None, layer: int) -> None:
    """Steer the output of a decoder layer in place, as the tables of the running model say."""
    tables: SteeringTables = get_forward_context().no_compile_layers[TABLES]
    if hidden_TD.is_cuda:
        from logsteer_server.engines.vllm.kernel import launch

        launch(tables, hidden_TD, residual_TD, layer)
    else:
        tables.apply(hidden_TD, residual_TD, layer)


def _shape_only(hidden_TD: Tensor, residual_TD: Tensor | None, layer: int) -> None:
    """Stand in for `steer`, which has no output, while the compiler traces."""


LIBRARY = torch.library.Library("logsteer", "FRAGMENT")  # type: ignore[no-untyped-call]
direct_register_custom_op("steer", steer, ["hidden_TD"], _shape_only, LIBRARY)

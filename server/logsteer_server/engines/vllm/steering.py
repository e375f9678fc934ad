"""A vLLM model runner whose requests are steered. It touches these internals of the V1 runner:

* decoder layers return `hidden`, or `(hidden, residual)` whose sum is the residual stream;
* `compilation_config.static_forward_context`, which every forward context carries;
* `_prepare_inputs(scheduler_output, num_scheduled_tokens)`: after it `query_start_loc.np` says
  where a request's tokens lie in the step, `input_batch.num_computed_tokens_cpu` which they are;
* `scheduler_output.scheduled_new_reqs` and `.finished_req_ids`, `requests[id].num_prompt_tokens`.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from logsteer_server.contract.plan import Positions
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.extra_args import CAPTURE, STEER
from logsteer_server.engines.vllm.ledger import Ledger, SteeredTokens
from logsteer_server.engines.vllm.operation import TABLES
from logsteer_server.engines.vllm.tables import SteeringTables, Step


def find_layers(runner: Any) -> list[nn.Module]:
    """The decoder layers of a runner's model, by their number; none where it has no such list."""
    count = runner.model_config.hf_text_config.num_hidden_layers
    for module in runner.model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return []


def _steer_output(
    tables: SteeringTables, layer: int, _module: nn.Module, _args: Any, output: Any
) -> None:
    """A forward hook: steers what a decoder layer returns, in place."""
    hidden_TD, residual_TD = output if isinstance(output, tuple) else (output, None)
    # An idle processor need not call; graphs, compiled or captured, always have the operation.
    if torch.compiler.is_compiling() or hidden_TD.is_cuda or not tables.is_idle:
        torch.ops.logsteer.steer(hidden_TD, residual_TD, layer)


class SteeringRunner(GPUModelRunner):  # type: ignore[misc]
    """A model runner that marks the tokens of each step with the slots of their requests' plans.

    It is never constructed: the worker puts it in front of vLLM's own runner.
    """

    steering: SteeringTables
    ledger: Ledger
    unbooked: SteeredTokens | None
    captures: dict[str, tuple[int, bool]]

    def prepare_steering(self, size: SteeringSize) -> None:
        """Put the steering operation behind the layers of the model, before it is compiled."""
        layers = find_layers(self)
        like = torch.empty(0, dtype=self.model_config.dtype, device=self.device)
        width = self.model_config.get_hidden_size()
        self.steering = SteeringTables(size, len(layers), self.max_num_tokens, width, like)
        self.ledger = Ledger(len(layers))
        self.unbooked = None
        self.captures = {}
        self.compilation_config.static_forward_context[TABLES] = self.steering
        for number, layer in enumerate(layers):
            if not isinstance(layer, PPMissingLayer):
                layer.register_forward_hook(partial(_steer_output, self.steering, number))

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._settle()
        for req_id in scheduler_output.finished_req_ids:
            self.ledger.close(req_id)
            self.captures.pop(req_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            self._take_in(request)
        if len(self.ledger) or self.captures:
            self.steering.write(self._mark())
        elif not self.steering.is_idle:
            self.steering.write(Step())
        return prepared

    def _take_in(self, request: Any) -> None:
        params = request.sampling_params
        wanted = params.extra_args if params and params.extra_args else {}
        if STEER in wanted:
            slot, kind, slices, prompt_len = wanted[STEER]
            positions = Positions(kind, slices)
            begin = request.num_computed_tokens
            self.ledger.open(request.req_id, slot, positions, prompt_len, begin)
        elif CAPTURE in wanted:
            self.captures[request.req_id] = wanted[CAPTURE]

    def _mark(self) -> Step:
        """What this step's tokens are for."""
        rows = self.input_batch.num_reqs
        req_ids = self.input_batch.req_ids
        starts_R = self.query_start_loc.np[: rows + 1].astype(np.int64)
        computed_R = self.input_batch.num_computed_tokens_cpu[:rows].astype(np.int64)
        steered = self.unbooked = self.ledger.find(req_ids, starts_R, computed_R)
        if not self.captures:
            return Step(steered.index_t, steered.slots_t)
        captured, slots = [], []
        for row, req_id in enumerate(req_ids):
            if req_id not in self.captures:
                continue
            slot, every_token = self.captures[req_id]
            begin, start = int(computed_R[row]), int(starts_R[row])
            if begin == 0:  # preempted requests begin again, too
                self.steering.clear_captures(slot)
            last = self.requests[req_id].num_prompt_tokens - 1
            first = begin if every_token else max(begin, last)
            end = min(begin + int(starts_R[row + 1]) - start, last + 1)
            captured.append(np.arange(first, end) + (start - begin))
            slots.append(np.full(max(0, end - first), slot))
        none = np.zeros(0, np.int64)
        return Step(
            steered.index_t,
            steered.slots_t,
            np.concatenate([none, *captured]),
            np.concatenate([none, *slots]),
        )

    def _settle(self) -> None:
        """Book what the last step measured; its buffers are about to be written again."""
        if self.unbooked is not None and len(self.unbooked.index_t):
            self.ledger.count(self.steering.read_ratios())
        self.unbooked = None

    def take_trace(self, req_id: str) -> tuple[int, dict[int, tuple[int, float]]]:
        """Tokens of a request read under steering; by layer, those changed and their ratios' sum.

        Layers of other pipeline stages have not changed any.
        """
        self._settle()
        return self.ledger.read(req_id)

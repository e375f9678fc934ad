"""vLLM's worker for this machine, with a model runner that scores rows and steers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.bloom import BloomMLP
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.platforms import current_platform

from logsteer_server.contract.engine import DeviceMemory, Int8Products
from logsteer_server.contract.plan import SteeringPlan
from logsteer_server.engines.lifetime import ScratchDirectory, follow_parent
from logsteer_server.engines.machine import read_memory
from logsteer_server.engines.vllm.adapters import read_factors, write_peft_directory
from logsteer_server.engines.vllm.config import (
    OPTIONS,
    SteeringSize,
    clear_new_blocks,
    is_batch_invariant,
    widen_columns,
)
from logsteer_server.engines.vllm.points import PointProbe, find_faults
from logsteer_server.engines.vllm.steering import MeasureWish, StageMeasurements
from logsteer_server.engines.vllm.stream import Change, StreamForm, StreamProbe
from logsteer_server.numerics.hidden_rows import RowBounds, multiply_wide

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker

    from logsteer_server.engines.vllm.cpu_kernels import find_int8_products, install_kernels
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker

LOAD: Any = torch.compiler.load_compiled_function
"""PyTorch's own, which `load_compiled` calls."""


class LogsteerWorker(BaseWorker):  # type: ignore[misc]
    """Extend vLLM's worker with methods that the engine calls by name, on every rank."""

    def init_device(self) -> None:
        """Set up the device as vLLM does, then put our class before the runner's own."""
        follow_parent()  # vLLM's rank processes end at an interrupt
        clear_new_blocks()
        super().init_device()
        if self.use_v2_model_runner:
            from logsteer_server.engines.vllm.runner_v2 import V2Runner as Runner
        else:
            from logsteer_server.engines.vllm.runner_v1 import V1Runner as Runner
        own = type(self.model_runner)
        self.model_runner.__class__ = type(f"Logsteer{own.__name__}", (Runner, own), {})

    def load_model(self, **options: Any) -> None:
        """Load the model as vLLM does, then set up scoring, our sampler, and steering.

        Create the buffers of later pipeline stages, because vLLM does so in a warm-up that it skips
        for eager models on the CPU.
        """
        if current_platform.is_cpu():
            install_kernels()
            torch.compiler.load_compiled_function = load_compiled
        super().load_model(**options)
        runner = self.model_runner
        options = self.vllm_config.additional_config[OPTIONS]
        bounds = RowBounds(**options["rows"])
        # With a given cache size, vLLM does not measure the memory that has to stay free.
        if runner.device.type == "cuda" and self.cache_config.kv_cache_memory_bytes is None:
            left = self.requested_memory - runner.model_memory_usage
            bounds = replace(bounds, columns=widen_columns(bounds.columns, left))
        runner.prepare_scoring(bounds)
        runner.prepare_sampling()
        correct_model(runner.model)
        widen_head(runner.model)
        if options["steering"]["slots"]:
            runner.prepare_steering(SteeringSize(**options["steering"]))
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )

    def load_adapter(self, name: str, slot: int, path: str) -> set[str]:
        """Load an adapter's file, through the directory that vLLM expects.

        Return the modules with updates in the file that this rank did not apply.
        """
        with ScratchDirectory() as directory:
            write_peft_directory(path, directory)
            self.add_lora(LoRARequest(name, slot, str(directory)))
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = manager.get_adapter(slot)
        applied = {
            part  # of `qkv_proj` the file has `q_proj`, `k_proj` and `v_proj`
            for module in manager.modules
            if manager._get_lora_layer_weights(adapter, module)
            for part in (module, *manager.packed_modules.get(module, ()))
        }
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        renamed = mapper and mapper.get_rename_mapper()
        return {
            factors.module
            for factors in read_factors(path)
            if parse_fine_tuned_lora_name(factors.down, renamed)[0] not in applied
        }

    def begin_stream_probe(self, change: Change | None) -> None:
        """Change the outputs of this stage's decoder layers in the next steps."""
        runner = self.model_runner
        layers = [x for x in runner.find_layers() if not isinstance(x, PPMissingLayer)]
        runner.stream_probe = StreamProbe(layers, change)

    def end_stream_probe(self) -> set[str]:
        """Stop the probe; return the forms of this stage's layer outputs, in words."""
        probe, self.model_runner.stream_probe = self.model_runner.stream_probe, None
        outputs: set[str] = probe.outputs
        return outputs

    def begin_point_probe(self, form: StreamForm, changed: Sequence[str]) -> None:
        """Record all hooks' activations in the next steps, and change those of `changed` hooks."""
        runner = self.model_runner
        layers = {
            number: layer
            for number, layer in enumerate(runner.find_layers())
            if not isinstance(layer, PPMissingLayer)
        }
        runner.stream_probe = PointProbe(layers, form, changed)

    def end_point_probe(self) -> dict[str, str]:
        """Stop the probe; return why some hooks' activations are wrong, as `find_faults`."""
        runner = self.model_runner
        probe, runner.stream_probe = runner.stream_probe, None
        return find_faults(probe.seen, exact=runner.model_config.dtype == torch.float32)

    def find_scaled_stream(self) -> str | None:
        """Return why the residual stream is not the model's own, if vLLM scales it; else None.

        In float16 the decoder layers of DeepSeek and related models divide it by a constant.
        """
        runner = self.model_runner
        if runner.model_config.dtype != torch.float16:
            return None
        scales = any(hasattr(layer, "routed_scaling_factor") for layer in runner.find_layers())
        return "vLLM scales its residual stream in float16: use bfloat16" if scales else None

    def set_stream_form(self, form: StreamForm) -> None:
        """Set the tables' form of the residual stream in the layers' outputs."""
        self.model_runner.steering.tables.set_form(form)

    def find_logits_dtype(self) -> str:
        """Return the dtype of the head's products, on the last pipeline stage."""
        return find_logits_dtype(self.model_runner.model, self.model_runner.model_config.dtype)

    def find_int8_products(self) -> Int8Products | None:
        """Return the kernel of this rank's INT8 layers, on a CPU with such layers."""
        return find_int8_products(self.model_runner.model) if current_platform.is_cpu() else None

    def read_memory(self) -> tuple[DeviceMemory, ...]:
        """Return the memory of this rank's GPU; none on a CPU."""
        return read_memory()

    def load_plans(self, plans: Mapping[int, SteeringPlan]) -> None:
        """Load plans into slots of the tables."""
        self.model_runner.steering.tables.load(plans)

    def find_stage(self) -> frozenset[int]:
        """Return the numbers of the decoder layers in this rank's pipeline stage."""
        layers = enumerate(self.model_runner.find_layers())
        return frozenset(i for i, layer in layers if not isinstance(layer, PPMissingLayer))

    def measure(self, wishes: Mapping[str, MeasureWish]) -> dict[str, StageMeasurements]:
        """Return this stage's measurements of requests.

        Empty on all tensor-parallel ranks except the first: all measure the same.
        """
        if get_tensor_model_parallel_rank() != 0:
            return {}
        measured: dict[str, StageMeasurements] = self.model_runner.steering.measure(wishes)
        return measured


Rotate = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def correct_model(model: nn.Module) -> None:
    """Correct the modules of a model before it is compiled.

    * Bloom was trained with the tanh approximation of GELU; with exact GELU log-probabilities are
      off by 2e-3 nats.
    * The CPU's rotary embedding reads [T, H, D] as tokens of one head each: DeepSeek's latent
      attention is off by 10 nats.
    """
    for module in model.modules():
        if isinstance(module, BloomMLP):
            module.gelu_impl = nn.GELU(approximate="tanh")
        if isinstance(module, RotaryEmbedding) and module._forward_method == module.forward_cpu:
            module._forward_method = partial(_rotate_heads, module.forward_cpu)


def widen_head(model: nn.Module) -> None:
    """Make the head compute logits in float32.

    In half precision logits are rounded by up to 0.09 nats. A GPU's `torch.mm` accepts the weights
    in half precision; on a CPU, and in batch-invariant mode, the weights are widened in parts. A
    quantised head, or one whose weights vLLM packed for a CPU, stays as it is.
    """
    on_cpu = current_platform.is_cpu()
    heads = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    plain = (UnquantizedEmbeddingMethod, *(() if on_cpu else (UnquantizedLinearMethod,)))
    if all(isinstance(head.quant_method, plain) for head in heads):
        for module in model.modules():
            if isinstance(module, LogitsProcessor):
                module.head_dtype = torch.float32
                if on_cpu or is_batch_invariant():
                    module._apply_head = _apply_wide


def _apply_wide(head: Any, hidden_RD: Tensor, bias_V: Tensor | None) -> Tensor:
    if hidden_RD.dtype == torch.float32:
        logits_RV: Tensor = head.quant_method.apply(head, hidden_RD, bias=bias_V)
        return logits_RV
    return multiply_wide(hidden_RD, head.weight, bias_V)


def load_compiled(file: Any, **options: Any) -> Any:
    """Load a compiled model from vLLM's cache as PyTorch does, with the method that vLLM calls.

    On CPUs Inductor compiles a model as a whole, and such a function does not have the method:
    vLLM would compile the model again at each start.
    """
    loaded = LOAD(file, **options)
    function = loaded._artifacts.compiled_fn
    if not hasattr(function, "finalize_loading"):
        function.finalize_loading = lambda _config: None
    return loaded


def find_logits_dtype(model: nn.Module, dtype: torch.dtype) -> str:
    """Return the dtype of the head's products for a model's dtype."""
    heads = (module for module in model.modules() if isinstance(module, LogitsProcessor))
    found = next((head.head_dtype for head in heads), None)
    return str(found or dtype).removeprefix("torch.")


def _rotate_heads(
    rotate: Rotate, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rotate query and key [T, H, D] in place, through the [T, H * D] that `rotate` expects."""
    flat = [None if part is None else part.flatten(1).contiguous() for part in (query, key)]
    assert flat[0] is not None
    rotate(positions, flat[0], flat[1])
    for part, rotated in zip((query, key), flat, strict=True):
        if part is not None and rotated is not None and rotated.data_ptr() != part.data_ptr():
            part.copy_(rotated.view(part.shape))
    return query, key

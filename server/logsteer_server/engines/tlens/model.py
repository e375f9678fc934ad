"""A model of transformers with TransformerLens's hook points between its modules.

Accelerate spreads its weights evenly over several GPUs, and has each module of transformers move
its inputs to its own device; here the bridge's modules do so, too.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.sources.transformers.helpers import (
    get_hf_model_class_for_architecture,
)
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.plan import Cast
from logsteer_server.engines.machine import show_devices
from logsteer_server.engines.needs import choose_dtype
from logsteer_server.engines.tlens.causal import CausalModel
from logsteer_server.engines.tlens.parameters import HALF
from logsteer_server.engines.tlens.points import (
    HOOK_LEVEL,
    HookFunction,
    Point,
    RefusedJobError,
    act_on_stream,
    find_points,
)
from logsteer_server.engines.weights import find_eos
from logsteer_server.imports import load_tokenizer
from logsteer_server.numerics.hidden_rows import multiply_wide


class _WideLinear(nn.Module):
    """A linear layer that computes its product in float32 for weights of any dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the product in float32."""
        return multiply_wide(hidden, self._linear.weight, self._linear.bias)


class BridgeModel(CausalModel):
    """A causal model of a directory, and a copy of its modules in TransformerLens's bridge.

    The bridge puts several Python calls around each module, which for one new token cost more than
    the arithmetic. So it runs only where a hook needs what it has inside of blocks.

    Errors: ValueError where the model cannot be served.
    """

    _is_bridged = False
    _fuses_attention = False

    def __init__(self, spec: EngineSpec, path: Path) -> None:
        transformers_logging.disable_progress_bar()
        torch.set_float32_matmul_precision("high" if spec.tf32 else "highest")
        architecture = (AutoConfig.from_pretrained(path).architectures or [""])[0]
        dtype: torch.dtype = getattr(torch, choose_dtype(spec.dtype, path))
        causal: Any = get_hf_model_class_for_architecture(architecture).from_pretrained(
            path, dtype=dtype, device_map=place_model(spec), attn_implementation="eager"
        )
        causal.eval().requires_grad_(False)
        super().__init__(causal, load_tokenizer(path), spec.max_model_len)
        self.eos_ids = find_eos(path, path, self.vocab_size)
        self.num_devices = len({parameter.device for parameter in causal.parameters()})
        method = getattr(causal, "quantization_method", None)
        self.quantization = None if method is None else str(getattr(method, "value", method))
        modules: Any = copy_modules(causal)
        bridge = TransformerBridge.boot_transformers(
            str(path), hf_model=modules, dtype=dtype, device=str(self.device)
        )
        follow_devices(modules)
        self._bodies.append(modules.base_model)
        # The bridge's blocks may hold parts of a parameter as parameters of their own.
        own, bridged = (set(map(id, one.parameters())) for one in (causal, modules))
        self._are_shared = bridged <= own
        if dtype in HALF:
            self._widen_head()
        with torch.inference_mode():
            probe_RV = self.project(self.read(self._probe_tokens(2)).flatten(0, 1))
        self.logits_dtype = str(probe_RV.dtype).removeprefix("torch.")
        self._is_bridged = True
        self.points = find_points(bridge.hook_dict, self.num_layers, self._probe)
        self._is_bridged = False
        # In half precision scores differ by rounding between attention as one operation, without
        # its pattern in memory, and in parts, as where the model is bridged: the demo model's by
        # 0.026 nats a token in bfloat16 and 0.003 in float16, as much as either differs from
        # float32 (mean of 4 texts of 100 to 160 tokens). Transformers' function leaves a cap on
        # scores out, and attention in parts has a softmax in float32.
        is_capped = getattr(causal.config.get_text_config(), "attn_logit_softcapping", None)
        self._fuses_attention = causal._supports_sdpa and not is_capped and dtype != torch.float64

    def _choose_body(self) -> Any:
        # Fused attention has no forward derivative.
        fused = self._fuses_attention and torch.is_inference_mode_enabled()
        name = "sdpa" if fused else "eager"
        if self._causal.config._attn_implementation != name:  # the attention that modules look up
            self._causal.config._attn_implementation = name
        return self._bodies[self._is_bridged]

    @contextmanager
    def hooked(self, hooks: Sequence[tuple[Point, HookFunction]]) -> Iterator[None]:
        """Let functions act on activations in every `read` of this context."""
        self._is_bridged = not self._stays_plain([point for point, _ in hooks])
        try:
            with super().hooked(hooks):
                yield
        finally:
            self._is_bridged = False

    def _attach(self, point: Point, function: HookFunction) -> Callable[[], None]:
        if not self._is_bridged:
            return super()._attach(point, function)
        act = act_on_stream(function) if point.is_shared else function
        point.hook.add_hook(act, level=HOOK_LEVEL)
        return partial(point.hook.remove_hooks, "fwd", level=HOOK_LEVEL)

    def _stays_plain(self, points: Sequence[Point]) -> bool:
        """Return whether hooks on these points act on transformers' own modules."""
        return all(point.key in self._edges for point in points)

    def check_delta(self, points: Sequence[Point], cast: Cast | None = None) -> None:
        """Check that a parameter delta applies everywhere while these points are hooked.

        It does not if they need bridged blocks that hold copies of parameters. Quantised models
        cannot compute in a `cast`. Errors: RefusedJobError.
        """
        if cast and self.quantization:
            raise RefusedJobError(
                "unsupported_by_engine",
                f"the model is quantised ({self.quantization}), and what multiplies by such "
                f"parameters computes in a precision of its own, not in {cast}; leave cast out",
            )
        if self._are_shared or self._stays_plain(points):
            return
        raise RefusedJobError(
            "unsupported_by_engine",
            "TransformerLens keeps copies of this model's attention weights for the activations "
            "inside its blocks, which an override or adapter would not reach; use resid_pre and "
            "resid_post together with these",
        )

    def _widen_head(self) -> None:
        """Compute the head's product in float32, and what follows it, such as a cap."""
        for name, module in self._head.named_children():
            if isinstance(module, nn.Linear) and module.out_features == self.vocab_size:
                self._head._modules[name] = _WideLinear(module)

    def _probe(self, length: int) -> Tensor:
        """Return a number that depends on every activation of two short sequences."""
        hidden_BTD = self.read(self._probe_tokens(length))
        logits_RV = self.project(hidden_BTD.flatten(0, 1)).float()
        return logits_RV.log_softmax(-1)[:, ::3].sum()


def place_model(spec: EngineSpec) -> str:
    """Return the `device_map` of a model: a device, or `balanced` for several GPUs.

    GPUs are chosen by CUDA_VISIBLE_DEVICES, which counts only until CUDA is first used. Errors:
    ValueError where the specification asks for what cannot be.
    """
    if spec.tensor_parallel > 1:
        raise ValueError("transformer_lens spreads layers, not tensors: set pipeline_parallel")
    num_gpus = spec.pipeline_parallel
    if spec.devices == "cpu":
        if num_gpus > 1:
            raise ValueError("pipeline_parallel spreads layers over GPUs; leave it out for a CPU")
        return "cpu"
    if not isinstance(spec.devices, str):
        if num_gpus not in (1, len(spec.devices)):
            raise ValueError(f"pipeline_parallel is {num_gpus}, devices {list(spec.devices)}")
        num_gpus = len(spec.devices)
    if isinstance(spec.devices, str) and num_gpus == 1:
        return "cuda:0" if torch.cuda.device_count() else "cpu"
    show_devices(range(num_gpus) if isinstance(spec.devices, str) else spec.devices)
    if (found := torch.cuda.device_count()) < num_gpus:
        raise ValueError(f"devices: {num_gpus} GPUs are wanted, and {found} are here")
    return "balanced" if num_gpus > 1 else "cuda:0"


def copy_modules(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose modules have the dictionaries of the original's tensors.

    So the copy takes no memory, and a tensor replaced in one of them is replaced in both.
    """
    own = [d for module in model.modules() for d in (module._parameters, module._buffers)]
    return copy.deepcopy(model, {id(tensors): tensors for tensors in own})


def follow_devices(causal: nn.Module) -> None:
    """Have the bridge's modules move their inputs to the devices of the modules they wrap.

    Some use the weights of transformers' module without calling its forward, so that accelerate's
    hook does not run. On one device there are no such hooks, and nothing changes.
    """
    for module in causal.modules():
        if isinstance(module, GeneralizedComponent) and module.original_component is not None:
            _bring_inputs(module, module.original_component)


def _bring_inputs(module: nn.Module, placed: nn.Module) -> None:
    """Have a module move its inputs to the device on which accelerate has placed another one."""
    hook = getattr(placed, "_hf_hook", None)
    if hook is None:
        return

    def bring(_: nn.Module, args: Any, options: Any) -> Any:
        return hook.pre_forward(placed, *args, **options)

    module.register_forward_pre_hook(bring, with_kwargs=True)

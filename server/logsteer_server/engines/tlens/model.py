"""A model in TransformerLens's bridge: hidden states, logits, and where its activations are.

The bridge wraps transformers' own model and puts hook points between its modules.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.plan import Cast
from logsteer_server.engines.needs import choose_dtype
from logsteer_server.engines.tlens.causal import CausalModel
from logsteer_server.engines.tlens.parameters import HALF, Parameters
from logsteer_server.engines.tlens.placement import follow_devices, load_options, place_model
from logsteer_server.engines.tlens.plain_forward import PlainForward, agree, unwrap
from logsteer_server.engines.tlens.points import (
    HOOK_LEVEL,
    HookFunction,
    Point,
    PointMap,
    RefusedJobError,
    act_on_stream,
    find_points,
)
from logsteer_server.engines.weights import find_eos, limit_context
from logsteer_server.imports import load_tokenizer
from logsteer_server.numerics.hidden_rows import multiply_wide

log = logging.getLogger(__name__)

PROBE_LENGTH = 32
FEW_ROWS = 16
LARGE_HEAD = 2**22
"""A CPU's library takes two to eight times as long for 2 to so many rows times a head of so many
numbers or more as for the transposed product, for which it reads the head just once."""
FORWARD_TOLERANCE = 1e-5
"""How much ways to compute the model may differ, per unit of the largest number."""


class _WideLinear(nn.Module):
    """A linear layer whose product is computed in float32, whatever its weights are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the product in float32."""
        return multiply_wide(hidden, self._linear.weight, self._linear.bias)


class BridgeModel(CausalModel):
    """A causal model, loaded, in TransformerLens's bridge.

    Errors: ValueError where it cannot be served.
    """

    def __init__(self, spec: EngineSpec, path: Path) -> None:
        from transformer_lens.model_bridge import TransformerBridge

        transformers_logging.disable_progress_bar()
        torch.set_float32_matmul_precision("high" if spec.tf32 else "highest")
        config = AutoConfig.from_pretrained(path)
        devices = place_model(spec)
        dtype: torch.dtype = getattr(torch, choose_dtype(spec.dtype, path))
        bridge = TransformerBridge.boot_transformers(
            str(path), dtype=dtype, **load_options(devices, config, dtype)
        )
        self.num_devices = len(devices)
        causal: Any = bridge.original_model
        causal.eval().requires_grad_(False)
        follow_devices(causal)
        self._plain_forward: PlainForward | None = None
        self._linear_head: nn.Linear | None = None
        self._fuses_attention = False
        super().__init__(causal, str(path))
        self.parameters = Parameters(unwrap(causal), causal.parameters())
        text = causal.config.get_text_config()
        self.context_length = limit_context(path, text, spec.max_model_len)
        self.num_layers = int(bridge.cfg.n_layers)
        self.quantization = _name_quantization(causal.config)
        self.tokenizer = load_tokenizer(path).backend_tokenizer
        self._detach_head(unwrap(causal))
        self.vocab_size = self._compare_head(causal)
        self.eos_ids = find_eos(path, path, self.vocab_size)
        self._linear_head = self._find_linear_head()
        if self._linear_head is None and dtype in HALF:
            self._widen_head()
        self.logits_dtype = str(self._project_probe().dtype).removeprefix("torch.")
        self.points: PointMap = find_points(bridge.hook_dict, self.num_layers, self._probe)
        self._plain_forward = self._find_plain_forward(list(bridge.blocks))
        if self._plain_forward:
            self._fuses_attention = self._check_fused_attention(self._plain_forward)

    def _choose_body(self) -> Any:
        if self._plain_forward is None:
            return self._body
        # Fused attention has no forward derivative, and bridged blocks have no fused attention.
        fused = self._fuses_attention and self._plain_forward.is_plain
        fused = fused and torch.is_inference_mode_enabled()
        name = "sdpa" if fused else "eager"
        if self._causal.config._attn_implementation != name:  # the attention that modules look up
            self._causal.config._attn_implementation = name
        return self._plain_forward.body

    @contextmanager
    def _attach(self, hooks: Sequence[tuple[Point, HookFunction]]) -> Iterator[None]:
        if self._plain_forward:
            self._plain_forward.bridge([point for point, _ in hooks])
        try:
            for point, function in hooks:
                act = act_on_stream(function) if point.is_shared else function
                point.hook.add_hook(act, level=HOOK_LEVEL)
            yield
        finally:
            for point, _ in hooks:
                point.hook.remove_hooks("fwd", level=HOOK_LEVEL)

    def check_delta(self, points: Sequence[Point], cast: Cast | None = None) -> None:
        """Check that a parameter delta acts everywhere while these points are hooked.

        It does not where that needs bridged blocks that have copies of parameters; and quantised
        models compute in no `cast`. Errors: RefusedJobError.
        """
        if cast and self.quantization:
            raise RefusedJobError(
                "unsupported_by_engine",
                f"the model is quantised ({self.quantization}), and what multiplies by such "
                f"parameters computes in a precision of its own, not in {cast}; leave cast out",
            )
        plain_forward = self._plain_forward
        if self.parameters.are_shared or (plain_forward and plain_forward.stays_plain(points)):
            return
        raise RefusedJobError(
            "unsupported_by_engine",
            "TransformerLens keeps copies of this model's attention weights for the activations "
            "inside its blocks, which an override or adapter would not reach; use resid_pre and "
            "resid_post together with these",
        )

    @torch.inference_mode()
    def _find_plain_forward(self, blocks: list[Any]) -> PlainForward | None:
        """Return a body that leaves the bridge out; None where it would give something else."""
        tokens_BT = self._probe_tokens(4)
        whole_BTD = self.read(tokens_BT)
        try:
            self._plain_forward = PlainForward(self._body, blocks)
        except ValueError:
            return None
        edges = [self.points.find(layer, "resid_post") for layer in range(self.num_layers)]
        for hooks in ([], [(point, lambda activation, hook: None) for point in edges]):  # noqa: ARG005
            with self.hooked(hooks):
                if not agree(self.read(tokens_BT), whole_BTD, FORWARD_TOLERANCE):
                    log.warning("%s: runs bridged throughout: without it differs", self._name)
                    return None
        return self._plain_forward

    @torch.inference_mode()
    def _check_fused_attention(self, plain_forward: PlainForward) -> bool:
        """Return whether attention can be one operation, without its pattern in memory.

        It can where each block gives the same in float32, whatever the model's dtype.

        In half precision scores then differ by rounding from those of attention in parts, which
        runs wherever a block is bridged: between a request that is steered inside of a block and
        one that is not, the demo model's differ by 0.026 nats a token in bfloat16 and 0.003 in
        float16, as much as either differs from float32 (mean of 4 texts of 100 to 160 tokens).
        """
        config = self._causal.config.get_text_config()
        # Transformers' function leaves a cap on scores out, which shows only where they are large.
        if not self._causal._supports_sdpa or getattr(config, "attn_logit_softcapping", None):
            return False
        if self.quantization and self.dtype.itemsize < torch.float32.itemsize:
            return False  # its blocks cannot be widened
        if self.dtype == torch.float64:
            return False  # attention in parts has a softmax in float32, and its numbers stay
        tokens_BT = self._probe_tokens(PROBE_LENGTH)
        mask_BT = torch.ones_like(tokens_BT)
        mask_BT[1, : PROBE_LENGTH // 2] = 0  # padding in front, as where continuations start
        for mask in (None, mask_BT):
            with plain_forward.widened() as blocks:
                for self._fuses_attention in (False, True):
                    self.read(tokens_BT, mask)
            own_BT = mask_BT.bool() if mask is not None else torch.ones_like(mask_BT).bool()
            for block in blocks:
                eager, fused = (output[own_BT.to(output.device)] for output in block.outputs)
                if not agree(fused, eager, FORWARD_TOLERANCE):
                    log.warning("%s: computes attention in parts: fused it differs", self._name)
                    return False
        return True

    def _widen_head(self) -> None:
        """Have the head's product computed in float32, and what follows it, such as a cap."""
        for name, linear in self._list_linear_heads().items():
            self._head._modules[name] = _WideLinear(linear)

    def _list_linear_heads(self) -> dict[str, nn.Linear]:
        return {
            name: module
            for name, module in self._head.named_children()
            if isinstance(module, nn.Linear) and module.out_features == self.vocab_size
        }

    @torch.inference_mode()
    def _find_linear_head(self) -> nn.Linear | None:
        """Return the head where it is a product and nothing else; None where it does more."""
        heads = list(self._list_linear_heads().values())
        if [type(head) for head in heads] != [nn.Linear] or heads[0]._forward_pre_hooks:
            return None
        linear = heads[0]
        hidden_RD = self.read(self._probe_tokens(2)).flatten(0, 1)
        # What caps logits shows where they are large.
        hidden_RD = torch.cat([hidden_RD, 100 * hidden_RD])
        is_all = torch.equal(linear(hidden_RD), self.project(hidden_RD))
        return linear if is_all else None

    def project(self, hidden_RD: Tensor) -> Tensor:
        """Return the logits [R, V] of hidden states, as every causal model does."""
        head = self._linear_head
        if head is None:
            return super().project(hidden_RD)
        weight_VD, bias_V = head.weight, head.bias  # here, because calls may replace them
        if weight_VD.dtype in HALF:
            return multiply_wide(hidden_RD, weight_VD, bias_V)
        is_few = 1 < len(hidden_RD) <= FEW_ROWS and weight_VD.numel() >= LARGE_HEAD
        if not is_few or self.device.type != "cpu":
            return nn.functional.linear(hidden_RD, weight_VD, bias_V)
        logits_RV = (weight_VD @ hidden_RD.t()).t().contiguous()
        return logits_RV if bias_V is None else logits_RV.add_(bias_V)

    @torch.inference_mode()
    def _project_probe(self) -> Tensor:
        return self.project(self.read(self._probe_tokens(2)).flatten(0, 1))

    def _probe(self, length: int) -> Tensor:
        """Return a number that depends on every activation of two short sequences."""
        hidden_BTD = self.read(self._probe_tokens(length))
        logits_RV = self.project(hidden_BTD.flatten(0, 1)).float()
        return logits_RV.log_softmax(-1)[:, ::3].sum()


def _name_quantization(config: Any) -> str | None:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    name = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    return str(getattr(name, "value", name))

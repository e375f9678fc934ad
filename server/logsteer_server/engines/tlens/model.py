"""A model in TransformerLens's bridge: hidden states, logits, and where its activations are.

The bridge wraps transformers' own model and puts hook points between its modules.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.plan import Cast
from logsteer_server.engines.tlens.cache import RoomyLayer
from logsteer_server.engines.tlens.causal import CausalModel
from logsteer_server.engines.tlens.decode_step import DecodeStep, NextTokens, UnknownBlockError
from logsteer_server.engines.tlens.parameters import Parameters
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

log = logging.getLogger(__name__)

PROBE_LENGTH = 32
PROBE_STEPS = 3
FEW_ROWS = 16
LARGE_HEAD = 2**22
"""A CPU's library takes two to eight times as long for 2 to so many rows times a head of so many
numbers or more as for the transposed product, for which it reads the head just once."""
FORWARD_TOLERANCE = 1e-5
"""How much ways to compute the model may differ, per unit of the largest number."""


def choose_dtype(wanted: str, config: Any) -> torch.dtype:
    """Return the dtype of that name; for `auto` the checkpoint's own."""
    if wanted != "auto":
        found = getattr(torch, wanted)
    else:
        found = getattr(config, "dtype", None) or torch.float32
    return found if isinstance(found, torch.dtype) else getattr(torch, str(found))


class _WideLinear(nn.Module):
    """A linear layer whose product is computed in float32, whatever its weights are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the product in float32; the weight is widened for as long as it takes."""
        weight, bias = self._linear.weight, self._linear.bias
        wide_bias = None if bias is None else bias.float()
        return nn.functional.linear(hidden.float(), weight.float(), wide_bias)


class BridgeModel(CausalModel):
    """A causal model, loaded, in TransformerLens's bridge.

    Errors: ValueError where it cannot be served.
    """

    def __init__(self, spec: EngineSpec, path: Path | str) -> None:
        from transformer_lens.model_bridge import TransformerBridge

        transformers_logging.disable_progress_bar()
        torch.set_float32_matmul_precision("high" if spec.tf32 else "highest")
        config = AutoConfig.from_pretrained(path)
        devices = place_model(spec)
        dtype = choose_dtype(spec.dtype, config)
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
        if spec.logits_dtype != "auto":
            self._widen_head(path)
        self._linear_head = self._find_linear_head()
        self.logits_dtype = str(self._project_probe().dtype).removeprefix("torch.")
        self.points: PointMap = find_points(bridge.hook_dict, self.num_layers, self._probe)
        self._plain_forward = self._find_plain_forward(list(bridge.blocks))
        self._decode_step: DecodeStep | None = None
        if self._plain_forward:
            self._fuses_attention = self._check_fused_attention(self._plain_forward)
            self._decode_step = self._find_decode_step(self._plain_forward)

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

    def is_plain(self, points: Sequence[Point]) -> bool:
        """Return whether all blocks are transformers' own while these points are hooked."""
        return self._plain_forward is not None and self._plain_forward.stays_plain(points)

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

    def _find_decode_step(self, plain_forward: PlainForward) -> DecodeStep | None:
        """Return the model's decode step; None where none is known that gives the same."""
        if not self._fuses_attention or self.num_devices > 1 or self.quantization:
            return None
        if any(type(layer) is not RoomyLayer for layer in self.new_cache().layers):
            return None  # of sliding windows, say
        try:
            # Outside of inference mode: parameters move, and gradients are taken under them later.
            with torch.inference_mode(False), torch.no_grad():
                step = DecodeStep(plain_forward.body, plain_forward.plain_blocks)
        except UnknownBlockError as error:
            log.info("%s: decodes by transformers' modules: %s", self._name, error)
            return None
        if self._is_right(step):
            return step
        log.warning(
            "%s: decodes by transformers' modules: its decode step gives something else", self._name
        )
        return None

    @torch.inference_mode()
    def _is_right(self, step: DecodeStep) -> bool:
        """Return whether the step gives what the modules give: padded or not, hooked or not."""
        tokens_BT = self._probe_tokens(PROBE_LENGTH)
        padded_BT = torch.ones_like(tokens_BT)
        padded_BT[1, : PROBE_LENGTH // 2] = 0
        hooks: list[tuple[Point, HookFunction]] = [
            (self.points.find(layer, name), partial(_scale, factor))
            for layer in range(self.num_layers)
            for name, factor in (("resid_pre", 1.25), ("resid_post", 0.8))
        ]
        return all(
            self._compare_steps(step, tokens_BT, mask_BT, own_hooks)
            for mask_BT in (torch.ones_like(padded_BT), padded_BT)
            for own_hooks in ([], hooks)
        )

    def _compare_steps(
        self,
        step: DecodeStep,
        tokens_BT: Tensor,
        mask_BT: Tensor,
        hooks: Sequence[tuple[Point, HookFunction]],
    ) -> bool:
        """Return whether the last tokens give the same by modules and by the step.

        In bfloat16, in which each block rounds the stream twice, up to sqrt(2 L) epsilons.
        """
        positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
        begin = tokens_BT.shape[1] - PROBE_STEPS
        noise = torch.finfo(self.dtype).eps * (2 * self.num_layers) ** 0.5
        tolerance = max(FORWARD_TOLERANCE, noise if self.dtype == torch.bfloat16 else 0.0)
        caches = self.new_cache(), self.new_cache()
        for cache in caches:
            self.read(tokens_BT[:, :begin], mask_BT[:, :begin], positions_BT[:, :begin], cache)
        for t in range(begin, tokens_BT.shape[1]):
            tokens_B1, positions_B1 = tokens_BT[:, t : t + 1], positions_BT[:, t : t + 1]
            mask_BC = mask_BT[:, : t + 1]
            with self.hooked(hooks):
                wanted_B1D = self.read(tokens_B1, mask_BC, positions_B1, caches[0])
            mask = None if mask_BC.all() else mask_BC
            found_BD = step.read(NextTokens(tokens_B1, mask, positions_B1, caches[1], hooks))
            if not agree(found_BD, wanted_B1D[:, 0], tolerance):
                return False
        return all(
            agree(found, wanted, tolerance)
            for layer, other in zip(caches[0].layers, caches[1].layers, strict=True)
            for wanted, found in ((layer.keys, other.keys), (layer.values, other.values))
        )

    def read_next(self, tokens: NextTokens) -> Tensor:
        """Return the hidden states [B, D] of one more token of each sequence.

        By the decode step, where there is one, unless a hook is inside of a block.
        """
        if self._decode_step is None or not all(point.is_edge for point, _ in tokens.hooks):
            return super().read_next(tokens)
        return self._decode_step.read(tokens)

    def _widen_head(self, path: Path | str) -> None:
        """Have logits computed in float32. Errors: ValueError where the head is no linear layer."""
        heads = self._list_linear_heads()
        if len(heads) != 1:
            raise ValueError(f"{path}: its head is not a linear layer; leave logits_dtype out")
        for name, linear in heads.items():
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


def _scale(factor: float, activation: Tensor, hook: object) -> Tensor:  # noqa: ARG001
    return activation * factor


def _name_quantization(config: Any) -> str | None:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    name = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    return str(getattr(name, "value", name))

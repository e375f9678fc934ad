"""Locate the activations of each hook in a decoder layer, and check them.

Names and values are TransformerLens'. A block adds the outputs of its attention and of its MLP to
the residual stream; if a norm follows such an output, the block adds the norm's output:

    resid_pre -> norm -> attention (-> norm) = attn_out      resid_mid = resid_pre + attn_out
    resid_mid -> norm -> MLP (-> norm) = mlp_out             resid_post = resid_mid + mlp_out

Parallel blocks have no resid_mid: resid_post = resid_pre + attn_out + mlp_out. `find_points` finds
the modules by the names that families use. `PointProbe` and `find_faults` check them: they record
the activations of a text, unchanged and then with every activation changed, and test the sums.

Axis letters: T tokens, D width of an activation.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from logsteer_server.contract.engine import HOOKS
from logsteer_server.contract.plan import SteeringPlan
from logsteer_server.engines.vllm.stream import (
    PROBE_TOKENS,
    StreamForm,
    read_stream,
    split_output,
)

ATTENTION = ("self_attn", "self_attention", "attn", "attention")
MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "fc2")
NORM_BETWEEN = ("post_attention_layernorm", "ln_2", "ffn_norm", "norm2", "final_layer_norm")
"""Names of a layer's modules in all families. `final_layer_norm` and `fc2` are OPT's."""

HIDDEN, RESIDUAL = "hidden_states", "residual"


@dataclass(frozen=True, slots=True)
class ModulePoint:
    """An activation's place in a layer: the output of a module, or its input.

    `parameters`: for an input, the names of the module's parameters in order, with HIDDEN and
    RESIDUAL among them; empty for an output.
    """

    module: nn.Module
    parameters: tuple[str, ...] = ()

    def attach(self, act: Callable[[Any], None]) -> RemovableHandle:
        """Register a hook that calls `act` with the activation, formed as a layer's output."""
        if self.parameters:
            hook = partial(_act_on_input, act, self.parameters)
            return self.module.register_forward_pre_hook(hook, with_kwargs=True)
        return self.module.register_forward_hook(partial(_act_on_output, act))


def _act_on_output(act: Callable[[Any], None], _module: nn.Module, _args: Any, output: Any) -> None:
    act(output)


def _act_on_input(
    act: Callable[[Any], None],
    parameters: tuple[str, ...],
    _module: nn.Module,
    args: Any,
    kwargs: Any,
) -> None:
    named = dict(zip(parameters, args, strict=False)) | kwargs
    act((named.get(HIDDEN), named.get(RESIDUAL)))


def find_points(layer: nn.Module) -> dict[str, ModulePoint]:
    """Return the likely place of each activation in a decoder layer, by hook."""
    children = dict(layer.named_children())

    def first(names: Sequence[str]) -> nn.Module | None:
        return next((children[name] for name in names if name in children), None)

    attention, mlp, between = first(ATTENTION), first(MLP), first(NORM_BETWEEN)
    if "post_feedforward_layernorm" in children:  # Gemma 2 and 3; OLMo 2 has no norm between
        between = first(["pre_feedforward_layernorm"]) or mlp
        attention, mlp = first(["post_attention_layernorm"]), first(["post_feedforward_layernorm"])
    elif "post_mlp_layernorm" in children:  # GLM 4
        attention, mlp = first(["post_self_attn_layernorm"]), first(["post_mlp_layernorm"])
    parameters = tuple(inspect.signature(layer.forward).parameters)
    found = {"resid_pre": ModulePoint(layer, parameters)} if HIDDEN in parameters else {}
    if between is not None:
        found["resid_mid"] = ModulePoint(between, (HIDDEN, RESIDUAL))
    outputs = {"attn_out": attention, "mlp_out": mlp, "resid_post": layer}
    return found | {hook: ModulePoint(each) for hook, each in outputs.items() if each is not None}


@dataclass(frozen=True, slots=True)
class SiteNumbers:
    """Number a model's activations for its tables, which call these numbers layers.

    The numbers of a hook are adjacent; with one hook they equal the layers. With the hooks
    ("attn_out", "resid_post") and 32 layers, number("resid_post", 3) is 35.
    """

    hooks: tuple[str, ...]
    layers: int

    def number(self, hook: str, layer: int) -> int:
        """Return the number of an activation. Errors: ValueError for an unknown hook."""
        return self.hooks.index(hook) * self.layers + layer

    def rewrite(self, plan: SteeringPlan) -> SteeringPlan:
        """Return a plan with these numbers as the layers of its sites and probes."""
        sites = tuple(replace(s, layer=self.number(s.hook, s.layer)) for s in plan.sites)
        probes = tuple(replace(p, layer=self.number(p.hook, p.layer)) for p in plan.probes)
        return replace(plan, sites=sites, probes=probes)


class Seen(NamedTuple):
    """An activation as passed on, and the change added to it: float32 [T, D] each."""

    value_TD: Tensor
    added_TD: Tensor


class PointProbe:
    """Record the activations of one rank's layers in a pass, and change those of some hooks."""

    def __init__(
        self, layers: Mapping[int, nn.Module], form: StreamForm, changed: Sequence[str]
    ) -> None:
        self._layers = layers
        self._form = form
        self._changed = changed
        self.seen: dict[int, dict[str, Seen]] = {}

    def attached(self) -> AbstractContextManager[Any]:
        """Return a context in which activations are recorded and changed."""
        stack = ExitStack()
        for number, layer in self._layers.items():
            for hook, point in find_points(layer).items():
                stack.callback(point.attach(partial(self._record, number, hook)).remove)
        return stack

    def _record(self, layer: int, hook: str, output: Any) -> None:
        parts = split_output(output)
        if parts is None:
            return
        hidden_TD, residual_TD = parts
        if self._form == "hidden":
            residual_TD = None
        before_TD = read_stream(hidden_TD, residual_TD, None).clone()
        if hook in self._changed:
            draw = torch.Generator().manual_seed(layer * len(HOOKS) + HOOKS.index(hook))
            noise_D = torch.randn(hidden_TD.shape[-1], generator=draw).to(hidden_TD.device)
            scale_T1 = 0.5 * before_TD.square().mean(-1, keepdim=True).sqrt()
            hidden_TD += (scale_T1 * noise_D).to(hidden_TD.dtype)
        after_TD = read_stream(hidden_TD, residual_TD, None).clone()
        own = slice(PROBE_TOKENS - 1)  # after them comes a graph's padding
        seen = Seen(after_TD[own], (after_TD - before_TD)[own])
        self.seen.setdefault(layer, {})[hook] = seen


Place = tuple[str, int]
"""A hook, and the number of a layer."""


class _SeenPlace(NamedTuple):
    """The tensors of an activation, and whether the hidden part was what the last one left."""

    place: Place
    hidden_TD: Tensor
    residual_TD: Tensor | None
    is_marked: bool


class SharingProbe:
    """Detect, in one pass, which consecutive activations share their tensors.

    In most families these are attn_out and resid_mid, and mlp_out, resid_post and the next layer's
    resid_pre: nothing is computed between them, so that one call can steer them all.

    Each activation is overwritten with a mark, and has it at the next place if nothing is computed
    between. Its own values would not do: in a dummy run they come from uninitialised memory, and
    NaN differs from itself.
    """

    def __init__(self, points: Mapping[Place, ModulePoint]) -> None:
        self._points = points
        self._seen: list[_SeenPlace] = []

    def attached(self) -> AbstractContextManager[Any]:
        """Return a context in which activations are recorded."""
        stack = ExitStack()
        for place, point in self._points.items():
            stack.callback(point.attach(partial(self._record, place)).remove)
        return stack

    def _record(self, place: Place, output: Any) -> None:
        if (parts := split_output(output)) is not None:
            hidden_TD, residual_TD = parts
            mark_TD = torch.linspace(1, 2, hidden_TD.shape[-1]).to(hidden_TD).expand_as(hidden_TD)
            is_marked = torch.equal(hidden_TD, mark_TD)
            self._seen.append(_SeenPlace(place, hidden_TD, residual_TD, is_marked))
            hidden_TD.copy_(mark_TD)

    def list_groups(self) -> list[list[Place]]:
        """Return the recorded activations in order, grouped by shared tensors."""
        groups: list[list[Place]] = []
        for before, seen in pairwise([None, *self._seen]):
            assert seen is not None
            if before is not None and _is_shared(before, seen):
                groups[-1].append(seen.place)
            else:
                groups.append([seen.place])
        return groups

    def has_residual(self, place: Place) -> bool:
        """Return whether an activation has a residual part."""
        return any(s.place == place and s.residual_TD is not None for s in self._seen)


def _is_shared(before: _SeenPlace, after: _SeenPlace) -> bool:
    residual_TD = before.residual_TD
    return (
        before.hidden_TD.data_ptr() == after.hidden_TD.data_ptr()
        and after.is_marked
        and (
            residual_TD is None
            or (
                after.residual_TD is not None
                and residual_TD.data_ptr() == after.residual_TD.data_ptr()
            )
        )
    )


NOISE = {True: 1e-4, False: 0.02}
"""Largest rounding error of a sum relative to the residual stream, by whether it is float32."""
MIN_SIGNAL = 5
"""Outputs smaller than this multiple of the noise at every token are too small to check."""

Activations = Mapping[str, Seen]
"""One layer's activations, by hook."""


def find_faults(seen: Mapping[int, Activations], *, exact: bool) -> dict[str, str]:
    """Return, by hook, why its activations are not the ones it is named after.

    Args:
        seen: the activations of a text by layer, unchanged or changed.
        exact: whether they are float32.

    """
    layers, noise = list(seen.values()), NOISE[exact]
    faults = {
        hook: f"no such activation was found in layer {layer}"
        for layer, found in reversed([*seen.items()])
        for hook in HOOKS
        if hook not in found
    }
    if not faults.keys().isdisjoint(("resid_pre", "resid_post")):
        return dict.fromkeys(HOOKS, "there is nothing to hold it against") | faults
    pairs = [(_unchanged(two, "resid_pre"), one["resid_post"][0]) for one, two in pairwise(layers)]
    if not _are_same(pairs, noise):
        faults["resid_pre"] = "what enters a layer is not what left the one in front"
    if not faults.keys().isdisjoint(("attn_out", "mlp_out")):
        return dict.fromkeys(HOOKS[1:-1], "there is nothing to hold it against") | faults
    if "resid_mid" not in faults:
        faults |= _find_faults_between(layers, noise)
    if "resid_mid" in faults:
        sums = [each["resid_pre"][0] + each["attn_out"][0] + each["mlp_out"][0] for each in layers]
        if not _are_same([*zip(sums, _all_unchanged(layers, "resid_post"), strict=True)], noise):
            reason = "what attention and MLP put out is not what the layer adds to the stream"
            return dict.fromkeys(HOOKS[1:-1], reason) | faults
    for hook in ("attn_out", "mlp_out"):
        shares = [
            each[hook][0].norm(dim=-1) / each["resid_post"][0].norm(dim=-1) for each in layers
        ]
        if not max(float(share_T.max()) for share_T in shares) > MIN_SIGNAL * noise:
            faults[hook] = "it is too small beside the stream to be told from rounding"
    return faults


def _find_faults_between(layers: Sequence[Activations], noise: float) -> dict[str, str]:
    """Check resid_mid, and the outputs that attention and MLP add before and after it."""
    faults = {}
    for begin, hook, end in (HOOKS[:3], HOOKS[2:]):
        ends = _all_unchanged(layers, end)
        added = [end_TD - each[begin][0] for each, end_TD in zip(layers, ends, strict=True)]
        outputs = [each[hook][0] for each in layers]
        scale = _find_scale(added, outputs)
        for factor in (1.0, scale):
            sums = [each[begin][0] + factor * each[hook][0] for each in layers]
            if _are_same([*zip(sums, ends, strict=True)], noise):
                break
        else:
            return {"resid_mid": "attention and MLP are not added one after the other"}
        if factor != 1.0:
            faults[hook] = f"what is put out is added to the stream times {factor:.3g}"
    return faults


def _unchanged(layer: Activations, hook: str) -> Tensor:
    """Return an activation before the probe changed it."""
    return layer[hook].value_TD - layer[hook].added_TD


def _all_unchanged(layers: Sequence[Activations], hook: str) -> list[Tensor]:
    return [_unchanged(layer, hook) for layer in layers]


def _find_scale(added: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """Return the least-squares factor between outputs and what was added to the stream."""
    across = sum(float((a * b).sum()) for a, b in zip(added, outputs, strict=True))
    return across / max(sum(float(b.square().sum()) for b in outputs), 1e-30)


def _are_same(pairs: Sequence[tuple[Tensor, Tensor]], noise: float) -> bool:
    """Return whether the two streams [T, D] of each pair are equal up to noise at every token."""
    return all(
        bool(((one - other).norm(dim=-1) <= noise * other.norm(dim=-1)).all())
        for one, other in pairs
    )

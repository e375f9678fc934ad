"""Which activations of a layer are what they are called, found out on toy blocks; their numbers."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from logsteer_server.contract.engine import HOOKS
from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.contract.plan import Condition, Probe, ResidualOp, Site, SteeringPlan
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.layout import SteeredTokens, Step
from logsteer_server.engines.vllm.points import PointProbe, SiteNumbers, find_faults
from logsteer_server.engines.vllm.slots import SteeringSlots
from logsteer_server.engines.vllm.tables import SteeringTables
from tests.server.steering_cases import INFO

WIDTH, TOKENS, LAYERS = 16, 6, 3
Forward = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    """A block with the modules of a family, whose forward pass is a function of them and x."""

    def __init__(self, names: str, forward: Forward) -> None:
        super().__init__()
        for name in names.split():
            is_norm = "norm" in name
            self.add_module(name, nn.LayerNorm(WIDTH) if is_norm else nn.Linear(WIDTH, WIDTH))
        self._forward = forward

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self._forward(self, hidden_states)


def plain(b: Any, x: Tensor) -> Tensor:
    x = x + b.self_attn(b.input_layernorm(x))
    return x + b.mlp(b.post_attention_layernorm(x))


def normed(b: Any, x: Tensor) -> Tensor:
    x = x + b.post_attention_layernorm(b.self_attn(x))
    return x + b.post_feedforward_layernorm(b.mlp(x))


def parallel(b: Any, x: Tensor) -> Tensor:
    return x + b.self_attn(b.input_layernorm(x)) + b.mlp(b.post_attention_layernorm(x))


def scaled(b: Any, x: Tensor) -> Tensor:
    x = x + 0.5 * b.self_attn(b.input_layernorm(x))
    return x + b.mlp(b.post_attention_layernorm(x))


def copied(b: Any, x: Tensor) -> Tensor:
    x = x + b.self_attn(b.input_layernorm(x))
    return x.clone() + b.mlp(b.post_attention_layernorm(x.clone()))


def gated(b: Any, x: Tensor) -> Tensor:
    x = x + torch.sigmoid(x) * b.self_attn(b.input_layernorm(x))
    return x + b.mlp(b.post_attention_layernorm(x))


USUAL = "input_layernorm self_attn post_attention_layernorm mlp"
ONCE = "attention and MLP are not added one after the other"
NOT_ADDED = "what attention and MLP put out is not what the layer adds to the stream"


@pytest.mark.parametrize(
    ("names", "forward", "faults", "when_changed"),
    [
        (USUAL, plain, {}, {}),
        ("self_attn post_attention_layernorm mlp post_feedforward_layernorm", normed, {}, {}),
        (USUAL, parallel, {"resid_mid": ONCE}, {}),
        ("input_layernorm self_attn mlp", lambda b, x: x + b.self_attn(x) + b.mlp(x),
         {"resid_mid": "no such activation was found in layer 0"}, {}),
        # A rank of two has its part of each, and the sum of all is added.
        (USUAL, lambda b, x: x + 2 * (parallel(b, x) - x),
         {"resid_mid": ONCE, "attn_out": NOT_ADDED, "mlp_out": NOT_ADDED}, {}),
        (USUAL, scaled, {"attn_out": "what is put out is added to the stream times 0.5"}, {}),
        (USUAL, copied, {}, {"resid_mid": ONCE}),
        (USUAL, gated, {"resid_mid": ONCE, "attn_out": NOT_ADDED, "mlp_out": NOT_ADDED}, {}),
        (USUAL, lambda b, x: plain(b, x.clone()), {}, {}),
    ],
)  # fmt: skip
def test_faults(
    names: str, forward: Forward, faults: dict[str, str], when_changed: dict[str, str]
) -> None:
    torch.manual_seed(0)
    blocks = [Block(names, forward) for _ in range(LAYERS)]
    text_TD = torch.randn(TOKENS, WIDTH)

    def read(changed: list[str]) -> dict[str, str]:
        probe = PointProbe(dict(enumerate(blocks)), "hidden", changed)
        x_TD = text_TD.clone()
        with torch.no_grad(), probe.attached():
            for block in blocks:
                x_TD = block(x_TD)
        for found in probe.seen.values():
            for hook, (value_TD, added_TD) in found.items():
                assert value_TD.shape == (TOKENS, WIDTH)
                assert bool(added_TD.any()) == (hook in changed)
        return find_faults(probe.seen, exact=True)

    found = read([])
    assert found == faults
    rest = read([hook for hook in HOOKS if hook not in found])
    assert {hook: reason for hook, reason in rest.items() if hook not in found} == when_changed


def test_a_stream_that_is_scaled_between_layers_has_no_resid_pre() -> None:
    one, other = (Block(USUAL, plain) for _ in range(2))
    probe = PointProbe({0: one, 1: other}, "hidden", [])
    with torch.no_grad(), probe.attached():
        other(1.5 * one(torch.randn(TOKENS, WIDTH)))
    reason = "what enters a layer is not what left the one in front"
    assert find_faults(probe.seen, exact=True) == {"resid_pre": reason}


def test_tables_have_a_row_for_each_hook_of_each_layer() -> None:
    hooks = ("attn_out", "resid_post")
    tables = SteeringTables(SteeringSize(2, 1, 1, 64, hooks), 3, 4, WIDTH, torch.empty(0))
    numbers, v = SiteNumbers(hooks, 3), np.ones(WIDTH, np.float32)
    plan = SteeringPlan((Site(1, "resid_post", v), Site(2, "attn_out", 2 * v)))
    tables.load({1: numbers.rewrite(plan)})
    one = np.array([0])
    tables.write(Step(SteeredTokens(one, one + 1, one + 1, one == 0)))
    moved = torch.zeros(len(hooks) * 3, 4, WIDTH)
    for number in range(len(moved)):
        tables.apply(moved[number], None, number)
    added = {(hook, layer): float(moved[numbers.number(hook, layer), 0, 0])
             for hook in hooks for layer in range(3)}  # fmt: skip
    assert {place: x for place, x in added.items() if x} == {
        ("resid_post", 1): 1.0, ("attn_out", 2): 2.0,
    }  # fmt: skip


def steer_at(layer: int, hook: str, probe: Probe, **fields: Any) -> SteeringPlan:
    op = ResidualOp(np.eye(1, INFO.hidden_size, dtype=np.float32)[0], condition=0)
    return SteeringPlan((Site(layer, hook, None, (op,)),), probes=(probe,),
                        conditions=(Condition(0, above=0.0),), **fields)  # fmt: skip


def test_numbers_are_the_layers_where_there_is_one_hook() -> None:
    assert SiteNumbers(("resid_post",), 32).number("resid_post", 3) == 3
    numbers = SiteNumbers(("attn_out", "resid_post"), 32)
    assert len({numbers.number(h, n) for h in numbers.hooks for n in range(32)}) == 64
    probe = Probe(1, "attn_out", np.ones(2, np.float32))
    plan = numbers.rewrite(steer_at(3, "resid_post", probe))
    assert (plan.sites[0].layer, plan.probes[0].layer) == (35, 1)
    assert plan.probes[0].direction is probe.direction


@pytest.mark.parametrize(
    ("site", "read", "says"),
    [
        ((1, "mlp_out"), (1, "resid_mid"), None),
        ((1, "mlp_out"), (1, "mlp_out"), None),
        ((1, "attn_out"), (0, "resid_post"), None),
        ((1, "attn_out"), (1, "mlp_out"), "which comes before it"),
        ((1, "resid_pre"), (1, "resid_mid"), r"set hooks: \[attn_out, resid_pre\] for the model"),
    ],
)
def test_what_a_plan_asks_for_and_is_not_there(site: Any, read: Any, says: str | None) -> None:
    hooks = tuple(hook for hook in HOOKS if hook != "resid_pre")
    missing = {"resid_pre": "set hooks: [attn_out, resid_pre] for the model demo"}
    info = replace(INFO, hooks=hooks, missing_hooks=missing, max_probes=4)
    stage = frozenset(range(info.num_layers))
    slots = SteeringSlots(lambda *_: [stage], SteeringSize(1, 1, 4, 64, hooks), info)
    probe = Probe(*read, np.ones(INFO.hidden_size, np.float32))
    ids = np.arange(5, 9, dtype=np.int32)
    failure = slots.refuse(ScoreJob(ids[:-1], ids[1:], plan=steer_at(*site, probe)))
    assert (failure is None) == (says is None)
    assert failure is None or re.search(str(says), failure.detail)

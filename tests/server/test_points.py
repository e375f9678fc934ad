"""Where the stream and the activations of a layer lie, found out on toy blocks; their numbers.

And slots of the steering tables: shared by equal plans, never given to two different ones.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from logsteer_server.contract.engine import HOOKS
from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.contract.plan import Condition, Probe, ResidualOp, Site, SteeringPlan
from logsteer_server.engines.vllm import stream
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.layout import Step
from logsteer_server.engines.vllm.points import (
    PointProbe,
    SharingProbe,
    SiteNumbers,
    find_faults,
    find_points,
)
from logsteer_server.engines.vllm.slots import PLANS_AT_ONCE, SlotPool, SteeringSlots
from logsteer_server.engines.vllm.stream import (
    Change,
    StreamProbe,
    UnknownStreamError,
    describe_output,
    find_stream_form,
    split_output,
)
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


class AddingNorm(nn.LayerNorm):
    """A norm that adds to the residual first, as vLLM's do."""

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        stream = hidden_states + residual
        return super().forward(stream), stream


class AddingBlock(Block):
    """A block that gives the next one what it has not added yet."""

    def __init__(self) -> None:
        super().__init__("self_attn mlp", plain)
        self.input_layernorm, self.post_attention_layernorm = (AddingNorm(WIDTH) for _ in "ab")

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Any:  # type: ignore[override]
        hidden, residual = self.input_layernorm(hidden_states, residual)
        hidden, residual = self.post_attention_layernorm(self.self_attn(hidden), residual)
        return self.mlp(hidden), residual


USUAL = "input_layernorm self_attn post_attention_layernorm mlp"
ONCE = "attention and MLP are not added one after the other"
NOT_ADDED = "what attention and MLP put out is not what the layer adds to the stream"


def test_activations_that_share_tensors_are_found() -> None:
    def group(blocks: list[Any], *inputs: Tensor) -> list[str]:
        points = {(hook, n): p for n, b in enumerate(blocks) for hook, p in find_points(b).items()}
        probe, given = SharingProbe(points), inputs
        with torch.no_grad(), probe.attached():
            for block in blocks:
                output = block(*given)
                given = output if isinstance(output, tuple) else (output,)
        return [" ".join(f"{hook}{n}" for hook, n in found) for found in probe.list_groups()]

    x_TD, y_TD = torch.randn(2, TOKENS, WIDTH)
    # NaN stands for memory that nothing was written to.
    assert group([AddingBlock() for _ in range(2)], torch.full_like(x_TD, torch.nan), y_TD) == [
        "resid_pre0", "attn_out0 resid_mid0", "mlp_out0 resid_post0 resid_pre1",
        "attn_out1 resid_mid1", "mlp_out1 resid_post1",
    ]  # fmt: skip
    assert group([Block(USUAL, plain) for _ in range(2)], x_TD) == [
        "resid_pre0", "attn_out0", "resid_mid0", "mlp_out0", "resid_post0 resid_pre1",
        "attn_out1", "resid_mid1", "mlp_out1", "resid_post1",
    ]  # fmt: skip


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


# ------------------------------------------------------------------ the stream of decoder layers


Output = Callable[[Tensor, Tensor], Any]


class ToyLayer(nn.Module):
    """A block that reads the stream x and says what it returns of x and of its branch's output."""

    def __init__(self, make_output: Output) -> None:
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)
        self._make_output = make_output

    def forward(self, stream_TD: Tensor) -> Any:
        return self._make_output(torch.tanh(self.branch(stream_TD)), stream_TD)


class ToyModel:
    """Layers, and a head that reads the stream out of what the last one returns."""

    def __init__(self, make_output: Output, read: Callable[[Any], Tensor]) -> None:
        torch.manual_seed(0)
        self.layers = [ToyLayer(make_output) for _ in range(LAYERS)]
        self._read = read
        self._head = nn.Linear(WIDTH, 30)
        self._text = torch.randn(TOKENS, WIDTH)
        self.dtype = torch.float32
        self.outputs: set[str] = set()

    @torch.no_grad()
    def score(self, change: Change | None) -> np.ndarray:
        """Log-probabilities of some tokens under a change."""
        probe = StreamProbe(self.layers, change)
        with probe.attached():
            stream_TD = self._text
            for layer in self.layers:
                stream_TD = self._read(layer(stream_TD))
        self.outputs |= probe.outputs
        return self._head(stream_TD).log_softmax(-1)[:, 7].numpy()


def find_form(model: ToyModel) -> str:
    return find_stream_form(model.outputs, model.score, exact=True)


def test_a_stream_in_two_parts() -> None:
    model = ToyModel(lambda branch, x: (branch, x), lambda output: output[0] + output[1])
    assert find_form(model) == "sum"


def test_a_residual_that_is_left_over() -> None:
    model = ToyModel(lambda branch, x: (branch + x, x), lambda output: output[0])
    assert find_form(model) == "hidden"


def test_a_residual_that_is_hidden_once_more() -> None:
    """In place, a change and its opposite would leave both as they were."""

    def twice(branch: Tensor, x: Tensor) -> Any:
        return (branch + x,) * 2

    assert find_form(ToyModel(twice, lambda output: output[0])) == "hidden"


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: (x,), lambda x: (x, None), lambda x: x[None]]
)
def test_a_stream_in_one_part(wrap: Callable[[Tensor], Any]) -> None:
    def read(output: Any) -> Tensor:
        hidden = output[0] if isinstance(output, tuple) else output
        return hidden.reshape(TOKENS, WIDTH)

    assert find_form(ToyModel(lambda branch, x: wrap(branch + x), read)) == "hidden"


def test_a_stream_that_is_neither_is_refused() -> None:
    halved = ToyModel(lambda branch, x: (branch, 2 * x), lambda output: output[0] + output[1] / 2)
    with pytest.raises(UnknownStreamError, match="neither their sum nor the first"):
        find_form(halved)


def test_a_model_that_nothing_reaches_is_refused() -> None:
    model = ToyModel(lambda branch, x: branch + x, lambda output: torch.zeros_like(output))
    with pytest.raises(UnknownStreamError, match="does not reach its logits"):
        find_form(model)


def test_layers_that_were_not_found_or_not_understood_are_refused() -> None:
    four = ToyModel(lambda branch, x: (branch + x).expand(4, -1, -1), lambda output: output[0])
    with pytest.raises(UnknownStreamError, match=r"\[4, 6, 16\]"):
        find_form(four)
    with pytest.raises(UnknownStreamError, match="nothing"):
        find_stream_form(set(), four.score, exact=True)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 300)]
)
def test_rounding_is_not_taken_for_a_change(dtype: torch.dtype, scale: float) -> None:
    """A vector and its opposite are rounded apart in bfloat16."""

    def split(branch: Tensor, x: Tensor) -> Any:
        return branch.to(dtype), (scale * x).to(dtype)

    def join(output: Any) -> Tensor:
        return output[0].float() + output[1].float() / scale if scale == 1 else whole(output)

    def whole(output: Any) -> Tensor:
        stream_TD: Tensor = output[0].float() + output[1].float()
        return stream_TD / stream_TD.norm(dim=-1, keepdim=True)

    model = ToyModel(split, join)
    model.score(None)
    assert find_stream_form(model.outputs, model.score, exact=dtype == torch.float32) == "sum"


def test_three_parts_are_unknown() -> None:
    x = torch.zeros(2, 3)
    assert split_output((x, x, x)) is None
    assert split_output((x, torch.zeros(2, 4))) is None
    assert describe_output((x, "cache")) == "unknown: [2, 3], str"


def test_tables_leave_a_residual_out_that_is_no_part_of_the_stream() -> None:
    tables = SteeringTables(SteeringSize(1, 0, 1, 64), 1, 4, WIDTH, torch.empty(0))
    tables.write(Step(captured={(0, False): (np.array([1]), np.array([1]))}))
    own = range(1, 2)
    hidden, residual = torch.randn(2, 4, WIDTH)
    tables.apply(hidden, residual, 0)
    assert np.allclose(tables.captures.take(own)[0], (hidden + residual)[1], atol=1e-6)
    tables.set_form("hidden")
    tables.apply(hidden, residual, 0)
    assert np.array_equal(tables.captures.take(own)[0], hidden[1])


TOWERS = """
from types import SimpleNamespace
from torch import nn
from logsteer_server.engines.vllm.operation import find_layers
from logsteer_server.engines.vllm.runner_v1 import GPUModelRunner, V1Runner


class Listener(nn.Module):
    supports_multimodal = True

    def __init__(self):
        super().__init__()
        self.audio_tower = nn.ModuleList(nn.ReLU() for _ in range(3))
        self.text = nn.Module()
        self.text.layers = nn.ModuleList(nn.Tanh() for _ in range(3))

    def get_language_model(self):
        return self.text


found = find_layers(Listener(), 3)
assert [type(layer).__name__ for layer in found] == ["Tanh"] * 3, found
assert find_layers(Listener(), 4) == []

ended = []
GPUModelRunner._update_states = lambda self, scheduled: "vLLM's"
runner = object.__new__(V1Runner)
runner.draws = SimpleNamespace(end=ended.append)
runner.steering = SimpleNamespace(record=lambda: None, end=ended.append)
idle = SimpleNamespace(finished_req_ids=["a"], scheduled_new_reqs=[], num_scheduled_tokens={})
assert runner._update_states(idle) == "vLLM's"
assert ended == [["a"], "a"]

from logsteer_server.engines.vllm import runner_v2

captured = []
runner_v2.GPUModelRunner.capture_model = lambda self: captured.append(tables.serves)
runner, tables = object.__new__(runner_v2.V2Runner), SimpleNamespace(serves=True)
runner.steering = SimpleNamespace(tables=tables)
runner.capture_model()
assert captured == [False], "graphs are captured with the steering operation in them"
"""


@pytest.mark.engine
def test_layers_are_those_of_the_language_model_and_idle_steps_end_requests() -> None:
    """An audio tower stands in front and has as many; vLLM is imported in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", TOWERS], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("step", ["prompt", "decode"])
@pytest.mark.parametrize(
    ("off", "dtype", "is_wrong"),
    [
        (1e-3, torch.float32, False), (0.1, torch.float32, True), (0.1, torch.bfloat16, False),
        (2.0, torch.bfloat16, True), (float("nan"), torch.bfloat16, True),
    ],
)  # fmt: skip
def test_a_start_ends_where_graphs_are_not_what_their_layers_are(
    monkeypatch: pytest.MonkeyPatch, step: str, off: float, dtype: torch.dtype, is_wrong: bool
) -> None:
    called: list[str] = []

    def call(name: str, *_: Any) -> list[set[str]]:
        called.append(name)
        return [set()]

    def score(_: Any, ids: np.ndarray) -> np.ndarray:
        is_served = called[-1] == "end_stream_probe" and step == "prompt"
        return np.full(len(ids) - 1, off if is_served else 0.0, np.float32)

    def generate(_: Any, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert len(ids) == stream.PROBE_TOKENS - 3
        decoded = off if step == "decode" else 0.0
        return np.zeros(3, np.int32), np.array([9.0, decoded, decoded], np.float32)

    monkeypatch.setattr(stream, "_score", score)
    monkeypatch.setattr(stream, "_generate", generate)
    model = SimpleNamespace(
        dtype=dtype, quantization=None, enforce_eager=False, get_vocab_size=lambda: 99
    )
    vllm: Any = SimpleNamespace(config=SimpleNamespace(model_config=model), call_workers=call)
    if is_wrong:
        with pytest.raises(ValueError, match="set compile: false"):
            stream.check_model_graphs(vllm)
    else:
        stream.check_model_graphs(vllm)
    texts = 1 if is_wrong and step == "prompt" else 2
    assert called == ["begin_stream_probe", "end_stream_probe"] * texts
    model.enforce_eager = True
    stream.check_model_graphs(vllm)
    assert len(called) == 2 * texts, "layers that run one by one are not compared"


# ------------------------------------------------------------------ slots


def test_an_idle_slot_keeps_its_content_until_it_is_needed() -> None:
    pool = SlotPool(2)
    pool.acquire(b"a")
    pool.release(1)
    assert pool.acquire(b"b") == (2, True)
    assert pool.acquire(b"a") == (1, False)


@given(st.lists(st.integers(0, 6), max_size=60))
def test_no_slot_ever_serves_two_keys(keys: list[int]) -> None:
    pool = SlotPool(3)
    held: list[tuple[int, int]] = []
    content: dict[int, int] = {}
    for key in keys:
        found = pool.acquire(bytes([key]))
        if found is None:
            slot, _ = held.pop(0)
            pool.release(slot)
            continue
        slot, is_new = found
        if is_new:
            assert slot not in {other for other, _ in held}
            content[slot] = key
        assert content[slot] == key
        held.append((slot, key))


def test_a_slot_that_could_not_be_filled_is_forgotten() -> None:
    pool = SlotPool(1)
    assert pool.acquire(b"a") == (1, True)
    pool.invalidate(1)
    pool.release(1)
    assert pool.acquire(b"a") == (1, True)
    assert pool.acquire(b"b") is None


def steer_by(size: float) -> ScoreJob:
    site = Site(1, "resid_post", np.full(INFO.hidden_size, size, np.float32))
    ids = np.arange(3, dtype=np.int32)
    return ScoreJob(ids, ids[:1], plan=SteeringPlan((site,)))


def test_plans_are_loaded_together_and_those_that_fail_again() -> None:
    loaded: list[list[int]] = []

    def call(method: str, *args: Any) -> list[Any]:
        if method == "find_stage":
            return [frozenset(range(INFO.num_layers))]
        loaded.append(list(args[0]))
        if len(loaded) == 1:
            raise RuntimeError("no memory")
        return [None]

    slots = SteeringSlots(call, SteeringSize(2 * PLANS_AT_ONCE, 1, 1, 64), INFO)
    jobs = [steer_by(n) for n in range(PLANS_AT_ONCE + 3)]
    taken = list(map(slots.acquire, jobs))
    with pytest.raises(RuntimeError, match="no memory"):
        slots.load_plans()
    for slot in taken:
        slots.release(slot)
    again = [slot.numbers[0] for slot in map(slots.acquire, jobs) if slot is not None]
    slots.load_plans()
    slots.load_plans()
    assert loaded[1:] == [again[:PLANS_AT_ONCE], again[PLANS_AT_ONCE:]]
    assert slots.acquire(jobs[0]) is not None
    slots.load_plans()
    assert len(loaded) == 3

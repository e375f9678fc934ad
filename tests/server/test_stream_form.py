"""Where the residual stream lies in what decoder layers return, found out on toy models."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from logsteer_server.engines.vllm import stream
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.layout import Step
from logsteer_server.engines.vllm.stream import (
    Change,
    StreamProbe,
    UnknownStreamError,
    describe_output,
    find_stream_form,
    split_output,
)
from logsteer_server.engines.vllm.tables import SteeringTables

WIDTH, TOKENS, COUNT = 16, 6, 3
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
        self.layers = [ToyLayer(make_output) for _ in range(COUNT)]
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
    tables.write(Step(captured={0: (np.array([1]), np.array([1]))}))
    own = range(1, 2)
    hidden, residual = torch.randn(2, 4, WIDTH)
    tables.apply(hidden, residual, 0)
    assert np.allclose(tables.captures.take(own)[0], (hidden + residual)[1], atol=1e-6)
    tables.captures.clear(own)
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
runner.steering = SimpleNamespace(record=lambda: None, end=ended.append)
idle = SimpleNamespace(finished_req_ids=["a"], scheduled_new_reqs=[], num_scheduled_tokens={})
assert runner._update_states(idle) == "vLLM's"
assert ended == ["a"]

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
            stream.ask_graphs(vllm)
    else:
        stream.ask_graphs(vllm)
    texts = 1 if is_wrong and step == "prompt" else 2
    assert called == ["begin_stream_probe", "end_stream_probe"] * texts
    model.enforce_eager = True
    stream.ask_graphs(vllm)
    assert len(called) == 2 * texts, "layers that run one by one are not compared"

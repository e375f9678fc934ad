"""How often a step, a plan and an answer of the steering operation cross to the device and back.

Everything that crosses goes through `staging`, and every other operation of torch is a launch on a
GPU. Nothing is launched here but what stands outside the captured graph.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from logsteer_server.contract.plan import (
    Condition,
    Positions,
    Probe,
    ResidualOp,
    Site,
    SteeringPlan,
)
from logsteer_server.engines.readings import ReadRequest
from logsteer_server.engines.vllm import staging
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.extra_args import READ, STEER
from logsteer_server.engines.vllm.steering import MeasureWish, StageMeasurements, StepSteering

WIDTH, REQUESTS, PROMPT = 4, 64, 3
VIEWS = ("view", "select", "slice", "unbind", "unsqueeze", "expand", "alias", "flatten", "detach")
VIEWS += ("lift_fresh", "empty")
WAITS = ("_local_scalar_dense", "nonzero", "item", "equal")
"""Operations for which the host would wait."""


@dataclass
class Crossings(TorchDispatchMode):
    """Copies to the device, copies back, and launches, since they were last taken."""

    sent: int = 0
    fetched: int = 0
    launched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.").rstrip("_")
        if not self.inside and not name.startswith(VIEWS):
            self.launched.append(name)
        return func(*args, **(kwargs or {}))

    def take(self) -> tuple[int, int, int]:
        """What was counted. Errors: AssertionError where the host would have waited unseen."""
        assert not {name for name in self.launched if name in WAITS}, self.launched
        found = self.sent, self.fetched, len(self.launched)
        self.sent, self.fetched, self.launched = 0, 0, []
        return found


@pytest.fixture
def crossings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crossings]:
    """Count what crosses, as if the device were another."""
    counted = Crossings()

    def count(name: str, way: str) -> None:
        cross = getattr(staging, name)

        def crossed(*args: Any) -> Any:
            setattr(counted, way, getattr(counted, way) + 1)
            counted.inside = True
            found = cross(*args)
            counted.inside = False
            return found

        monkeypatch.setattr(staging, name, crossed)

    count("send", "sent")
    count("write", "sent")
    count("fetch", "fetched")
    with counted:
        yield counted


def unit(*values: float) -> np.ndarray:
    vector = np.array([*values, *[0.0] * (WIDTH - len(values))], np.float32)
    return vector / np.linalg.norm(vector)


def make_plan(layers: range, kept: bool = False, asks: bool = False) -> SteeringPlan:
    """Add and ablate at each layer; with a probe that is kept; where the prompt passes it."""
    op = ResidualOp(unit(1, 1), condition=0 if asks else None)
    sites = tuple(Site(layer, "resid_post", unit(layer + 1), (op,)) for layer in layers)
    probes = (Probe(0, "resid_post", unit(0, 1)),) if kept or asks else ()
    conditions = (Condition(0, above=0.0, of="prompt"),) if asks else ()
    return SteeringPlan(sites, Positions(), probes, conditions, "all" if kept else "none")


class Rank:
    """Steering of one rank as a GPU's, whose passes are left out."""

    def __init__(self, layers: int, plan: SteeringPlan) -> None:
        size = SteeringSize(4, 2, 2, 0)
        self.steering = StepSteering(size, layers, PROMPT * REQUESTS, WIDTH, torch.empty(0))
        self.steering.tables.by_kernel = True
        self.plan = plan
        self.positions: dict[str, int] = {}

    def load(self) -> None:
        self.steering.tables.load({1: self.plan})

    def begin(self, name: str) -> None:
        extra_args: dict[str, Any] = {STEER: (((1, Positions()),), PROMPT)}
        if self.plan.probes:
            extra_args[READ] = (1, ReadRequest.of(self.plan, PROMPT))
        self.steering.begin(name, extra_args, 0)
        self.positions[name] = 0

    def step(self, tokens: int = 1) -> None:
        """Record the last step and mark the next: so many tokens of each request."""
        self.steering.record()
        starts = np.arange(len(self.positions) + 1) * tokens
        self.steering.mark(list(self.positions), starts, np.array([*self.positions.values()]))
        self.positions = {name: at + tokens for name, at in self.positions.items()}

    def measure(self, *names: str) -> dict[str, StageMeasurements]:
        wish = partial(MeasureWish, traces=not self.plan.probes, reads=True, rows=None)
        return self.steering.measure({name: wish(self.positions[name]) for name in names})

    def end(self, names: list[str]) -> None:
        found = self.measure(*names)
        assert found.keys() == set(names)
        for name in names:
            self.steering.end(name)
            del self.positions[name]


def start(layers: int, plan: SteeringPlan) -> Rank:
    rank = Rank(layers, plan)
    rank.load()
    for n in range(REQUESTS):
        rank.begin(f"r{n}")
    return rank


def test_steered_tokens_cross_where_requests_come_and_go_alone(crossings: Crossings) -> None:
    rank = start(6, make_plan(range(6)))
    rank.step(tokens=PROMPT - 1)
    rank.step()
    crossings.take()
    for _ in range(70):
        rank.step()
    assert crossings.take() == (0, 0, 0)
    rank.end(["r3", "r5"])
    assert crossings.take() == (1, 1, 1)  # which entries; their sums, of all layers
    rank.step()
    assert crossings.take() == (1, 0, 0)


def test_readings_cross_when_somebody_asks(crossings: Crossings) -> None:
    rank = start(3, make_plan(range(1), kept=True))
    rank.step(tokens=PROMPT)
    rank.step()
    rank.step()
    crossings.take()
    for _ in range(20):
        rank.step()
    assert crossings.take() == (0, 0, 20)  # a gather each
    taken = rank.measure("r7")["r7"].readings
    assert taken is not None and len(taken.values_TGR) == PROMPT + 22
    assert crossings.take() == (0, 1, 2)  # the last step's, and all of them joined
    assert rank.measure("r8")["r8"].readings is not None
    assert crossings.take() == (0, 0, 0)


def test_what_prompts_decide_stays_on_the_device(crossings: Crossings) -> None:
    rank = start(3, make_plan(range(2), asks=True))
    rank.step(tokens=PROMPT)
    crossings.take()
    rank.step()
    sent, fetched, launched = crossings.take()
    assert (sent, fetched) == (3, 0)  # the prompts' ends; which readings to keep; the marks
    assert launched < 30
    rank.step()
    crossings.take()
    rank.step()
    assert crossings.take() == (0, 0, 1)


@pytest.mark.parametrize("layers", [1, 80])
def test_a_plan_crosses_once(crossings: Crossings, layers: int) -> None:
    rank = Rank(layers, make_plan(range(layers), asks=True))
    crossings.take()
    rank.load()
    sent, fetched, launched = crossings.take()
    assert (sent, fetched) == (1, 0)
    assert launched == 9

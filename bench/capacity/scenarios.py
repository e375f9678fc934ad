"""The fleets that the page shows, simulated: what comes, in front of what, for how long.

All are of the 18 M model on a core each, as measured here, and of one workload (`WORKLOAD`), but
for what a scenario's name says.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.capacity.plan import Rates, Workload, make_shape
from bench.capacity.rates import TOKEN_BYTES, WEIGHTS, read_cost, read_lengths, read_section
from bench.capacity.report import summarize
from bench.capacity.simulation import Fleet, FleetShape
from bench.capacity.traffic import Mix, draw_requests

SIMULATED = Path(__file__).with_name("simulated.json")
LENGTHS = "WikiText-2 paragraphs"
PEAK_S = 120.0
SEED = 1
SHOWN = (
    "scored_per_s", "utilisation", "wait_p50_s", "wait_p95_s", "wait_p99_s", "latency_p50_s",
    "latency_p95_s", "latency_p99_s", "hit_share", "lost", "repeated", "failures", "http_cores",
)  # fmt: skip
REPLICAS = (5, 6, 7, 8, 9)
SIZES = (1, 4, 16, 64)
PREFIX_LOAD = 0.6
CROWDED = {"prefix_tokens": 1024, "groups": 400}
CROWDED_S = 9600.0
INGRESSES = (1, 4, 16)
LARGE = 100
KILLED_EVERY_S = 120.0


def make_workload() -> Workload:
    """Return the workload that the page works out."""
    return Workload(1e9, read_lengths(LENGTHS), latency_s=2.0)


def make_rates(model: str) -> Rates:
    """Return what was measured here of a model, on a core each."""
    http = read_section("http")
    shape = http["shapes"]["16 long texts"]
    return Rates(
        read_cost(model),
        cache_tokens=131_072,
        http_request_s=1e-6 * http["http"]["request_us"],
        http_token_s=1e-6 * http["http"]["token_us"],
        text_bytes=(shape["bytes_in"] + shape["bytes_out"]) / shape["tokens"],
        weights_bytes=WEIGHTS[model],
        token_bytes=TOKEN_BYTES[model],
        restart_s=20.0,
        replicas_a_machine=2,
    )


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet and what comes to it, for so many seconds."""

    shape: FleetShape
    mix: Mix
    seconds: float = PEAK_S

    def run(self) -> dict[str, float]:
        """Return the figures of a run."""
        found = summarize(Fleet(self.shape, SEED).run(draw_requests(self.mix, self.seconds, SEED)))
        return {name: float(f"{found[name]:.4g}") for name in SHOWN}


def at_load(mix: Mix, shape: FleetShape, load: float) -> Mix:
    """Return what keeps a fleet at work so much of the time, were no prefix found."""
    read = mix.items * (mix.mean_length + mix.prefix_tokens)
    cost = shape.engine.cost
    full = cost.rate(shape.engine.step_tokens, read / mix.items)
    return replace(mix, per_s=load * shape.replicas * full / read)


def make_scenarios() -> dict[str, Scenario]:
    """Return all scenarios of the tables, by name."""
    load, rates = make_workload(), make_rates("18 M")
    mix = load.make_mix()

    def shape(replicas: int, **fields: Any) -> FleetShape:
        return make_shape(load, rates, replicas, **fields)

    found: dict[str, Scenario] = {}
    for number in REPLICAS:
        found[f"{number} replicas"] = Scenario(shape(number), mix)
        found[f"{number} replicas, bursts"] = Scenario(shape(number), load.make_mix(burst=2.0))
    small = replace(shape(6).engine, step_tokens=2048)
    found["steps of 2,048 tokens"] = Scenario(replace(shape(6), engine=small), mix)
    for number in SIZES:
        for worth in (4.0, 0.0):
            own = shape(number, prefix_worth=worth)
            name = f"{number} replicas, many prefixes, worth {worth:g}"
            crowded = at_load(replace(mix, items=1, **CROWDED), own, PREFIX_LOAD)
            found[name] = Scenario(own, crowded, CROWDED_S / number)
    tail = np.exp(1.5 * np.array([_find_normal(p) for p in np.linspace(0.001, 0.999, 201)]))
    tail = np.minimum(tail * mix.mean_length / float(tail.mean()), 8000)
    for name, lengths in (
        ("all as long as the mean", (mix.mean_length,) * 2),
        ("a long tail", tuple(np.round(tail, 1).tolist())),
    ):
        own_mix = replace(mix, lengths=lengths)
        own_mix = replace(own_mix, per_s=mix.scored_per_s / own_mix.items / own_mix.mean_length)
        found[name] = Scenario(shape(6), own_mix)
    found["killed"] = Scenario(shape(7, fails_every_s=KILLED_EVERY_S), mix)
    found["one less"] = found["6 replicas"]
    found["changed"] = Scenario(shape(7, changes_at=5.0), mix, 200)
    ray = read_section("ray")["http"]
    for number in INGRESSES:
        own = shape(
            LARGE,
            ingresses=number,
            on_ray=True,
            http_request_s=1e-6 * ray["request_us"],
            http_text_s=1e-6 * (ray["text_us"] + ray["token_us"] * (mix.mean_length + 256)),
        )
        found[f"{LARGE} replicas on Ray, {number} ingresses"] = Scenario(
            own, at_load(mix, own, PREFIX_LOAD), 20
        )
    return found


def _find_normal(share: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(share)


def read_simulated() -> Mapping[str, Mapping[str, float]]:
    """Return the figures of all scenarios, as they were when they were last run."""
    found: dict[str, dict[str, float]] = json.loads(SIMULATED.read_text())
    return found


def write_simulated() -> None:
    """Run all scenarios, and keep their figures."""
    found = {name: scenario.run() for name, scenario in make_scenarios().items()}
    SIMULATED.write_text(json.dumps(found, indent=1) + "\n")

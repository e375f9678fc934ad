"""From a workload and measured rates to a fleet: each step with its formula and its value."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from bench.capacity.engine import EngineShape, StepCost
from bench.capacity.simulation import FleetShape
from bench.capacity.theory import availability
from bench.capacity.traffic import Mix

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked for. `lengths` are quantiles of a text's own tokens, all of which are scored;
    each text has one of `groups` prefixes in front.
    """

    tokens_per_day: float
    lengths: Sequence[float]
    texts: int = 16
    """Texts of a request."""
    prefix_tokens: int = 256
    groups: int = 64
    peak_to_mean: float = 2.0
    latency_s: float = 10.0
    """What 95 of 100 requests are to be answered within, at the peak."""
    availability: float = 0.9999
    """How much of the time there are enough replicas for the peak."""

    @property
    def mean_length(self) -> float:
        """A text's own tokens in the mean."""
        return Mix(1, lengths=self.lengths).mean_length

    def make_mix(self, burst: float = 1.0) -> Mix:
        """Return what comes at the peak."""
        texts_per_s = self.tokens_per_day / DAY_S * self.peak_to_mean / self.mean_length
        return Mix(
            texts_per_s / self.texts, self.texts, self.lengths, self.prefix_tokens, self.groups,
            burst,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured of a machine, or is given by whoever plans; times in seconds.

    `cost`, `step_tokens`, `cache_tokens` are of a replica's engine; what a request, a text and a
    token take of HTTP, of one core. A replica is lost every `fails_every_s`.
    """

    cost: StepCost
    step_tokens: int = 8192
    cache_tokens: int = 262_144
    http_request_s: float = 0.0
    http_token_s: float = 0.0
    http_core_share: float = 0.6
    """Share of a core at which another ingress is planned."""
    text_bytes: float = 0.0
    """Of JSON, in and out, for each scored token."""
    weights_bytes: float = 0.0
    token_bytes: float = 0.0
    """Of keys and values."""
    restart_s: float = 20.0
    fails_every_s: float = 7 * DAY_S
    replicas_a_machine: int = 1

    @classmethod
    def of_rate(cls, per_s: float, step_s: float, **others: float) -> "Rates":
        """Return the rates of a replica that reads so many tokens a second when its steps are full,
        of which `step_s` seconds are fixed. Errors: ValueError where a step has no time left.
        """
        own = cls(StepCost(step_s, 0.0), **others)  # type: ignore[arg-type]
        token_s = 1 / per_s - step_s / own.step_tokens
        if token_s <= 0:
            raise ValueError(f"a step of {own.step_tokens} tokens takes less than {step_s:g} s")
        return cls(StepCost(step_s, token_s), **others)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the arithmetic: a name, how it is found, its value and unit."""

    name: str
    formula: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A fleet: its steps, and what the simulation is asked of it."""

    steps: Sequence[Step]
    needed: int
    """Replicas at work at the peak."""
    replicas: int
    """With those that may be down or changed."""
    ingresses: int

    def find(self, name: str) -> float:
        """Return a step's value."""
        return next(step.value for step in self.steps if step.name == name)


def plan_fleet(
    load: Workload, rates: Rates, *, hit_share: float, utilisation: float, needed: int | None = None
) -> Plan:
    """Plan a fleet, whose replicas are at work so much of the time and find so much of the prefixes
    (the simulation says how much it is); `needed`, where the bound of latency wants more replicas.
    """
    length, prefix = load.mean_length, load.prefix_tokens
    mean = load.tokens_per_day / DAY_S
    peak = mean * load.peak_to_mean
    read = length + prefix * (1 - hit_share)
    full = rates.cost.rate(rates.step_tokens, read, prefix * hit_share)
    scored = full * length / read
    traffic = peak / scored
    least = max(1, ceil(traffic / utilisation))
    wanted = max(least, needed or 0)
    up = rates.fails_every_s / (rates.fails_every_s + rates.restart_s)
    replicas = wanted + 1
    while availability(replicas - 1, wanted, up) < load.availability:
        replicas += 1
    requests = peak / (length * load.texts)
    http = requests * rates.http_request_s + peak / length * (length + prefix) * rates.http_token_s
    ingresses = max(2, ceil(http / rates.http_core_share))
    cache = 8 * rates.step_tokens + load.groups * prefix
    machines = ceil(replicas / rates.replicas_a_machine)
    steps = [
        Step("mean", "tokens a day / 86,400", mean, "tokens/s"),
        Step("peak", "mean x peak to mean", peak, "tokens/s"),
        Step("texts", "peak / L", peak / length, "1/s"),
        Step("requests", "texts / texts a request", requests, "1/s"),
        Step("read", "L + P (1 - h)", read, "tokens a text"),
        Step("full steps", "B / (a + b B + c N + d A)", full, "tokens/s, read"),
        Step("a replica", "full steps x L / read", scored, "tokens/s, scored"),
        Step("traffic", "peak / a replica", traffic, "replicas at work"),
        Step("by load", "traffic / rho, rounded up", least, "replicas"),
        Step("needed", "more where p95 is above its bound", wanted, "replicas"),
        Step(
            "fleet",
            "least N: of N - 1, `needed` are up for the availability asked",
            replicas,
            "replicas",
        ),
        Step("HTTP", "requests x r + texts x (L + P) x t", http, "cores"),
        Step("ingresses", "HTTP / share of a core, 2 at least", ingresses, "processes"),
        Step(
            "memory",
            "weights + cache for 8 B + G P tokens",
            (rates.weights_bytes + cache * rates.token_bytes) / 2**30,
            "GiB a replica",
        ),
        Step("network", "peak x bytes a token", peak * rates.text_bytes / 1e6, "MB/s"),
        Step("disk", "weights, on each machine", rates.weights_bytes / 2**30, "GiB a machine"),
        Step("cost", "24 N / replicas a machine", 24 * machines, "machine-hours a day"),
    ]
    return Plan(steps, wanted, replicas, ingresses)


def make_shape(load: Workload, rates: Rates, replicas: int, **others: object) -> FleetShape:
    """Return the fleet of a plan for the simulation."""
    engine = EngineShape(rates.cost, rates.step_tokens, cache_tokens=rates.cache_tokens)
    text_s = rates.http_token_s * (load.mean_length + load.prefix_tokens)
    fields = {"http_request_s": rates.http_request_s, "http_text_s": text_s} | others
    return FleetShape(engine, replicas, restart_s=rates.restart_s, **fields)  # type: ignore[arg-type]

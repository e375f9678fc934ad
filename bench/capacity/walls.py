"""What becomes the wall at 10, 100 and 1,000 replicas: figures measured here, by the number."""

from collections.abc import Iterator
from math import ceil

from bench.capacity.plan import plan_fleet
from bench.capacity.rates import read_section
from bench.capacity.scenarios import make_rates, make_workload

SIZES = (10, 100, 1000)
CORE_SHARE = 0.6
PENDING_TOKENS = 8_000_000
"""The default of `max_pending_tokens`."""
STEPS_A_REPLICA = 2
"""Steps' worth of tokens that a replica needs so as not to pause: one is read, one waits."""
STEPS_PER_S = 50
"""Of a fast engine; each step's answers are a message."""
ASKED = 4
"""How often a text is asked, where the result cache is shown."""
HEALTH_EVERY_S = 5
Row = tuple[str, str, str, str, str, str]


def list_walls() -> Iterator[Row]:
    """Yield rows: what it is, its figure, what it comes to at each of SIZES, what to do."""
    load, rates = make_workload(), make_rates("18 M")
    plan = plan_fleet(load, rates, hit_share=0.9, utilisation=0.8)
    texts = plan.find("a replica") / load.mean_length
    tokens = load.mean_length + load.prefix_tokens
    http, ray = read_section("http")["http"], read_section("ray")
    decisions, members = read_section("decisions"), read_section("membership")

    def count_cores(cost: dict[str, float]) -> float:
        """Return the cores that a replica's requests take of a process."""
        a_text = cost["request_us"] / load.texts + cost.get("text_us", 0.0)
        return 1e-6 * texts * (a_text + tokens * cost["token_us"])

    def show_cores(cores: float) -> tuple[str, str, str]:
        return tuple(f"{cores * n:.2g} cores" for n in SIZES)  # type: ignore[return-value]

    def by_size(section: dict[str, dict[str, float]], name: str) -> list[float]:
        return [section[str(n)][name] for n in SIZES]

    one, own = count_cores(http), count_cores(ray["http"])
    yield (
        "HTTP on one machine",
        f"{http['request_us']:.0f} µs a request, {http['token_us']:.2g} a token",
        *show_cores(one),
        f"One process has one core: full at {CORE_SHARE / one:.0f} such replicas. More texts a "
        "request; ids instead of text; then Ray, or several servers behind a balancer.",
    )  # fmt: skip
    yield (
        "an ingress on Ray",
        f"{ray['http']['request_us']:.0f} µs a request, {ray['http']['text_us']:.2g} a text, "
        f"{ray['http']['token_us']:.2g} a token",
        *show_cores(own),
        f"The first wall of short requests: a core has {1e6 / ray['http']['request_us']:.0f} a "
        "second, however small. More texts a request; more ingresses.",
    )
    yield (
        "Serve's proxy", f"{ray['proxy']['request_us']:.0f} µs a request", *show_cores(
            count_cores(ray["proxy"])),
        "One a node: let clients reach the proxies of several nodes, not the head's alone.",
    )  # fmt: skip
    yield (
        "choice of a replica", "µs a text with a prefix: " + ", ".join(
            f"{us:.0f}" for us in by_size(decisions, "route_long_us")),
        *(f"{1e-6 * us * texts * n:.2g} cores" for n, us in
          zip(SIZES, by_size(decisions, "route_long_us"), strict=True)),
        "Hardly grows with replicas: no wall before HTTP is one.",
    )  # fmt: skip
    messages = by_size(decisions, "message_us")
    yield (
        "answers of steps", f"µs a message: {', '.join(f'{us:.1f}' for us in messages)}",
        *(f"{1e-6 * us * STEPS_PER_S * n:.2g} cores"
          for n, us in zip(SIZES, messages, strict=True)),
        f"Shown for {STEPS_PER_S} steps a second. More ingresses share them.",
    )  # fmt: skip
    beat = members["beat_us"]
    yield (
        "heartbeats", f"{beat:.1f} µs each, one a second and process",
        *(f"{1e-6 * beat * n:.2g} cores" for n in SIZES),
        "On one machine alone: on Ray they end in the actor. No wall.",
    )  # fmt: skip
    table = decisions["table_bytes"]
    yield (
        "memory of prefixes", f"{table / 1e3:.0f} kB a replica, in each ingress",
        *(f"{table * n / 1e6:.0f} MB" for n in SIZES),
        "At 1,000 it is the largest part of an ingress: split the fleet by model or by tenant.",
    )  # fmt: skip
    need = STEPS_A_REPLICA * rates.step_tokens
    yield (
        "budget of tokens", f"`max_pending_tokens` {PENDING_TOKENS:,} an ingress",
        *(f"{need * n / PENDING_TOKENS:.0%}" for n in SIZES),
        f"Two steps for each replica: from {PENDING_TOKENS // need} replicas an ingress on, it "
        "answers `overloaded` while replicas rest. Raise it with the fleet.",
    )  # fmt: skip
    ingresses = [max(2, ceil(own * n / CORE_SHARE)) for n in SIZES]
    yield (
        "connections", "each ingress has one to each actor; not measured",
        *(f"{k * n:,} ({k} x {n:,})" for k, n in zip(ingresses, SIZES, strict=True)),
        "Serve groups that share no model: an application for each.",
    )  # fmt: skip
    computed = [k * (1 - (1 - 1 / k) ** ASKED) for k in ingresses]
    yield (
        "result cache", f"each ingress has its own; a text asked {ASKED} times is computed",
        *(f"{times:.2g} times" for times in computed),
        "Send what repeats to one ingress, or run it with the client's own file.",
    )  # fmt: skip
    yield (
        "taking actors", "ms of CPU for all at once, and for one that is replaced: "
        + "; ".join(f"{first:.2g}, {one:.2g}" for first, one in zip(
            by_size(members, "take_all_ms"), by_size(members, "replace_one_ms"), strict=True)),
        *(f"{1e-3 * ms * n:.2g} s" for n, ms in
          zip(SIZES, by_size(members, "replace_one_ms"), strict=True)),
        "Shown for a change of all, in each ingress: no wall.",
    )  # fmt: skip
    series = members[str(SIZES[0])]["ray_series"]
    yield (
        "metrics", f"{series:.0f} series a replica in each ingress on Ray, "
        f"{members[str(SIZES[0])]['machine_series']:.0f} on one machine",
        *(f"{series * k * n:,.0f} series" for k, n in zip(ingresses, SIZES, strict=True)),
        "Drop `replica` when scraping, from some 100 replicas on.",
    )  # fmt: skip
    yield (
        "Serve's controller",
        f"{ray['controller_idle_cores']:.2g} cores with 3 actors at rest; beyond that not measured",
        *(f"{n / HEALTH_EVERY_S:.0f} checks/s" for n in SIZES),
        f"It asks each actor every {HEALTH_EVERY_S} s, and tells each ingress of all of them after "
        "each change. It is one process: measure it before 1,000.",
    )
    out = plan.find("a replica") * rates.text_bytes / 1e6
    yield (
        "network", f"{rates.text_bytes:.0f} bytes of JSON a scored token",
        *(f"{out * n:.0f} MB/s" for n in SIZES),
        "MessagePack, or fewer columns.",
    )  # fmt: skip

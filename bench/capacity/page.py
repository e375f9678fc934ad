"""docs/capacity.md: the template beside this file, filled with what was measured and simulated."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from bench.capacity.plan import DAY_S, Plan, plan_fleet
from bench.capacity.rates import MODELS, read_section
from bench.capacity.scenarios import (
    CROWDED,
    INGRESSES,
    KILLED_EVERY_S,
    LARGE,
    REPLICAS,
    SIZES,
    make_rates,
    make_workload,
    read_simulated,
)
from bench.capacity.steps import BENCH
from bench.capacity.walls import list_walls
from logsteer_server.reference import tabulate

PAGE = BENCH.parent / "docs" / "capacity.md"
TEMPLATE = Path(__file__).with_name("capacity.md.j2")
Figures = Mapping[str, float]


def plan_models() -> dict[str, Plan]:
    """Return the plan of each model measured here, with the replicas that the simulation asks for
    and the prefixes that it finds.
    """
    load, simulated = make_workload(), read_simulated()
    found = {}
    for model in MODELS:
        needed = find_needed() if model == "18 M" else 1
        hit_share = simulated[f"{find_needed()} replicas"]["hit_share"]
        found[model] = plan_fleet(
            load, make_rates(model), hit_share=hit_share, utilisation=0.8, needed=needed
        )
    return found


def find_needed() -> int:
    """Return the fewest replicas of the 18 M model that keep the bound of latency."""
    load, simulated = make_workload(), read_simulated()
    return next(n for n in REPLICAS if simulated[f"{n} replicas"]["latency_p95_s"] < load.latency_s)


def tabulate_plan() -> str:
    """Return the arithmetic, with a column for each model."""
    plans = plan_models()
    first = plans[MODELS[0]]
    rows = [
        (
            own.name,
            own.formula,
            *(write_number(plans[model].find(own.name)) for model in MODELS),
            own.unit,
        )
        for own in first.steps
    ]
    return join(("step", "formula", *(f"{model} model" for model in MODELS), "unit"), rows)


def tabulate_rates() -> str:
    """Return what the plan takes, what measures it, and what was measured here."""
    rates = [make_rates(model) for model in MODELS]
    steps = [read_section("steps")[model] for model in MODELS]

    def pick(name: str) -> tuple[str, ...]:
        return tuple(write_number(own[name]) for own in steps)

    http = read_section("http")["http"]
    both = [
        ("a", "ms, fixed part of a step", "`bench.capacity.steps`", *pick("fixed_ms")),
        ("b", "µs for each token read", "`bench.capacity.steps`", *pick("token_us")),
        ("c", "µs for each text", "`bench.capacity.steps`", *pick("sequence_us")),
        ("d", "ns for each pair of attention", "`bench.capacity.steps`", *pick("pair_ns")),
        ("B", "tokens of a step", "`max_num_batched_tokens`",
         *(f"{own.step_tokens:,}" for own in rates)),
        ("r", "µs of HTTP for a request", "`bench.capacity.ingress`",
         *[write_number(http["request_us"])] * 2),
        ("t", "µs of HTTP for a token", "`bench.capacity.ingress`",
         *[write_number(http["token_us"])] * 2),
        ("W", "MiB of weights", "the checkpoint",
         *(write_number(own.weights_bytes / 2**20) for own in rates)),
        ("K", "bytes of keys and values, a token", "2 x layers x heads x width x bytes",
         *(f"{own.token_bytes:,}" for own in rates)),
        ("s", "s until a lost replica is back", "row `start`; with Ray 5 to 20",
         *(write_number(own.restart_s) for own in rates)),
    ]  # fmt: skip
    return join(("", "what", "measured by", *(f"{model} model" for model in MODELS)), both)


def tabulate_waiting() -> str:
    """Return waiting and latency against the number of replicas, with and without bursts."""
    simulated = read_simulated()
    rows = []
    for number in REPLICAS:
        even, burst = simulated[f"{number} replicas"], simulated[f"{number} replicas, bursts"]
        names = ("wait_p95_s", "latency_p50_s", "latency_p95_s")
        times = [write_number(even[name]) for name in names]
        bursts = write_number(burst["latency_p95_s"])
        rows.append((str(number), f"{even['utilisation']:.0%}", *times, bursts))
    return join(("replicas", "at work", "wait p95", "p50", "p95", "p95 with bursts"), rows)


def tabulate_prefixes() -> str:
    """Return what is found of prefixes, routed by them and by load alone."""
    simulated, rows = read_simulated(), []
    for number in SIZES:
        own = [simulated[f"{number} replicas, many prefixes, worth {worth}"] for worth in (4, 0)]
        shares = [f"{each['hit_share']:.0%}" for each in own]
        rows.append((str(number), *shares, *(f"{each['utilisation']:.0%}" for each in own)))
    head = ("replicas", "found, by prefix", "found, by load", "at work, by prefix",
            "at work, by load")  # fmt: skip
    return join(head, rows)


CHANGES = {
    "7 replicas": "seven, nothing happens",
    "one less": "six: one is away for good",
    "killed": f"seven, each killed every {KILLED_EVERY_S:g} s",
    "changed": "seven, changed one after another",
    "steps of 2,048 tokens": "six, with steps of 2,048 tokens",
    "all as long as the mean": "six, all texts as long as the mean",
    "a long tail": "six, lengths with a long tail",
}


def tabulate_changes() -> str:
    """Return what failures, changes and other lengths do to the worked fleet."""
    simulated, rows = read_simulated(), []
    for name, words in CHANGES.items():
        own = simulated[name]
        times = [write_number(own[key]) for key in ("latency_p50_s", "latency_p95_s")]
        faults = (f"{own['failures']:.0f}", f"{own['repeated']:.1%}", f"{own['lost']:.0f}")
        rows.append((words, f"{own['utilisation']:.0%}", *times, *faults))
    head = ("fleet", "at work", "p50", "p95", "failures", "read again", "requests lost")
    return join(head, rows)


def tabulate_ingresses() -> str:
    """Return what several ingresses on Ray, which do not know of one another, do to a fleet."""
    simulated, rows = read_simulated(), []
    for number in INGRESSES:
        own = simulated[f"{LARGE} replicas on Ray, {number} ingresses"]
        rows.append((str(number), f"{own['http_cores'] / number:.0%}", f"{own['hit_share']:.0%}",
                     *(write_number(own[f"latency_p{p}_s"]) for p in (50, 95))))  # fmt: skip
    return join(("ingresses", "of a core, each", "prefixes found", "p50", "p95"), rows)


def tabulate_reality() -> str:
    """Return measured and predicted figures."""
    rows = []
    for name, found in sorted(read_section("reality").items()):
        for case, own in found.items():
            if isinstance(own, Mapping):
                cells = [
                    " / ".join(map(write_number, own[key]))
                    for key in ("scored_per_s", "busy_s", "latency_p50_s", "latency_p95_s")
                ]
                others = own.get("others_cores")
                rows.append((name, case, *cells, "unknown" if others is None else str(others)))
    head = ("requests come", "tokens/s", "CPU of engines", "p50", "p95", "others")
    return join(("model, replicas", *head), rows)


def tabulate_walls() -> str:
    """Return what becomes the wall, and where."""
    return join(("", "figure", "10", "100", "1,000", "the wall, and what to do"), list_walls())


def join(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown."""
    return "".join(tabulate(head, rows)).rstrip("\n")


def write_number(value: Any) -> str:
    """Return a number with three digits, or with commas from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def write_page() -> str:
    """Return the page."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False  # noqa: S701
    )  # fmt: skip
    load, plans = make_workload(), plan_models()
    values = {
        "rates": tabulate_rates(),
        "plan": tabulate_plan(),
        "waiting": tabulate_waiting(),
        "prefixes": tabulate_prefixes(),
        "changes": tabulate_changes(),
        "ingresses": tabulate_ingresses(),
        "reality": tabulate_reality(),
        "walls": tabulate_walls(),
        "load": load,
        "fails_days": make_rates("18 M").fails_every_s / DAY_S,
        "crowded": CROWDED,
        "cache_tokens": make_rates("18 M").cache_tokens,
        "lengths": read_section("lengths"),
        "steps": read_section("steps"),
        "measured": {"ray": read_section("ray"), "http": read_section("http")},
        "simulated": read_simulated(),
        "large": plans["18 M"],
        "demo": plans["demo"],
        "number": write_number,
    }
    return environment.from_string(TEMPLATE.read_text()).render(values)

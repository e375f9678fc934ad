"""Plans a fleet: the arithmetic of docs/capacity.md with your figures, checked by the simulation.

    .venv/bin/python -m bench.capacity --tokens-per-day 1e9 --rate 5400 --step-ms 7
    .venv/bin/python -m bench.capacity --write          run all scenarios, write the page anew
    .venv/bin/python -m bench.capacity --check          fail where the page is not what they say

Without --rate the rates are those measured here, of the 18 M model on one core of a CPU.
"""

import argparse
import sys
from dataclasses import fields, replace

from bench.capacity.engine import count_pairs
from bench.capacity.page import PAGE, write_number, write_page
from bench.capacity.plan import Plan, Rates, Workload, make_shape, plan_fleet
from bench.capacity.report import summarize
from bench.capacity.scenarios import SHOWN, make_rates, make_workload, write_simulated
from bench.capacity.simulation import Fleet
from bench.capacity.theory import wait_gk
from bench.capacity.traffic import draw_requests
from logsteer_server.reference import tabulate

MOST = 3
"""Times the traffic, up to which replicas are tried for the latency asked."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.capacity", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    load, rates = make_workload(), make_rates("18 M")
    workload = parser.add_argument_group("the workload")
    workload.add_argument("--tokens-per-day", type=float, default=1e9, help="scored tokens")
    workload.add_argument("--length", type=float, help="tokens of a text, all the same; else as of "
                          "WikiText-2 paragraphs")  # fmt: skip
    workload.add_argument("--texts", type=int, default=load.texts, help="texts of a request")
    workload.add_argument("--prefix-tokens", type=int, default=load.prefix_tokens)
    workload.add_argument("--groups", type=int, default=load.groups, help="prefixes in use at once")
    workload.add_argument("--peak-to-mean", type=float, default=load.peak_to_mean)
    workload.add_argument("--latency-s", type=float, default=load.latency_s, help="95th percentile")
    workload.add_argument("--availability", type=float, default=load.availability)
    workload.add_argument("--burst", type=float, default=1.0,
                          help="spells of so many times the rate, within the peak")  # fmt: skip
    own = parser.add_argument_group("your machine")
    own.add_argument("--rate", type=float, help="tokens/s that a replica reads, its steps full")
    own.add_argument("--step-ms", type=float, default=0.0, help="fixed part of a step, with --rate")
    own.add_argument("--step-tokens", type=int, default=rates.step_tokens)
    own.add_argument("--cache-tokens", type=int, default=rates.cache_tokens)
    own.add_argument("--restart-s", type=float, default=rates.restart_s)
    own.add_argument("--fails-every-h", type=float, default=rates.fails_every_s / 3600)
    own.add_argument("--weights-gib", type=float, default=rates.weights_bytes / 2**30)
    own.add_argument("--token-bytes", type=float, default=rates.token_bytes,
                     help="keys and values of a token")  # fmt: skip
    own.add_argument("--replicas-a-machine", type=int, default=rates.replicas_a_machine)
    parser.add_argument("--seconds", type=float, default=60.0, help="simulated, of the peak")
    parser.add_argument("--write", action="store_true", help="run all scenarios, write the page")
    parser.add_argument("--render", action="store_true", help="write the page from figures kept")
    parser.add_argument("--check", action="store_true", help="fail where the page is stale")
    return parser.parse_args(argv)


def read_workload(given: argparse.Namespace) -> Workload:
    """Return the workload of the arguments."""
    names = {field.name for field in fields(Workload)} & vars(given).keys()
    lengths = (given.length,) * 2 if given.length else make_workload().lengths
    return Workload(lengths=lengths, **{name: getattr(given, name) for name in names})


def read_rates(given: argparse.Namespace) -> Rates:
    """Return the rates of the arguments."""
    rates = replace(
        make_rates("18 M"),
        step_tokens=given.step_tokens,
        cache_tokens=given.cache_tokens,
        restart_s=given.restart_s,
        fails_every_s=3600 * given.fails_every_h,
        weights_bytes=given.weights_gib * 2**30,
        token_bytes=given.token_bytes,
        replicas_a_machine=given.replicas_a_machine,
    )
    if given.rate is None:
        return rates
    cost = Rates.of_rate(given.rate, 1e-3 * given.step_ms, step_tokens=given.step_tokens).cost
    return replace(rates, cost=cost)


def search(
    load: Workload, rates: Rates, seconds: float, burst: float
) -> tuple[Plan, dict[str, float]]:
    """Return the plan with the fewest replicas that keep the bound of latency, and its figures.

    Errors: RuntimeError where MOST times the traffic is not enough.
    """
    traffic = plan_fleet(load, rates, hit_share=1.0, utilisation=1.0).find("traffic")
    number = max(1, int(traffic) + 1)
    while True:
        shape = make_shape(load, rates, number)
        requests = draw_requests(load.make_mix(burst), seconds, 1)
        found = summarize(Fleet(shape).run(requests))
        if found["latency_p95_s"] <= load.latency_s:
            break
        number += max(1, number // 20)
        if number > MOST * traffic + 2:
            raise RuntimeError(
                f"{number} replicas do not answer 95 of 100 requests within {load.latency_s:g} s; "
                f"{found['latency_p95_s']:.3g} s: it is the steps' own time, or the requests'"
            )
    plan = plan_fleet(
        load, rates, hit_share=found["hit_share"], utilisation=1.0, needed=number
    )  # fmt: skip
    return plan, found


def show(plan: Plan, found: dict[str, float], load: Workload, rates: Rates) -> str:
    """Return the plan and its simulation as tables."""
    rows = [(own.name, own.formula, write_number(own.value), own.unit) for own in plan.steps]
    figures = [(name, write_number(found[name])) for name in SHOWN]
    read = plan.find("read")
    service = rates.cost.measure(
        read, 1, count_pairs(load.mean_length + load.prefix_tokens - read, read)
    )
    busy = plan.find("traffic") / plan.needed
    wait = wait_gk(plan.needed, busy, service, 1.0, 0.0)
    return (
        "".join(tabulate(("step", "formula", "value", "unit"), rows))
        + f"\nsimulated, {plan.needed} replicas at the peak:\n\n"
        + "".join(tabulate(("figure", "value"), figures))
        + f"\nM/D/k, were texts read one by one: a mean wait of {wait:.3g} s.\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Plan, or see to the page; the exit status is 1 where that is stale."""
    given = parse_arguments(argv)
    if given.write:
        write_simulated()
    if given.write or given.render:
        PAGE.write_text(write_page())
        return 0
    if given.check:
        if PAGE.is_file() and PAGE.read_text() == write_page():
            return 0
        sys.stderr.write(f"stale: {PAGE}; run `python -m bench.capacity --render`\n")
        return 1
    load, rates = read_workload(given), read_rates(given)
    plan, found = search(load, rates, given.seconds, given.burst)
    print(show(plan, found, load, rates), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

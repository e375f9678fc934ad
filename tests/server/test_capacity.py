"""The simulation of a fleet: held to formulas, to what must never happen, and to the page."""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench.capacity.__main__ import main
from bench.capacity.engine import EngineShape, SimulatedEngine, StepCost
from bench.capacity.page import PAGE, plan_models, write_page
from bench.capacity.plan import Rates, Workload, plan_fleet
from bench.capacity.report import Report, summarize
from bench.capacity.scenarios import make_scenarios, read_simulated
from bench.capacity.simulation import Fleet, FleetShape
from bench.capacity.steps import fit
from bench.capacity.theory import (
    availability,
    erlang_c,
    step_in_batches,
    wait_gk,
    wait_mg1,
    wait_mmk,
    wait_percentile,
)
from bench.capacity.traffic import Mix, draw_requests, draw_times

ONE_BY_ONE = EngineShape(StepCost(0.0, 1e-4), 10**6, step_sequences=1, cache_tokens=0)
"""An engine that reads one text at a time, 10,000 tokens a second."""
EXPONENTIAL = tuple((-1000 * np.log(1 - np.linspace(0, 0.9999, 2001))).tolist())


def run(shape: FleetShape, mix: Mix, seconds: float, seed: int = 1) -> Report:
    report = Fleet(shape, seed).run(draw_requests(mix, seconds, seed))
    assert not report.unanswered
    return report


class TestTheory:
    def test_erlang_c_of_known_cases(self) -> None:
        assert erlang_c(1, 0.7) == pytest.approx(0.7)
        # Two servers: 2 rho^2 / (1 + rho).
        assert erlang_c(2, 0.6) == pytest.approx(2 * 0.36 / 1.6)

    def test_the_general_formula_has_the_exact_ones_as_its_cases(self) -> None:
        assert wait_gk(3, 0.8, 2.0, 1.0, 1.0) == pytest.approx(wait_mmk(3, 0.8, 2.0))
        assert wait_gk(1, 0.8, 2.0, 1.0, 0.3) == pytest.approx(wait_mg1(0.8, 2.0, 0.3))
        mean = wait_mmk(4, 0.9, 1.0)
        assert wait_percentile(4, 0.9, mean, 0.1) == 0, "more than a tenth does not wait"

    def test_availability_is_the_binomial_tail(self) -> None:
        assert availability(2, 1, 0.9) == pytest.approx(0.99)
        assert availability(3, 2, 0.9) == pytest.approx(0.9**3 + 3 * 0.9**2 * 0.1)
        assert availability(3, 3, 1.0) == 1.0
        assert availability(1000, 990, 0.999) > 0.999999


def find_waits(arrivals: np.ndarray, services: np.ndarray, servers: int) -> np.ndarray:
    """Waits of customers that are served in their order (Kiefer and Wolfowitz; Lindley for one)."""
    free, waits = [0.0] * servers, []
    for at, service in zip(arrivals.tolist(), services.tolist(), strict=True):
        begins = max(at, free[0])
        waits.append(begins - at)
        heapq.heapreplace(free, begins + service)
    return np.array(waits)


class TestAgainstTheory:
    """The simulation gives each customer the wait of a recursion, whose means are the formulas."""

    @pytest.mark.parametrize("lengths", [(1000, 1000), EXPONENTIAL])
    @pytest.mark.parametrize("servers", [1, 2, 5])
    def test_each_text_waits_as_long_as_in_an_exact_queue(
        self, servers: int, lengths: Sequence[float]
    ) -> None:
        mix = Mix(servers * 0.8 / 0.1, lengths=lengths)
        requests = list(draw_requests(mix, 1000 * 0.1 / (servers * 0.8), 1))
        arrivals = np.array([own.at for own in requests])
        services = np.array([1e-4 * float(own.jobs.num_tokens[0]) for own in requests])
        shape = FleetShape(ONE_BY_ONE, servers, ahead_tokens=0, prefix_worth=0.0)
        report = Fleet(shape, warm_up=0.0).run(iter(requests))
        expected = find_waits(arrivals, services, servers)
        assert expected.max() > 0.1
        assert report.waits == pytest.approx(expected, abs=1e-9)

    @pytest.mark.parametrize("servers", [1, 2, 5])
    @pytest.mark.parametrize("kind", ["equal", "exponential"])
    def test_the_exact_queue_waits_as_the_formula_says(self, servers: int, kind: str) -> None:
        rng, count = np.random.default_rng(0), 400_000
        arrivals = np.cumsum(rng.exponential(1 / (0.7 * servers), count))
        services = rng.exponential(1.0, count) if kind == "exponential" else np.ones(count)
        waits = find_waits(arrivals, services, servers)
        mean = waits.mean()
        if kind == "exponential":
            expected = wait_mmk(servers, 0.7, 1.0)
            at_95 = wait_percentile(servers, 0.7, expected, 0.95)
            assert np.percentile(waits, 95) == pytest.approx(at_95, rel=0.04)
            assert mean == pytest.approx(expected, rel=0.04)
        elif servers == 1:
            assert mean == pytest.approx(wait_mg1(0.7, 1.0, 0.0), rel=0.04)
        else:  # where Allen and Cunneen are not exact
            assert mean == pytest.approx(wait_gk(servers, 0.7, 1.0, 1.0, 0.0), rel=0.12)

    def test_a_busy_engine_s_steps_are_as_long_as_what_came_before_asks_for(self) -> None:
        cost = StepCost(0.05, 1e-4)
        engine = EngineShape(cost, step_tokens=10**6, step_sequences=10**6, cache_tokens=0)
        mix = Mix(60, lengths=(100, 100))
        report = run(FleetShape(engine, ahead_tokens=10**9), mix, 60)
        steps = report.counts.steps
        step_s = report.counts.busy_s / steps
        assert step_s == pytest.approx(step_in_batches(0.05, 1e-4, mix.scored_per_s), rel=0.06)

    def test_full_steps_give_the_rate_of_the_formula(self) -> None:
        cost = StepCost(0.01, 1e-5, 1e-4, 1e-8)
        shape = FleetShape(EngineShape(cost, 8000, cache_tokens=0), ahead_tokens=10**6)
        at_once = [
            replace(own, at=0.0) for own in draw_requests(Mix(10, lengths=(200, 200)), 200, 1)
        ]
        report = Fleet(shape).run(iter(at_once))
        assert report.scored_per_s == pytest.approx(cost.rate(8000, 200), rel=0.01)


class TestEngine:
    def test_a_prefix_is_found_in_whole_blocks_and_what_is_scored_is_read(self) -> None:
        mix = Mix(1, 3, (40, 40), prefix_tokens=100, groups=1)
        (request,) = itertools.islice(draw_requests(mix, 100, 1), 1)
        engine = SimulatedEngine(EngineShape(StepCost(1.0, 0.0)))
        engine.add([0, 1, 2], list(request.jobs))
        step = engine.step()
        assert (step.cached_tokens, step.read_tokens) == (2 * 96, 3 * 140 - 2 * 96)
        assert step.ended == [0, 1, 2]

    def test_a_text_longer_than_a_step_is_read_in_pieces(self) -> None:
        (request,) = itertools.islice(draw_requests(Mix(1, lengths=(250, 250)), 100, 1), 1)
        engine = SimulatedEngine(EngineShape(StepCost(0.0, 1.0, 0.0, 1.0), step_tokens=100))
        engine.add([0], list(request.jobs))
        steps = [engine.step() for _ in range(3)]
        assert [step.read_tokens for step in steps] == [100, 100, 50]
        assert [step.ended for step in steps] == [[], [], [0]]
        assert sum(step.seconds for step in steps) == 250 + 250**2 / 2

    def test_steps_are_fitted(self) -> None:
        cost = StepCost(4e-3, 2e-5, 1e-4, 2e-8)
        sizes = [(n, c) for n in (100, 1600, 7200) for c in (1, 4, 25)]
        steps = [(n, c, cost.measure(n, c, n * n / c / 2)) for n, c in sizes]
        found = fit(steps)
        for name in ("fixed_s", "token_s", "sequence_s", "pair_s"):
            assert getattr(found, name) == pytest.approx(getattr(cost, name), rel=1e-6)


class TestFaults:
    SHAPE = FleetShape(EngineShape(StepCost(5e-3, 1e-4)), 4)
    MIX = Mix(12, 8, (50, 100, 400), prefix_tokens=128, groups=8)

    @pytest.mark.parametrize("on_ray", [False, True])
    def test_failing_replicas_lose_no_request(self, on_ray: bool) -> None:
        ingresses = 3 if on_ray else 1
        shape = replace(
            self.SHAPE, on_ray=on_ray, ingresses=ingresses, fails_every_s=15, restart_s=5
        )
        requests = list(draw_requests(self.MIX, 60, 1))
        report = Fleet(shape, 1).run(iter(requests))
        assert report.counts.failures > 5
        assert report.counts.repeated_texts > 0
        assert (report.answered, report.unanswered) == (len(requests), 0)

    def test_a_change_of_all_replicas_reads_nothing_again(self) -> None:
        report = run(replace(self.SHAPE, changes_at=5, restart_s=3), self.MIX, 60)
        assert report.counts.changes == 4
        assert report.counts.repeated == 0

    def test_a_lone_replica_answers_all_after_its_restart(self) -> None:
        fleet = Fleet(FleetShape(EngineShape(StepCost(5e-3, 1e-5)), restart_s=5))
        fleet._later(10.0, fleet.fail, 0)
        report = fleet.run(draw_requests(self.MIX, 30, 1))
        assert report.unanswered == 0
        assert 4 < report.latencies.max() < 7

    def test_a_seed_gives_the_same_run(self) -> None:
        shape = replace(self.SHAPE, fails_every_s=15)
        assert summarize(run(shape, self.MIX, 20, 3)) == summarize(run(shape, self.MIX, 20, 3))
        assert summarize(run(shape, self.MIX, 20, 3)) != summarize(run(shape, self.MIX, 20, 4))


class TestTraffic:
    def test_bursts_keep_the_mean(self) -> None:
        rng = np.random.default_rng(0)
        times = draw_times(Mix(20, burst=3.0, burst_s=5), 20_000, rng)
        assert len(times) / 20_000 == pytest.approx(20, rel=0.05)
        counts = np.histogram(times, 20_000)[0]
        assert counts.var() > 2 * counts.mean(), "more than a Poisson process varies"
        with pytest.raises(ValueError, match="at most 5"):
            draw_times(Mix(20, burst=6.0), 10, rng)

    def test_lengths_have_the_mean_of_their_quantiles(self) -> None:
        mix = Mix(50, lengths=(10, 20, 100, 400))
        lengths = np.concatenate([own.jobs.num_targets for own in draw_requests(mix, 200, 1)])
        assert lengths.mean() == pytest.approx(mix.mean_length, rel=0.03)


class TestPlan:
    LOAD = Workload(86_400 * 1000, (100, 100), texts=10, prefix_tokens=50, groups=2)

    def test_the_steps_by_hand(self) -> None:
        rates = Rates.of_rate(500, 0.0, fails_every_s=86_400.0, http_request_s=0.01)
        plan = plan_fleet(self.LOAD, rates, hit_share=0.5, utilisation=0.8)
        assert plan.find("peak") == 2000
        assert plan.find("read") == 125
        assert plan.find("a replica") == 400
        assert plan.find("traffic") == 5
        assert (plan.needed, plan.find("HTTP")) == (7, 0.02)
        up = 86_400 / 86_420
        assert availability(plan.replicas - 1, 7, up) >= 0.9999
        assert plan.replicas == 9

    def test_a_rate_with_a_fixed_part_is_that_rate(self) -> None:
        rates = Rates.of_rate(5000, 0.1)
        assert rates.cost.rate(rates.step_tokens, 100) == pytest.approx(5000)
        with pytest.raises(ValueError, match="less than 2 s"):
            Rates.of_rate(5000, 2.0)

    def test_the_command_plans_with_given_rates(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["--tokens-per-day", "1e8", "--rate", "2000", "--length", "200"]
        assert main([*arguments, "--seconds", "20", "--latency-s", "3"]) == 0
        rows = _read_rows(capsys.readouterr().out)
        assert float(rows["mean"][1].replace(",", "")) == pytest.approx(1157, abs=1)
        assert float(rows["latency_p95_s"][0]) <= 3
        assert rows["lost"][0] == "0"

    def test_a_bound_that_no_fleet_keeps_is_said(self) -> None:
        with pytest.raises(RuntimeError, match="do not answer"):
            main(["--rate", "100", "--tokens-per-day", "1e6", "--latency-s", "0.5"])


def _read_rows(text: str) -> dict[str, Sequence[str]]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {cells[0]: cells[1:] for cells in lines}


class TestPage:
    def test_it_says_what_measurements_and_simulation_say(self) -> None:
        assert PAGE.read_text() == write_page(), "run `python -m bench.capacity --render`"

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name",
        [
            "6 replicas, bursts",
            "killed",
            "16 replicas, many prefixes, worth 4",
            "100 replicas on Ray, 16 ingresses",
        ],
    )
    def test_a_scenario_run_again_gives_its_figures(self, name: str) -> None:
        found, kept = make_scenarios()[name].run(), read_simulated()[name]
        assert found == pytest.approx(kept, rel=0.02, abs=1e-3), "run --write"

    def test_every_scenario_is_kept_and_loses_nothing(self) -> None:
        kept = read_simulated()
        assert kept.keys() == make_scenarios().keys()
        assert not any(own["lost"] for own in kept.values())

    def test_the_worked_fleet_keeps_its_bound(self) -> None:
        plan = plan_models()["18 M"]
        kept = read_simulated()
        assert kept[f"{plan.needed} replicas"]["latency_p95_s"] < 2.0
        assert kept[f"{plan.needed - 1} replicas"]["latency_p95_s"] > 2.0

"""Models that are changed on a cluster through one ingress, and are so on all of them."""

import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.cluster.local import FAKE, STEP_S, KeyedCluster, needs_all, needs_ray
from tests.conftest import fake_model
from tests.faults.callers import change as change_at
from tests.faults.callers import check_closed, load
from tests.faults.processes import wait_for

pytestmark = [pytest.mark.engine, needs_ray]

B = fake_model("b", delay_s=STEP_S)
OTHER_FAKE = FAKE | {"engine_args": FAKE["engine_args"] | {"shift": -1.0}}
ITEMS = [{"context_ids": [5, n], "target_ids": [[6]]} for n in range(40)]
CALLERS = 3
"""Enough that a request is always at work, and so few that they leave the cores to what starts."""
ASKED = 12
"""So often all ingresses are asked: the proxy gives a connection to either."""


@pytest.fixture(scope="module", autouse=True)
def models(cluster: KeyedCluster) -> None:
    cluster.serve(FAKE, B)


@pytest.fixture(autouse=True)
def restored(cluster: KeyedCluster, models: None) -> Iterator[None]:
    """Each test begins with the models of the start."""
    yield
    cluster.reload(FAKE, B)
    for name, replicas in (("fake", 2), ("b", 1)):
        assert change(cluster, f"/models/{name}/load").json()["state"] == "ready"
        cluster.wait_for_replicas(name, replicas)  # whichever ingress is asked


def change(cluster: KeyedCluster, what: str) -> httpx.Response:
    return change_at(cluster, what, headers=cluster.headers)


def score(cluster: KeyedCluster, model: str) -> httpx.Response:
    body = {"model": model, "items": ITEMS, "cache": False}
    return cluster.request("POST", "/logprob", json=body)


def ask_all(cluster: KeyedCluster, path: str) -> list[dict[str, Any]]:
    """What different connections are answered, and so both ingresses."""
    return [cluster.request("GET", path).json() for _ in range(ASKED)]


def read_states(cluster: KeyedCluster) -> set[tuple[tuple[str, str], ...]]:
    """All that is said of which models there are, and in which states."""
    pages = ask_all(cluster, "/models")
    return {tuple((card["id"], card["state"]) for card in page["models"]) for page in pages}


def pids(cluster: KeyedCluster, model: str) -> set[int]:
    return {own.pid for own in cluster.find_actors(model)}


class TestReload:
    def test_models_come_and_go_on_all_ingresses_while_others_answer(
        self, cluster: KeyedCluster
    ) -> None:
        actors = pids(cluster, "fake")
        with load(cluster, "fake", callers=CALLERS, headers=cluster.headers) as found:
            told = cluster.reload(FAKE, fake_model("c"))
            assert (told["added"], told["removed"], told["unchanged"]) == (["c"], ["b"], ["fake"])
            assert (told["pending"], told["failed"], told["needs_restart"]) == ([], {}, [])
            wait_for(lambda: read_states(cluster) == {(("fake", "ready"), ("c", "ready"))}, 60)
            assert {score(cluster, "c").status_code for _ in range(ASKED)} == {200}
            assert {score(cluster, "b").json()["code"] for _ in range(ASKED)} == {"unknown_model"}
        assert set(found.statuses) == {200}, found.codes
        assert not found.wrong
        assert pids(cluster, "fake") == actors, "what is not changed keeps its actors"
        wait_for(lambda: not pids(cluster, "b"))  # Ray has back what was set aside

    def test_a_model_is_replaced_without_an_error_and_no_answer_is_of_two(
        self, cluster: KeyedCluster
    ) -> None:
        actors = pids(cluster, "fake")
        old = score(cluster, "fake").json()["results"]
        seen: list[float] = []

        def is_new(results: Any) -> bool:
            found = [
                new["targets"][0]["logprob"] - was["targets"][0]["logprob"]
                for was, new in zip(old, results, strict=True)
            ]
            seen.append(time.monotonic())
            return all(shift == pytest.approx(-1.0, abs=1e-5) for shift in found)

        with load(
            cluster, "fake", callers=8, items=ITEMS, also=is_new, headers=cluster.headers
        ) as found:
            began = time.monotonic()
            told = cluster.reload(OTHER_FAKE, B)
            took_s, new, answered = time.monotonic() - began, len(seen), len(found.statuses)
            wait_for(lambda: len(found.statuses) > answered + 50)
        assert (told["replaced"], told["pending"], told["failed"]) == (["fake"], [], {})
        assert set(found.statuses) == {200}, found.codes
        assert not found.wrong
        assert len(found.statuses) > 100
        assert len(seen) - new >= 50 - 8, "after the reload all answers are the new model's"
        wait_for(lambda: not pids(cluster, "fake") & actors)
        print(
            f"rolling change of 2 replicas: {took_s:.1f} s, {len(found.statuses)} requests, none "
            f"lost; longest {max(found.waits):.2f} s"
        )

    @needs_all
    def test_a_change_that_fails_leaves_what_was(self, cluster: KeyedCluster) -> None:
        actors = pids(cluster, "fake")
        broken = [fake_model(name, context_length="none") for name in ("fake", "c")]
        with load(cluster, "fake", callers=CALLERS, headers=cluster.headers) as found:
            began = time.monotonic()
            told = cluster.reload(broken[0], B, broken[1])
            took_s = time.monotonic() - began
        assert set(told["failed"]) == {"fake", "c"}
        assert all("invalid literal" in why for why in told["failed"].values()), told["failed"]
        assert (set(found.statuses), found.wrong) == ({200}, [])
        assert pids(cluster, "fake") == actors
        expected = {(("fake", "ready"), ("b", "ready"), ("c", "failed"))}
        wait_for(lambda: read_states(cluster) == expected)
        wait_for(
            lambda: all(
                "its replacement failed" in card["detail"]
                for card in ask_all(cluster, "/models/fake")
            )
        )
        assert score(cluster, "c").json()["code"] == "internal"
        wait_for(lambda: not pids(cluster, "c"))
        print(f"a change that failed: known after {took_s:.1f} s")

    def test_an_unusable_configuration_changes_nothing(self, cluster: KeyedCluster) -> None:
        cases = {"models: [": "cannot be read", "modles: []": "unknown"}
        for text, why in cases.items():
            cluster.config_path.write_text(text)
            answer = change(cluster, "/admin/reload")
            problem = answer.json()
            assert (answer.status_code, problem["code"]) == (422, "invalid_request")
            assert why in problem["detail"]
            assert "nothing was changed" in problem["detail"]
        assert read_states(cluster) == {(("fake", "ready"), ("b", "ready"))}

    @needs_all
    def test_a_second_reload_is_taken_while_a_replacement_loads_whichever_ingress_has_it(
        self, cluster: KeyedCluster
    ) -> None:
        never = cluster.config_path.parent / "never"
        late = fake_model("b", delay_s=STEP_S, memory_file=str(never))
        actors = pids(cluster, "b")
        with load(cluster, "b", callers=CALLERS, headers=cluster.headers) as found:
            told = cluster.reload(FAKE, late, wait_s=0)
            assert (told["replaced"], told["pending"]) == (["b"], ["b"])
            for _ in range(4):
                again = cluster.reload(FAKE, late, wait_s=0)
                assert (again["unchanged"], again["pending"]) == (["fake", "b"], ["b"])
            wait_for(lambda: pids(cluster, "b") - actors, 60)
            began = time.monotonic()
            told = cluster.reload(FAKE, B)
            took_s = time.monotonic() - began
            assert (told["replaced"], told["pending"], told["failed"]) == (["b"], [], {})
        assert (set(found.statuses), found.wrong) == ({200}, [])
        wait_for(lambda: pids(cluster, "b") == actors, 60)
        wait_for(lambda: {card["detail"] for card in ask_all(cluster, "/models/b")} == {"answers"})
        print(f"a replacement that loads was given up in {took_s:.1f} s")

    @needs_all
    def test_sighup_does_the_same(self, cluster: KeyedCluster) -> None:
        cluster.write(B, fake_model("d"), max_items=7)
        cluster.process.send_signal(signal.SIGHUP)
        wait_for(lambda: read_states(cluster) == {(("b", "ready"), ("d", "ready"))}, 60)
        wait_for(lambda: "SIGHUP: added: d" in cluster.output)
        wait_for(lambda: "SIGHUP: needs restart: max_items" in cluster.output)
        cluster.config_path.write_text("models: [")
        cluster.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "nothing was changed" in cluster.output)
        wait_for(lambda: not pids(cluster, "fake"))


class TestOneModel:
    def test_unload_ends_the_actors_everywhere_and_load_starts_others(
        self, cluster: KeyedCluster
    ) -> None:
        actors = pids(cluster, "b")
        with load(cluster, "b", callers=CALLERS, retries=True, headers=cluster.headers) as found:
            began = time.monotonic()
            assert change(cluster, "/models/b/unload").json()["state"] == "unloaded"
            unload_s = time.monotonic() - began
            assert read_states(cluster) == {(("fake", "ready"), ("b", "unloaded"))}
            wait_for(lambda: not pids(cluster, "b"))
            for _ in range(ASKED):
                check_closed(score(cluster, "b"), "unloaded")
            assert {page["ready"] for page in ask_all(cluster, "/readyz")} == {False}
            began = time.monotonic()
            assert change(cluster, "/models/b/load").json()["state"] == "ready"
            load_s, before = time.monotonic() - began, len(found.statuses)
            wait_for(lambda: len(found.statuses) > before + 16)
        assert set(found.statuses) == {200}
        assert set(found.codes) == {"model_loading"}
        assert not found.wrong
        assert not pids(cluster, "b") & actors
        print(f"unload: {unload_s:.1f} s, load: {load_s:.1f} s")

    @needs_all
    def test_drain_refuses_new_requests_everywhere_and_keeps_the_actors(
        self, cluster: KeyedCluster
    ) -> None:
        actors = pids(cluster, "fake")
        with load(cluster, "fake", callers=CALLERS, retries=True, headers=cluster.headers) as found:
            assert change(cluster, "/models/fake/drain").json()["state"] == "draining"
            for _ in range(ASKED):
                check_closed(score(cluster, "fake"), "drained")
            assert change(cluster, "/models/fake/load").json()["state"] == "ready"
            before = len(found.statuses)
            wait_for(lambda: len(found.statuses) > before + 16)
        assert (set(found.statuses), found.wrong) == ({200}, [])
        assert set(found.codes) == {"model_loading"}
        assert pids(cluster, "fake") == actors

    @needs_all
    def test_what_was_changed_outlives_the_process_that_changed_it(
        self, cluster: KeyedCluster
    ) -> None:
        """What becomes of it without ingresses is in `test_two_ingresses.py`."""
        cluster.reload(FAKE, B, fake_model("c"))
        assert change(cluster, "/models/b/unload").json()["state"] == "unloaded"
        (killed,) = cluster.find_own("coordinator")
        actors = pids(cluster, "fake")
        killed.kill()
        wait_for(lambda: {own.pid for own in cluster.find_own("coordinator")} - {killed.pid}, 60)
        expected = {(("fake", "ready"), ("b", "unloaded"), ("c", "ready"))}
        wait_for(lambda: read_states(cluster) == expected, 60)
        # An ingress may not have heard of the new one yet, and says then to ask again.
        wait_for(lambda: change(cluster, "/models/b/load").json().get("state") == "ready")
        assert pids(cluster, "fake") == actors

"""Models that are loaded, unloaded, drained and replaced while requests are answered."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.conftest import Server, fake_model
from tests.faults.callers import change, load
from tests.faults.processes import (
    check_retryable,
    find_engines,
    read_card,
    running,
    score,
    wait_for,
    wait_for_jobs,
    wait_for_state,
)
from tests.held import HOLD_FILE, held

SLOW = fake_model("slow", hold_file=HOLD_FILE)


def reload(server: Server, config: dict[str, Any], wait_s: float = 30.0) -> dict[str, Any]:
    write(server, config)
    answer = change(server, "/admin/reload", wait_s)
    assert answer.status_code == 200, answer.text
    return answer.json()


def write(server: Server, config: dict[str, Any]) -> None:
    server.config_path.write_text(yaml.safe_dump(config))


def probe(server: Server, name: str) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(f"{server.url}/{name}", timeout=60)
    return answer.status_code, answer.json()


@contextmanager
def at_work(server: Server, count: int) -> Iterator[list[Future[httpx.Response]]]:
    """Have the engine of the slow model have so many requests, for as long as it is held."""
    with ThreadPoolExecutor(count) as pool, held(server.directory / HOLD_FILE):
        asked = [pool.submit(score, server, "slow", n) for n in range(count)]
        wait_for(lambda: read_card(server, "slow")["replicas"][0]["num_jobs"] == count)
        yield asked


def change_at_work(server: Server, what: str) -> dict[str, Any]:
    """Change the slow model, and let its engine go on once it is draining; its card then."""
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change, server, f"/models/slow/{what}")
        wait_for_state(server, "slow", "draining")
        assert not changing.done()
        (server.directory / HOLD_FILE).unlink()
        card: dict[str, Any] = changing.result().json()
    return card


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    models = [fake_model("a", delay_s=0.05), fake_model("b"), SLOW]
    with running(config_of(*models), tmp_path) as server:
        server.wait_until_ready()
        yield server


def config_of(*models: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"models": list(models), "cache_bytes": 0, "reload_beside": True, **settings}


class TestOneModel:
    def test_unload_ends_the_engine_once_it_has_answered_and_load_starts_it(
        self, server: Server
    ) -> None:
        engines = set(find_engines(server))
        with at_work(server, 8) as asked:
            card = change_at_work(server, "unload")
            assert [one.result().status_code for one in asked] == [200] * 8
        assert card["state"] == card["replicas"][0]["state"] == "unloaded"
        assert len(set(find_engines(server)) & engines) == 2
        check_retryable(score(server, "slow"), "model_loading", "unloaded")
        assert score(server, "b").status_code == 200
        status, ready = probe(server, "readyz")
        assert status == 503
        assert ready["reason"].startswith("slow is unloaded")
        assert probe(server, "healthz")[0] == 200
        assert change(server, "/models/slow/load").json()["state"] == "ready"
        assert score(server, "slow").status_code == 200
        assert probe(server, "readyz")[0] == 200

    def test_drain_refuses_new_requests_and_load_takes_them_again(self, server: Server) -> None:
        engines = find_engines(server)
        with at_work(server, 4) as asked:
            card = change_at_work(server, "drain")
            assert [one.result().status_code for one in asked] == [200] * 4
        assert card["state"] == "draining"
        check_retryable(score(server, "slow"), "model_loading", "drained")
        assert find_engines(server) == engines
        assert change(server, "/models/slow/load").json()["state"] == "ready"
        assert score(server, "slow").status_code == 200
        assert read_card(server, "slow")["restarts"] == 0

    def test_changes_that_are_done_change_nothing(self, server: Server) -> None:
        engines = find_engines(server)
        assert change(server, "/models/b/load").json()["state"] == "ready"
        assert find_engines(server) == engines
        for _ in range(2):
            assert change(server, "/models/b/unload").json()["state"] == "unloaded"
        assert change(server, "/models/b/drain").json()["state"] == "unloaded"
        for what in ("load", "unload", "drain"):
            answer = change(server, f"/models/none/{what}")
            assert (answer.status_code, answer.json()["code"]) == (404, "unknown_model")

    def test_without_waiting_the_answer_says_how_far_it_is(self, server: Server) -> None:
        with at_work(server, 1) as (asked,):
            card = change(server, "/models/slow/unload", wait_s=0).json()
            assert card["state"] == "draining"
            second = change(server, "/models/slow/drain", wait_s=0)
            assert (second.status_code, second.json()["code"]) == (429, "overloaded")
            (server.directory / HOLD_FILE).unlink()
            assert asked.result().status_code == 200
        wait_for_state(server, "slow", "unloaded")

    def test_a_failed_model_is_loaded_again(self, tmp_path: Path) -> None:
        config = config_of(fake_model("a") | {"required": False}, max_restarts=0)
        with running(config, tmp_path) as server:
            server.wait_until_ready()
            os.kill(find_engines(server)[0], signal.SIGKILL)
            wait_for_state(server, "a", "failed")
            assert change(server, "/models/a/load").json()["state"] == "ready"
            assert score(server, "a").status_code == 200


class TestReload:
    def test_a_model_is_replaced_beside_the_old_one_without_an_error(self, server: Server) -> None:
        """Hundreds of requests are in flight; none fails, and none waits for the load."""
        with load(server, "a") as found:
            told = reload(
                server, config_of(fake_model("a", context_length=96), fake_model("b"), SLOW)
            )
            before = len(found.statuses)
            wait_for(lambda: len(found.statuses) > before + 200)
        assert (told["replaced"], told["pending"], told["failed"]) == (["a"], [], {})
        assert set(found.statuses) == {200}, found.codes
        assert not found.wrong
        assert len(found.statuses) > 300
        card = read_card(server, "a")
        assert (card["context_length"], card["detail"]) == (96, "answers")
        assert len(find_engines(server)) == 3

    def test_without_room_the_old_one_ends_first_and_nothing_is_lost(self, tmp_path: Path) -> None:
        """Callers are told to come back, and all are answered when they do."""
        config = config_of(fake_model("a", delay_s=0.05), reload_beside=False)
        with running(config, tmp_path) as server:
            server.wait_until_ready()
            with load(server, "a", retries=True) as found:
                new = config_of(fake_model("a", context_length=96), reload_beside=False)
                told = reload(server, new)
                before = len(found.statuses)
                wait_for(lambda: len(found.statuses) > before + 200)
            assert (told["replaced"], told["failed"]) == (["a"], {})
            assert set(found.statuses) == {200}
            assert set(found.codes) == {"model_loading"}
            assert not found.wrong
            assert read_card(server, "a")["context_length"] == 96
            assert len(find_engines(server)) == 1

    def test_an_unusable_configuration_changes_nothing(self, server: Server) -> None:
        cases = {
            "models: [": "cannot be read",
            "models: []": "no model is configured",
            "models: [{id: a, path: x, engine: none}]": "engine",
            "modles: []": "unknown",
            "models: [{id: a, path: x, engine_args: {worker_cls: x}}]": "worker_cls",
        }
        for text, why in cases.items():
            server.config_path.write_text(text)
            answer = change(server, "/admin/reload")
            problem = answer.json()
            assert (answer.status_code, problem["code"]) == (422, "invalid_request")
            assert why in problem["detail"]
            assert "nothing was changed" in problem["detail"]
        assert score(server, "a").status_code == score(server, "b").status_code == 200

    def test_what_counts_from_the_next_start_on_is_named(self, server: Server) -> None:
        told = reload(
            server,
            config_of(fake_model("a", delay_s=0.05), fake_model("b"), SLOW, port=9, max_items=3),
        )
        # The port is that of the command line, in front of the file.
        assert told["needs_restart"] == ["max_items"]
        assert told["unchanged"] == ["a", "b", "slow"]

    @pytest.mark.full
    def test_requests_longer_than_their_time_are_told_to_come_back(self, tmp_path: Path) -> None:
        config = config_of(fake_model("a", delay_s=30.0), model_drain_s=0.3)
        with running(config, tmp_path) as server:
            server.wait_until_ready()
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(score, server, "a", 1)
                wait_for_jobs(server, "a")
                assert change(server, "/models/a/unload").json()["state"] == "unloaded"
                assert asked.result().status_code == 503


class TestProbes:
    def test_startup_is_over_once_all_required_models_have_answered(self, tmp_path: Path) -> None:
        file = tmp_path / "memory"
        late = fake_model("late") | {"required": False}
        late["engine_args"] = late["engine_args"] | {"memory_file": str(tmp_path / "never")}
        slow = fake_model("slow", memory_file=str(file))
        with running(config_of(slow, late), tmp_path) as server:
            status, told = probe(server, "startupz")
            assert (status, told["started"]) == (503, False)
            assert told["reason"].startswith("slow is ")
            assert probe(server, "healthz")[0] == 200
            file.touch()
            wait_for(lambda: probe(server, "startupz")[0] == 200)
            assert probe(server, "startupz")[1] == {"started": True, "reason": None}
            change(server, "/models/slow/unload")
            assert probe(server, "startupz")[0] == 200, "it is about the start alone"
            assert probe(server, "readyz")[0] == 503

    def test_liveness_fails_where_only_a_restart_of_the_process_helps(self, tmp_path: Path) -> None:
        config = config_of(fake_model("a"), max_restarts=0, exit_when_given_up=False)
        with running(config, tmp_path) as server:
            server.wait_until_ready()
            assert probe(server, "healthz")[1]["reason"] is None
            os.kill(find_engines(server)[0], signal.SIGKILL)
            wait_for_state(server, "a", "failed")
            status, told = probe(server, "healthz")
            assert (status, told["status"]) == (503, "failing")
            assert "a was given up" in told["reason"]

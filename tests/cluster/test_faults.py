"""What is killed or stands still on a cluster while requests are at work, and what callers see."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster.local import (
    FAKE,
    SILENT_S,
    LocalCluster,
    ask,
    find_engines_below,
    lose_amid,
    needs_all,
    needs_ray,
    stopped,
)
from tests.conftest import Server, ServerFactory
from tests.faults.processes import find_engines, is_alive, wait_for

pytestmark = [pytest.mark.engine, needs_ray, needs_all]

MODEL = FAKE | {"engine_args": FAKE["engine_args"] | {"piecewise": True}}
ITEMS = [{"context_ids": [5, 100 + n % 50, n // 50], "target_ids": [[6]]} for n in range(2000)]
TOKENS = 100


@pytest.fixture(scope="module")
def cluster(impatient: LocalCluster) -> LocalCluster:
    impatient.serve(MODEL)
    return impatient


@pytest.fixture(scope="module")
def machine(start_server: ServerFactory) -> Server:
    """The same model on one machine, in one process."""
    model = MODEL | {"replicas": 1}
    return start_server({"models": [model], "cache_bytes": 0, "heartbeat_timeout_s": SILENT_S})


@pytest.fixture(scope="module")
def expected(machine: Server) -> dict[str, Any]:
    return ask(machine.url, "logprob", {"items": ITEMS})


@pytest.fixture(autouse=True)
def whole(cluster: LocalCluster) -> Iterator[None]:
    """Each test begins with two replicas that answer."""
    yield
    wait_until_whole(cluster)


def wait_until_whole(cluster: LocalCluster) -> None:
    """Wait until two replicas answer, whichever ingress is asked."""
    wait_for(lambda: len(find_engines_below(cluster.find_actors())) == 2, 90)
    cluster.wait_for_replicas("fake", 2)


def find_victims(cluster: LocalCluster, target: str) -> list[psutil.Process]:
    """The processes of the actors, or of the engines below them."""
    actors = cluster.find_actors()
    return actors if target == "actor" else find_engines_below(actors)


@pytest.mark.parametrize(
    ("target", "number"),
    [
        ("engine", signal.SIGKILL),
        ("engine", signal.SIGSTOP),
        ("actor", signal.SIGKILL),
        ("actor", signal.SIGSTOP),
    ],
)
def test_a_job_outlives_a_process_that_is_lost_or_hangs(
    cluster: LocalCluster, expected: dict[str, Any], target: str, number: signal.Signals
) -> None:
    began = time.monotonic()
    assert cluster.ask("logprob", {"items": ITEMS}) == expected
    quiet_s = time.monotonic() - began
    victims: list[psutil.Process] = []
    took_s = 0.0

    def ask_all() -> dict[str, Any]:
        nonlocal took_s
        began = time.monotonic()
        found = cluster.ask("logprob", {"items": ITEMS})
        took_s = time.monotonic() - began
        return found

    def lose() -> None:
        victims.append(find_victims(cluster, target)[0])
        os.kill(victims[-1].pid, number)

    def settle() -> None:
        # It is replaced, not merely left alone.
        wait_for(lambda: not is_alive(victims[-1]), 60)
        wait_until_whole(cluster)

    assert lose_amid(ask_all, lose, settle) == expected
    print(f"{number.name} of the {target}: {took_s:.1f} s for the job, {quiet_s:.1f} s without")


def test_all_actors_that_hang_are_replaced_and_callers_come_back(
    cluster: LocalCluster,
) -> None:
    """No replica is left: who waits gets an error that may be tried again, or the answer."""
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool, stopped(*cluster.find_actors()):
        body = {"items": ITEMS[:4]}
        asked = [
            pool.submit(httpx.post, f"{cluster.url}/logprob", json=body, timeout=90)
            for _ in range(8)
        ]
        answers = [one.result() for one in asked]
    waited_s = time.monotonic() - began
    for one in answers:
        if one.status_code != 200:
            assert (one.status_code, one.json()["retryable"]) == (503, True), one.text
    wait_for(lambda: httpx.get(f"{cluster.url}/readyz", timeout=30).status_code == 200, 60)
    codes = sorted({one.json().get("code", "200") for one in answers})
    print(f"SIGSTOP of all actors: callers had {codes} after {waited_s:.1f} s")


def read_stream(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a streamed generation, as they come."""
    body = {"prompts": ["The sea"], "max_tokens": TOKENS, "stream": True}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=60) as answer:
        event = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield event, json.loads(line.removeprefix("data: "))


def cut(url: str, victims: list[int]) -> tuple[list[str], dict[str, Any], float]:
    """The names of a stream's events, the last one, and its seconds after processes were killed."""
    names: list[str] = []
    last: dict[str, Any] = {}
    killed_at = 0.0
    for event, document in read_stream(url):
        names.append(event)
        last = document
        if len(names) == 10:
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()
    return names, last, time.monotonic() - killed_at


@pytest.mark.parametrize("target", ["engine", "actor"])
def test_a_stream_that_is_cut_ends_as_on_one_machine(
    cluster: LocalCluster, machine: Server, target: str
) -> None:
    names, last, _ = cut(machine.url, find_engines(machine))
    wait_for(lambda: httpx.get(f"{machine.url}/readyz", timeout=30).status_code == 200)
    # The one that generates is busy; which it is nobody tells.
    victims = find_victims(cluster, target)
    own_names, own_last, after_s = cut(cluster.url, [own.pid for own in victims])
    assert (own_names[-1], own_last["code"]) == (names[-1], last["code"])
    assert own_last["code"] == "engine_restarting"
    assert own_last["retryable"]
    assert set(own_names[:-1]) == set(names[:-1])
    assert len(own_names) < TOKENS
    print(f"kill -9 of the {target} under a stream: {own_last['code']} after {after_s:.2f} s")

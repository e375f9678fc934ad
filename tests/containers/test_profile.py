"""The compose profile `observability`: Prometheus, as docker-compose.yml runs it, on the server."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.containers.conftest import IMAGE, PROJECT, Service, provide_prometheus
from tests.containers.docker import docker
from tests.deploy.observed import fill, find_metrics, list_alerts, list_queries, send_requests

SCRAPE_S = 15
"""Of deploy/observability/prometheus.yml."""
LOAD_S = 3.5 * SCRAPE_S
RATE = f"{4 * SCRAPE_S}s"
"""What Grafana puts for $__rate_interval."""
NOTHING_HERE = (
    "logsteer_gpu_",
    "logsteer_key_",
    "logsteer_cluster_",
)
"""How names of metrics begin that the demo has no data of: no GPU, key file or Ray."""
ASK = """
import json, sys, urllib.parse, urllib.request
answers = []
for path, given in json.loads(sys.argv[1]):
    query = urllib.parse.urlencode(given)
    with urllib.request.urlopen(f"http://prometheus:9090{path}?{query}", timeout=30) as answer:
        answers.append(json.load(answer)["data"])
print(json.dumps(answers))
"""


class Watcher:
    """The Prometheus of the profile, which publishes no port: asked from a container beside it."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def ask(self, *questions: tuple[str, dict[str, str]]) -> list[Any]:
        """The data that Prometheus answers to paths of its interface, each with parameters."""
        asking = docker(
            "run", "--rm", "--network", f"{PROJECT}_default", "--entrypoint", "python", IMAGE,
            "-c", ASK, json.dumps(questions),
        )  # fmt: skip
        answers: list[Any] = json.loads(asking.stdout)
        return answers

    def query(self, expressions: Sequence[str]) -> list[list[Any]]:
        """What each expression comes to now."""
        found = self.ask(*(("/api/v1/query", {"query": each}) for each in expressions))
        return [each["result"] for each in found]

    def find_targets(self) -> dict[str, str]:
        """State of each target, by job and instance."""
        (found,) = self.ask(("/api/v1/targets", {}))
        return {
            f"{each['labels']['job']} {each['labels']['instance']}": each["health"]
            for each in found["activeTargets"]
        }

    def wait(self, for_what: Callable[[], bool], limit_s: float = 6 * SCRAPE_S) -> float:
        """Wait until something holds; return for how long, in seconds."""
        started = time.monotonic()
        while not for_what():
            assert time.monotonic() - started < limit_s, self.service.compose("logs", "prometheus")
            time.sleep(1)
        return time.monotonic() - started


@pytest.fixture(scope="module")
def watcher(service: Service) -> Iterator[Watcher]:
    """Prometheus beside the server, which has had requests of every kind."""
    version = provide_prometheus()
    service.start("prometheus")
    found = Watcher(service)
    found.wait(lambda: found.find_targets().get("logsteer cpu") == "up")
    width = httpx.get(f"{service.url}/models/demo").json()["hidden_size"]
    asyncio.run(send_requests(service.url, (), ["demo"], "demo", width, LOAD_S))
    time.sleep(SCRAPE_S)
    print(f"\nwatched by {version}")
    yield found
    service.compose("rm", "--stop", "--force", "prometheus")


def test_server_and_prometheus_are_the_targets(watcher: Watcher) -> None:
    """Of the services that the file has, those that run."""
    wanted = {"logsteer cpu": "up", "prometheus 127.0.0.1:9090": "up"}
    watcher.wait(lambda: watcher.find_targets() == wanted)


def test_the_rules_are_loaded(watcher: Watcher) -> None:
    (found,) = watcher.ask(("/api/v1/rules", {}))
    rules = [rule for group in found["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in rules] == [rule["alert"] for rule in list_alerts()]
    assert {rule["health"] for rule in rules} == {"ok"}


def test_every_query_of_the_dashboard_has_data(watcher: Watcher) -> None:
    queries = [query for _, query in list_queries()]
    answers = watcher.query([fill(query, RATE) for query in queries])
    empty = {query for query, answer in zip(queries, answers, strict=True) if not answer}
    assert empty == {
        query for query in queries if any(n.startswith(NOTHING_HERE) for n in find_metrics(query))
    }


def test_it_runs_confined(watcher: Watcher) -> None:
    container = watcher.service.name_container("prometheus")
    (found,) = json.loads(docker("inspect", container).stdout)
    host = found["HostConfig"]
    assert (host["ReadonlyRootfs"], host["CapDrop"]) == (True, ["ALL"])
    assert found["RestartCount"] == 0


def test_a_server_that_was_restarted_is_found_again(watcher: Watcher) -> None:
    ((sample,),) = watcher.query(['process_start_time_seconds{job="logsteer"}'])
    before = float(sample["value"][1])
    watcher.service.kill_server()
    watcher.service.wait_until_ready()

    def is_found() -> bool:
        (found,) = watcher.query(['process_start_time_seconds{job="logsteer"} and on() up == 1'])
        return any(float(each["value"][1]) > before for each in found)

    print(f"\nfound again after {watcher.wait(is_found):.0f} s")


def test_a_server_that_is_gone_is_noticed(watcher: Watcher) -> None:
    (down,) = [rule["expr"] for rule in list_alerts() if rule["alert"] == "LogsteerDown"]
    assert watcher.query([down]) == [[]]
    watcher.service.compose("stop", "cpu")
    try:
        took_s = watcher.wait(lambda: watcher.query([down]) != [[]])
        print(f"\nnoticed after {took_s:.0f} s")
    finally:
        watcher.service.start()

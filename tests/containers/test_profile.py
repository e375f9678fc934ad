"""The compose profile `observability`: Prometheus, as docker-compose.yml runs it, on the server."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.containers.conftest import IMAGE, PROJECT, Service, provide_prometheus
from tests.containers.docker import docker
from tests.deploy.observed import list_alerts

SCRAPE_S = 15
"""Of deploy/observability/prometheus.yml."""
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

    def find_targets(self) -> dict[str, str]:
        """State of each target, by job and instance."""
        (found,) = self.ask(("/api/v1/targets", {}))
        return {
            f"{each['labels']['job']} {each['labels']['instance']}": each["health"]
            for each in found["activeTargets"]
        }

    def wait(self, for_what: Callable[[], bool]) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + 6 * SCRAPE_S
        while not for_what():
            assert time.monotonic() < deadline, self.service.compose("logs", "prometheus")
            time.sleep(1)


@pytest.fixture(scope="module")
def watcher(service: Service) -> Iterator[Watcher]:
    """Prometheus beside the server."""
    version = provide_prometheus()
    service.start("prometheus")
    found = Watcher(service)
    found.wait(lambda: found.find_targets().get("logsteer cpu") == "up")
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


def test_it_runs_confined(watcher: Watcher) -> None:
    container = watcher.service.name_container("prometheus")
    (found,) = json.loads(docker("inspect", container).stdout)
    host = found["HostConfig"]
    assert (host["ReadonlyRootfs"], host["CapDrop"]) == (True, ["ALL"])
    assert found["RestartCount"] == 0

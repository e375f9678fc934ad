"""A server that is watched: Prometheus beside it, and requests of every kind."""

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from safetensors.numpy import save

from logsteer_server.observation.metrics import Metrics
from tests.conftest import ROOT
from tests.ports import find_port

PLACE = ROOT / "deploy" / "observability"
DASHBOARD = PLACE / "dashboards" / "logsteer.json"
ALERTS = PLACE / "alerts.yml"
SCRAPE_S = 1
FAIL = 1301
"""A token over which the fake engine fails."""
NO_GPU = {"GPU, held by the engine", "GPU, free"}
"""Panels without data where there is none."""
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")

WORDS = {
    "sum", "by", "rate", "increase", "histogram_quantile", "min", "max", "and", "or", "unless",
    "label_values", "on", "ignoring", "without", "absent",
}  # fmt: skip
"""Names in PromQL that are no metric."""


def list_queries() -> list[tuple[str, str]]:
    """Panel and expression of every query of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())
    ]


def find_empty(prometheus: "Prometheus") -> set[str]:
    """The dashboard's panels of which a query has no data."""
    return {panel for panel, query in list_queries() if not prometheus.query(fill(query))}


def list_metrics() -> dict[str, set[str]]:
    """The names under which each metric that /metrics has is queried."""
    parts = {"counter": ("_total",), "histogram": ("_count", "_sum", "_bucket")}
    return {
        family.name: {family.name + part for part in parts.get(family.type, ("",))}
        for family in Metrics().registry.collect()
    }


def list_alerts() -> list[dict[str, Any]]:
    """Every alert rule."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def drop_threshold(rule: dict[str, Any], rate: str = "20s") -> str:
    """An alert's expression without the thresholds it compares with, over a short time."""
    bare = re.sub(r"(==|>=|<=|>|<)\s*[\d.]+", "", rule["expr"]).replace(">=", "+")
    return re.sub(r"\[\d+m\]", f"[{rate}]", bare)


def find_metrics(expression: str) -> set[str]:
    """The names of metrics that an expression asks for."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\"[^\"]*\"", " ", expression)
    bare = re.sub(r"\b(?:by|without|on|ignoring)\s*\([^)]*\)", " ", bare)
    return set(re.findall(r"\b[a-z][a-z0-9_]*\b", bare)) - WORDS


def fill(expression: str, rate: str = "20s") -> str:
    """An expression of the dashboard as Grafana would send it."""
    return expression.replace("$__rate_interval", rate).replace("$model", ".*")


class Prometheus:
    """A Prometheus that scrapes one server every second, with the project's own configuration."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an expression comes to now."""
        call = f"{self.url}/api/v1/query"
        answer = httpx.get(call, params={"query": expression}, timeout=60)
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found


@contextmanager
def scrape(
    target: str, directory: Path, port: int | None = None, key: str = ""
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes an address, started from deploy/observability/prometheus.yml."""
    config = yaml.safe_load((PLACE / "prometheus.yml").read_text())
    job = next(job for job in config["scrape_configs"] if job["job_name"] == "logsteer")
    job = {"job_name": job["job_name"], "static_configs": [{"targets": [target]}]}
    if key:
        job["authorization"] = {"credentials": key}
    with start_prometheus([job], directory, port) as found:
        yield found


@contextmanager
def start_prometheus(
    jobs: Sequence[dict[str, Any]], directory: Path, port: int | None
) -> Iterator[Prometheus]:
    """A Prometheus with these jobs and the project's alerts."""
    assert PROMETHEUS is not None
    port = port or find_port()
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": list(jobs),
    }
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    command = [
        PROMETHEUS,
        f"--config.file={path}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/-/ready").status_code == 200:
                    break
            said = (directory / "prometheus.log").read_text()
            assert time.monotonic() < deadline and process.poll() is None, said
            time.sleep(0.1)
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(30)


def make_requests(models: Sequence[str], steered: str) -> list[tuple[str, str, Any]]:
    """Method, path and body of requests of every kind, of which some are refused."""
    requests: list[tuple[str, str, Any]] = []
    for model in models:
        items = [{"context_ids": list(range(5, 60)), "target_ids": [[8, 9, 10], [11]]}] * 3
        requests += [
            ("POST", "/logprob", {"model": model, "items": items}),
            ("POST", "/logprob", {"model": model, "items": items, "cache": False}),
            ("POST", "/perplexity", {"model": model, "texts": ["once upon a time there was " * 8]}),
            ("POST", "/generate", {
                "model": model, "prompt_ids": [list(range(5, 25))], "max_tokens": 24, "n": 4,
                "ignore_eos": True, "stream": True,
            }),
            ("POST", "/logprob", {"model": model, "items": [{"context_ids": [10**6]}]}),
        ]  # fmt: skip
    requests += [
        ("POST", "/tokenize", {"model": models[0], "texts": ["a text"]}),
        ("POST", "/logprob", {"model": "nobody", "items": []}),
        ("POST", "/logprob", {
            "model": "fake", "items": [{"context_ids": [5, FAIL], "target_ids": [[8]]}],
        }),
        ("GET", "/vectors", None),
        ("GET", "/models", None),
        ("POST", "/steer", {
            "model": steered, "prompt_ids": [list(range(5, 25))], "max_tokens": 16,
            "ignore_eos": True,
            "steering": {"vectors": [{"name": "observed", "scale": 1.0}]},
        }),
    ]  # fmt: skip
    return requests


async def send_requests(
    url: str, tokens: Sequence[str], models: Sequence[str], steered: str, width: int, for_s: float
) -> None:
    """Send requests of every kind for some seconds, six at a time, with these keys in turn."""
    requests = make_requests(models, steered)
    vector = save({"layers.1": np.ones(width, np.float32)})
    ends = time.monotonic() + for_s

    async def call(number: int) -> None:
        headers = {"Authorization": f"Bearer {tokens[number % len(tokens)]}"} if tokens else {}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
            turn = number
            while time.monotonic() < ends:
                method, path, body = requests[turn % len(requests)]
                turn += 1
                await http.request(method, path, json=body)
                if turn % 7 == 0:
                    await http.put("/vectors/observed", content=vector)

    first = {"Authorization": f"Bearer {tokens[0]}"} if tokens else {}
    async with httpx.AsyncClient(base_url=url, headers=first, timeout=60) as http:
        (await http.put("/vectors/observed", content=vector)).raise_for_status()
    await asyncio.gather(*map(call, range(6)))

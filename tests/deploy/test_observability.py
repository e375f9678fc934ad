"""Prometheus' configuration, the alerts, the dashboard: against promtool, and a scraped server."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.conftest import fake_model, vllm_model
from tests.deploy.alert_cases import CASES, AlertCase
from tests.deploy.observed import (
    ALERTS,
    DASHBOARD,
    FAIL,
    NO_GPU,
    PLACE,
    PROMETHEUS,
    PROMTOOL,
    Prometheus,
    drop_threshold,
    find_empty,
    find_metrics,
    list_alerts,
    list_metrics,
    list_queries,
    scrape,
    send_requests,
)
from tests.faults.keys import add_key, connect, serve
from tests.faults.processes import wait_for

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus; NOT CHECKED"
)
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None, reason="prometheus is not installed: apt-get install it; NOT CHECKED"
)


METRICS = list_metrics()
QUERIED = {"up"}.union(*METRICS.values())
"""Names that a query may have; `up` is Prometheus' own."""


def promtool(*arguments: str, given: str | None = None) -> str:
    done = subprocess.run(
        ["promtool", *arguments], input=given, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


# ------------------------------------------------------------------ without Prometheus


@pytest.mark.parametrize(("panel", "expression"), list_queries())
def test_a_dashboard_query_names_existing_metrics(panel: str, expression: str) -> None:
    assert find_metrics(expression), expression
    assert find_metrics(expression) <= QUERIED, expression


@pytest.mark.parametrize("rule", list_alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_names_existing_metrics_and_an_action(rule: dict[str, Any]) -> None:
    assert find_metrics(rule["expr"])
    assert find_metrics(rule["expr"]) <= QUERIED
    assert set(rule["annotations"]) == {"summary", "meaning", "action"}
    assert rule["labels"]["severity"] in {"warning", "critical"}


def test_every_metric_is_shown_or_watched() -> None:
    shown = {name for _, query in list_queries() for name in find_metrics(query)}
    shown |= {name for rule in list_alerts() for name in find_metrics(rule["expr"])}
    own = {name for name in METRICS if name.startswith("logsteer_")}
    assert {name for name in own if not METRICS[name] & shown} == {"logsteer_build_info"}


def test_the_dashboard_fits_grafanas_schema() -> None:
    reason = "grafana-foundation-sdk is not installed; the dashboard's schema is NOT CHECKED"
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason=reason)
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    plugins.register_default_plugins()
    written = json.loads(DASHBOARD.read_text())
    read = json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(written)))
    assert find_lost(written, read) == []
    wrong = written | {"graphTooltips": 1}
    read = json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(wrong)))
    assert find_lost(wrong, read) == [".graphTooltips"]


def find_lost(given: Any, read: Any, place: str = "") -> list[str]:
    """Where a document has what is not in the one that was read of it, or is other there."""
    if isinstance(given, dict):
        return [
            lost
            for name, value in given.items()
            for lost in (
                find_lost(value, read[name], f"{place}.{name}")
                if isinstance(read, dict) and name in read
                else [f"{place}.{name}"]
            )
        ]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        pairs = enumerate(zip(given, read, strict=True))
        return [lost for n, (one, two) in pairs for lost in find_lost(one, two, f"{place}[{n}]")]
    return [] if given == read else [place]


# ------------------------------------------------------------------ with promtool


@needs_promtool
def test_promtool_takes_configuration_and_rules() -> None:
    promtool("check", "config", str(PLACE / "prometheus.yml"))
    promtool("check", "rules", "--lint-fatal", str(ALERTS))


def test_every_alert_has_a_case() -> None:
    assert set(CASES) == {rule["alert"] for rule in list_alerts()}


def write_cases(directory: Path, alert: str, case: AlertCase, fires: bool, minute: int) -> Path:
    """A test of promtool's. Annotations, which it would compare as well, are left out."""
    rules = yaml.safe_load(ALERTS.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]
            severity = rule["labels"] if rule["alert"] == alert else {}
            if severity:
                expected = {"exp_labels": case.labels | severity}
    (directory / "rules.yml").write_text(yaml.safe_dump(rules))
    path = directory / "test.yml"
    series = case.fires if fires or minute == 0 else case.quiet
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{minute}m",
                "alertname": alert,
                "exp_alerts": [expected] if fires else [],
            }
        ],
    }
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "30s", "tests": [test]}
    path.write_text(yaml.safe_dump(document))
    return path


@needs_promtool
@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_it_should_and_only_then(tmp_path: Path, alert: str) -> None:
    case = CASES[alert]
    promtool("test", "rules", str(write_cases(tmp_path, alert, case, True, case.minute)))
    promtool("test", "rules", str(write_cases(tmp_path, alert, case, False, case.minute)))
    promtool("test", "rules", str(write_cases(tmp_path, alert, case, False, 0)))


# ------------------------------------------------------------------ with Prometheus and a server


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A server of vLLM and the fake engine under load, metrics behind a key."""
    directory = tmp_path_factory.mktemp("watched")
    keys = directory / "keys.json"
    tokens = [add_key(keys, "ann", "score", "steer", "write"), add_key(keys, "bob", "score")]
    config = {
        "models": [
            vllm_model("demo", adapter_slots=1),
            fake_model("fake", delay_s=0.02, fail_id=FAIL),
        ],
        "key_file": str(keys),
        "metrics_key": "to-scrape",
        "max_pending_tokens": 500,
        "log_format": "json",
    }
    with serve(config, directory / "server") as server:
        header = {"Authorization": "Bearer to-scrape"}
        page = httpx.get(f"{server.url}/metrics", headers=header, timeout=60)
        # It takes a colon for a recording rule's; vLLM's names have one.
        promtool("check", "metrics", given=page.text.replace("vllm:", "vllm_"))
        with connect(server, tokens[0]) as http:
            width = http.get("/models/demo").json()["hidden_size"]
        with scrape(
            httpx.URL(server.url).netloc.decode(), directory, key="to-scrape"
        ) as prometheus:
            asyncio.run(send_requests(server.url, tokens, ["demo", "fake"], "demo", width, 15.0))
            yield prometheus


@needs_prometheus
@pytest.mark.engine
def test_every_query_of_the_dashboard_has_data(watched: Prometheus) -> None:
    wait_for(lambda: find_empty(watched) == NO_GPU)  # a scrape may be late, or be lost


@needs_prometheus
@pytest.mark.engine
def test_every_metric_was_scraped(watched: Prometheus) -> None:
    names = {min(names) for names in METRICS.values()}
    on_cpus = {name for name in names if not name.startswith("logsteer_gpu_")}
    wait_for(lambda: all(watched.query(name) for name in on_cpus))


@needs_prometheus
@pytest.mark.engine
@pytest.mark.parametrize("rule", list_alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_has_data_and_is_quiet_without_cause(
    watched: Prometheus, rule: dict[str, Any]
) -> None:
    """Without its thresholds it has data; with them it is quiet, but for what the load provokes."""
    bare = drop_threshold(rule)
    # A scrape of a busy machine may be late or lost, for which alone no alert fires either.
    wait_for(lambda: watched.query(bare))
    provoked = {"LogsteerRefusesWork", "LogsteerFaults"}
    wait_for(lambda: rule["alert"] in provoked or not watched.query(rule["expr"]))

"""Write Grafana's dashboard: `python deploy/observability/write_dashboard.py`.

The rows and panels below are the dashboard; what Grafana's JSON wants beside them is added here
once. With --check the file is compared, and the exit status says whether it is as it would be.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parent / "dashboards" / "logsteer.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, COLUMNS = 24, 8, 4
"""Of Grafana's grid: its width, the height of a panel, the most panels side by side."""


@dataclass(frozen=True)
class Panel:
    """A graph: its title, the unit of its numbers in Grafana's terms, and its queries by legend.

    `text` explains it, and `empty` is what it says where there is nothing to show.
    """

    title: str
    unit: str
    queries: dict[str, str]
    text: str = ""
    empty: str = "No requests of this kind."


def rate(metric: str, labels: str, by: str) -> str:
    """Return a query for how fast a counter grows."""
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile(q: float, metric: str, labels: str, by: str) -> str:
    """Return a query for a quantile of a histogram."""
    return f"histogram_quantile({q}, {rate(metric + '_bucket', labels, f'{by}, le')})"


MODEL = 'model=~"$model"'
TOKENS = "count:tok/s"
NO_GPU = "No engine is on a GPU."
NO_KEYS = "No key_file: the server knows no keys."
ROWS: dict[str, list[Panel]] = {
    "Traffic": [
        Panel("Requests", "reqps", {
            "{{path}} {{status}}": rate("logsteer_requests_total", "", "path, status")}),
        Panel("Problems by code", "reqps", {
            "{{code}} {{path}}": rate("logsteer_errors_total", "", "code, path")},
            "overloaded and rate_limited may be tried again; internal is a fault."),
        Panel("In flight", "short", {"requests": "sum(logsteer_requests_in_flight)"}),
        Panel("Models that answer", "short", {
            "{{model}}": f"min by (model) (logsteer_model_ready{{{MODEL}}})"}),
        Panel("Admitted work, tokens", "percentunit", {
            "{{model}}": f"max by (model) (logsteer_pending_tokens{{{MODEL}}} / "
            f"logsteer_pending_tokens_limit{{{MODEL}}})"},
            "Share of max_pending_tokens; of several ingresses, the fullest one's."),
        Panel("Admitted work, memory", "percentunit", {
            "all models": "max(logsteer_pending_bytes / logsteer_pending_bytes_limit)"},
            "Share of max_pending_bytes; of several ingresses, the fullest one's."),
        Panel("Ledger and coordinator away", "short", {
            "{{part}}": "sum by (part) (logsteer_cluster_part_away)"},
            "Ingresses that ledger or coordinator do not answer.",
            empty="A service on one machine has neither; they are parts of one on Ray."),
    ],
    "Latency": [
        Panel("Request, median and 99 %", "s", {
            "{{path}} 50 %": quantile(0.5, "logsteer_request_seconds", "", "path"),
            "{{path}} 99 %": quantile(0.99, "logsteer_request_seconds", "", "path")}),
        Panel("Wait for the engine", "s", {
            "{{model}} 50 %": quantile(0.5, "logsteer_queue_seconds", MODEL, "model"),
            "{{model}} 99 %": quantile(0.99, "logsteer_queue_seconds", MODEL, "model")}),
        Panel("Engine's time for a request", "s", {
            "{{model}} 50 %": quantile(0.5, "logsteer_engine_seconds", MODEL, "model"),
            "{{model}} 99 %": quantile(0.99, "logsteer_engine_seconds", MODEL, "model")}),
        Panel("Time to first token", "s", {
            "{{model}} 50 %": quantile(0.5, "logsteer_time_to_first_token_seconds", MODEL, "model"),
            "{{model}} 99 %": quantile(
                0.99, "logsteer_time_to_first_token_seconds", MODEL, "model")},
            "Of streamed requests."),
        Panel("Time between tokens", "s", {
            "{{model}} 50 %": quantile(0.5, "logsteer_time_between_tokens_seconds", MODEL, "model"),
            "{{model}} 99 %": quantile(
                0.99, "logsteer_time_between_tokens_seconds", MODEL, "model")},
            "Of streamed sequences."),
        Panel("Step of the engine", "s", {
            "{{model}}/{{replica}} 50 %": quantile(
                0.5, "logsteer_engine_step_seconds", MODEL, "model, replica"),
            "{{model}}/{{replica}} 99 %": quantile(
                0.99, "logsteer_engine_step_seconds", MODEL, "model, replica")}),
    ],
    "Tokens": [
        Panel("Read", TOKENS, {"{{model}}": rate("logsteer_prompt_tokens_total", MODEL, "model")}),
        Panel("Scored", TOKENS, {
            "{{model}}": rate("logsteer_scored_tokens_total", MODEL, "model")}),
        Panel("Generated", TOKENS, {
            "{{model}}": rate("logsteer_generated_tokens_total", MODEL, "model")}),
        Panel("Steered", TOKENS, {
            "{{model}}": rate("logsteer_steered_tokens_total", MODEL, "model")}),
        Panel("Prefix cache", "percentunit", {
            "{{model}}": rate("logsteer_prefix_cached_tokens_total", MODEL, "model")
            + " / (" + rate("logsteer_prompt_tokens_total", MODEL, "model") + " > 0)"},
            "Share of prompt tokens that it had."),
    ],
    "Engines": [
        Panel("Sequences", "short", {
            "{{model}}/{{replica}} running": f"logsteer_engine_sequences_running{{{MODEL}}}",
            "{{model}}/{{replica}} waiting": f"logsteer_engine_sequences_waiting{{{MODEL}}}",
            "{{model}}/{{replica}} queued":
                f"sum by (model, replica) (logsteer_engine_sequences_queued{{{MODEL}}})"}),
        Panel("Key-value blocks", "percentunit", {
            "{{model}}/{{replica}}": f"logsteer_kv_cache_blocks_used{{{MODEL}}} / "
            f"logsteer_kv_cache_blocks{{{MODEL}}}"}, "Share that sequences hold."),
        Panel("Preemptions", "count:/s", {
            "{{model}}/{{replica}}": rate(
                "logsteer_engine_preemptions_total", MODEL, "model, replica")},
            "Sequences that gave their blocks back and are computed again."),
        Panel("Slots in use", "short", {
            "{{model}}/{{replica}} plans": f"logsteer_steering_slots_used{{{MODEL}}}",
            "{{model}}/{{replica}} adapters": f"logsteer_adapter_slots_used{{{MODEL}}}"},
            "Of steering_slots and adapter_slots."),
        Panel("Heartbeat's age", "s", {
            "{{model}}/{{replica}}": f"logsteer_engine_heartbeat_age_seconds{{{MODEL}}}"}),
        Panel("Restarts in an hour", "short", {
            "{{model}}/{{replica}}": "max by (model, replica) "
            f"(increase(logsteer_engine_restarts_total{{{MODEL}}}[1h]))"}),
        Panel("Processors", "count:cores", {
            "{{model}}/{{replica}}": rate(
                "logsteer_engine_process_cpu_seconds_total", MODEL, "model, replica"),
            "HTTP {{instance}} {{process}}": rate(
                "process_cpu_seconds_total", 'job="logsteer"', "instance, process")},
            "Cores that are busy."),
    ],
    "Memory": [
        Panel("Resident", "bytes", {
            "{{model}}/{{replica}}":
                f"logsteer_engine_process_resident_memory_bytes{{{MODEL}}}",
            "HTTP {{instance}} {{process}}": 'process_resident_memory_bytes{job="logsteer"}'}),
        Panel("GPU, held by the engine", "bytes", {
            "{{model}}/{{replica}} GPU {{device}}": f"logsteer_gpu_memory_held_bytes{{{MODEL}}}"},
            empty=NO_GPU),
        Panel("GPU, free", "percentunit", {
            "{{model}}/{{replica}} GPU {{device}}": f"logsteer_gpu_memory_free_bytes{{{MODEL}}} / "
            f"logsteer_gpu_memory_bytes{{{MODEL}}}"}, empty=NO_GPU),
        Panel("Open files and connections", "percentunit", {
            "HTTP {{instance}} {{process}}":
                'process_open_fds{job="logsteer"} / process_max_fds{job="logsteer"}'},
            "Share of what the process may have open."),
    ],
    "Caches and stores": [
        Panel("Result cache, hits", "percentunit", {
            "{{model}}": rate("logsteer_result_cache_hits_total", MODEL, "model")
            + " / (" + rate("logsteer_result_cache_hits_total", MODEL, "model")
            + " + " + rate("logsteer_result_cache_misses_total", MODEL, "model") + " > 0)"},
            "Share of sequences looked up."),
        Panel("Result cache, size", "bytes", {
            "memory": "sum(logsteer_result_cache_bytes)",
            "limit": "sum(logsteer_result_cache_limit_bytes)",
            "file": "max(logsteer_result_cache_file_bytes)"},
            "Of several ingresses, the sum of their memory and the largest file."),
        Panel("Stores", "bytes", {
            "{{kind}} of {{owner}}": "max by (kind, owner) (logsteer_store_bytes)"}),
        Panel("Stores, share of the limit", "percentunit", {
            "{{kind}}": 'sum by (kind) (logsteer_store_bytes{owner="shared"}) / '
            "sum by (kind) (logsteer_store_limit_bytes)"}),
        Panel("Disk of the stores, free", "percentunit", {
            "free": "min(logsteer_store_disk_free_bytes / logsteer_store_disk_bytes)"}),
    ],
    "Keys": [
        Panel("Requests", "reqps", {"{{key}}": rate("logsteer_key_requests_total", "", "key")},
            empty=NO_KEYS),
        Panel("Problems", "reqps", {"{{key}}": rate("logsteer_key_errors_total", "", "key")},
            empty=NO_KEYS),
        Panel("Tokens", TOKENS, {"{{key}} {{kind}}": rate(
            "logsteer_key_tokens_total", "", "key, kind")}, empty=NO_KEYS),
    ],
}  # fmt: skip


def make_dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana stores it."""
    return {
        "uid": "logsteer",
        "title": "logsteer",
        "description": "What a logsteer server and its engines are at.",
        "tags": ["logsteer"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_make_source_variable(), _make_model_variable()]},
        "annotations": {"list": []},
        "links": [],
        "panels": list(_make_panels()),
    }


def _make_source_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "type": "datasource",
        "label": "Prometheus",
        "query": "prometheus",
        "hide": 0,
    }


def _make_model_variable() -> dict[str, Any]:
    return {
        "name": "model",
        "type": "query",
        "label": "Model",
        "datasource": SOURCE,
        "query": "label_values(logsteer_model_ready, model)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all", "selected": True},
        "hide": 0,
    }


def _make_panels() -> Iterator[dict[str, Any]]:
    number = top = 0
    for row, panels in ROWS.items():
        number += 1
        place = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        yield {
            "id": number,
            "type": "row",
            "title": row,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        top += 1
        for line in _break_lines(panels):
            width = WIDTH // len(line)
            for index, panel in enumerate(line):
                number += 1
                place = {"h": HEIGHT, "w": width, "x": width * index, "y": top}
                yield _make_graph(number, panel, place)
            top += HEIGHT


def _break_lines(panels: list[Panel]) -> Iterator[list[Panel]]:
    """Yield lines of panels of which none leaves a gap: seven become four and three."""
    lines = -(-len(panels) // COLUMNS)
    for line in range(lines):
        size = -(-len(panels) // (lines - line))
        yield panels[:size]
        panels = panels[size:]


def _make_graph(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    bounds = {"min": 0, "max": 1} if panel.unit == "percentunit" else {"min": 0}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                **bounds,
                "noValue": panel.empty,
                "custom": {"fillOpacity": 10},
            },
            "overrides": [],
        },
        "options": {
            "legend": {
                "showLegend": True,
                "displayMode": "list",
                "placement": "bottom",
                "calcs": [],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "range": True,
            }
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def main(argv: list[str] | None = None) -> int:
    """Write or check the file; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail where the file differs")
    arguments = parser.parse_args(argv)
    text = json.dumps(make_dashboard(), indent=1) + "\n"
    if not arguments.check:
        PLACE.write_text(text)
        return 0
    if PLACE.read_text() == text:
        return 0
    sys.stderr.write(f"{PLACE} is stale: run this script without --check and commit it\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())

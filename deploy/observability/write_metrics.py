"""Write `docs/metrics.md` from the catalog: `python deploy/observability/write_metrics.py`."""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from logsteer_server.observation.catalog import LOG_FIELDS, METRICS, PROCESS_METRICS
from logsteer_server.observation.tallies import SECONDS
from logsteer_server.reference import tabulate

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "docs" / "metrics.md"
ALERTS = ROOT / "deploy" / "observability" / "alerts.yml"

HEAD = """# Metrics, logs and traces

`GET /metrics` answers in Prometheus' text format, on the service's port or on `metrics_port`, and
asks for `metrics_key` where there is one. This page is written from the server's own tables:
`make docs`.

## Metrics

`replica` tells the engine processes of a model apart. Histograms have buckets of {buckets} s.
Counters of an engine begin anew with its process.
"""

LOGS = """
## Log lines

`log_format: json` writes an object a line to standard error, engines too. What compiled libraries
print by themselves stays text, and so do the lines of vLLM's own processes where a model has
several ranks. `access_log: true` adds a line a request (`access_log_file` in a file of its own);
what keys with the scopes `write` and `admin` did or were refused is logged always
(`audit_log_file`). No line has a prompt, a vector's numbers or a key.
"""

TRACES = """
## Traces

`tracing: true` (with `logsteer[otel]`) makes a span of each request, below the caller's where that
sent `traceparent`, as the Python client does inside of a span. Its children are `admission`,
`planning`, `queue`, `engine` and `answer`; a request with several batches has several of the middle
ones. Attributes are the fields of the access log. `OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, `OTEL_TRACES_EXPORTER` (`otlp`, `console`, `none`) and
their kin say where spans go and which are kept.
"""

WATCH = """
## Alerts

`docker compose --profile observability up` starts Prometheus and Grafana beside the service, with
`deploy/observability/alerts.yml` and the dashboard at http://127.0.0.1:3000.
"""


def render() -> str:
    """Return the document."""
    parts = [HEAD.format(buckets=", ".join(f"{bound:g}" for bound in SECONDS)), "\n"]
    metrics = [
        (f"`{m.full_name}`", m.kind, ", ".join(m.labels), m.unit, m.text) for m in METRICS.values()
    ]
    process = [
        (f"`{name}`", "counter" if name.endswith("_total") else "gauge", "", "", text)
        for name, text in PROCESS_METRICS.items()
    ]
    parts += tabulate(("name", "type", "labels", "unit", "meaning"), metrics + process)
    parts += [LOGS, "\n"]
    fields = [(f"`{field.name}`", ", ".join(field.lines), field.text) for field in LOG_FIELDS]
    parts += tabulate(("field", "lines", "meaning"), fields)
    parts += [TRACES, "\n", WATCH, "\n"]
    alerts = [
        (
            rule["alert"],
            rule["labels"]["severity"],
            f"`{rule['expr']}`, {rule.get('for', 'at once')}",
            rule["annotations"]["meaning"],
            rule["annotations"]["action"],
        )
        for rule in _list_alerts()
    ]
    parts += tabulate(("alert", "severity", "when", "meaning", "what to do"), alerts)
    return "".join(parts)


def _list_alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def main(argv: list[str] | None = None) -> int:
    """Write the document, or with --check compare; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail where the document differs")
    arguments = parser.parse_args(argv)
    if not arguments.check:
        PLACE.write_text(render())
        return 0
    if PLACE.read_text() == render():
        return 0
    sys.stderr.write(f"{PLACE.name} is stale: run `make docs` and commit it\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())

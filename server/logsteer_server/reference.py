"""The pages of the documentation that follow from the code: `python -m logsteer_server.reference`.

Settings, endpoints with the fields of their requests, problem codes and metrics, as Markdown.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from logsteer._endpoints import ENDPOINTS, Endpoint
from logsteer.errors import KINDS, api_error
from logsteer_server.api.routes.tasks import TASKS
from logsteer_server.contract.engine import TIME_BOUNDS_S
from logsteer_server.observation.metrics import Metrics
from logsteer_server.settings import ModelSettings, Settings

WRITTEN = "<!-- Written by `make docs` from the code: change that. -->\n"

BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
"""Keys of a JSON schema, and how a bound is shown."""


def write_settings() -> str:
    """Return the page of all settings, the server's and a model's."""
    return "".join(
        [
            "# Settings\n\n",
            WRITTEN,
            "\nA setting stands in the configuration file, or in a variable `LOGSTEER_` and its "
            "name in capitals, which comes before the file, or in a `.env` file. Relative paths "
            "start in the configuration file's directory. "
            "`logsteer-server --check` says whether a configuration is valid, without loading a "
            "model.\n\n",
            "## The server\n\n",
            *_tabulate_fields(Settings.model_json_schema()),
            "\n## A model\n\nEach entry of `models`:\n\n",
            *_tabulate_fields(ModelSettings.model_json_schema()),
        ]
    )


def write_errors() -> str:
    """Return the page of all problem codes."""
    rows = []
    for code, kind in KINDS.items():
        raised = type(api_error(code, ""))
        why = (raised.__doc__ or "").partition("\n")[0]
        again = "yes" if kind.retryable else "no"
        rows.append((f"`{code}`", str(kind.status), kind.title, again, f"`{raised.__name__}`", why))
    return "".join(
        [
            "# Errors\n\n",
            WRITTEN,
            "\nErrors are problem documents (RFC 9457, `application/problem+json`) with the fields "
            "`type`, `title`, `status`, `detail`, `code`, `param`, `retryable` and `request_id`. "
            "`detail` says what was wrong and what to do. What may be tried again carries "
            "`Retry-After`, which the client obeys. Errors of `/v1` have OpenAI's shape, and "
            "status 400 for what is 422 elsewhere.\n\n",
            *tabulate(("code", "status", "title", "try again", "in Python", "means"), rows),
        ]
    )


def write_endpoints() -> str:
    """Return the page of all endpoints, with the fields of their requests."""
    parts = [
        "# HTTP endpoints\n\n",
        WRITTEN,
        "\nRequests are JSON and refuse unknown fields; answers are JSON, or MessagePack where "
        "`Accept: application/msgpack` asks for it. `/docs` of a running server has every schema, "
        "answers included.\n\n",
    ]
    for endpoint in ENDPOINTS.values():
        parts += _describe(endpoint)
    return "".join(parts).rstrip("\n") + "\n"


def write_metrics() -> str:
    """Return the page of all metrics."""
    metrics = Metrics()
    rows = []
    for family in metrics.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(metrics.labels.get(family.name, ()))
        rows.append((f"`{name}`", family.type, labels, family.documentation))
    return "".join(
        [
            "# Metrics\n\n",
            WRITTEN,
            "\n`GET /metrics` answers in Prometheus' text format, and asks for `metrics_key` where "
            "there is one. `replica` tells the engine processes of a model apart. Times are in "
            "seconds; their histograms have buckets of "
            f"{', '.join(f'{bound:g}' for bound in TIME_BOUNDS_S)}. Counters of an engine begin "
            "anew with its process; the last ones are of the HTTP process.\n\n",
            *tabulate(("name", "type", "labels", "meaning"), rows),
        ]
    )


def _describe(endpoint: Endpoint) -> Iterator[str]:
    """Yield an endpoint's section."""
    yield f"## {endpoint.method} {endpoint.path}\n\n"
    task = TASKS.get(endpoint.name)
    if words := endpoint.summary or (task and task.__doc__) or endpoint.events_summary:
        yield " ".join(words.partition("\n\n")[0].split()) + "\n\n"
    yield f"Key: {f'scope `{endpoint.scope}`' if endpoint.scope else 'none needed'}."
    yield f" Python: `client.{endpoint.name}`.\n\n" if endpoint.summary else "\n\n"
    for message in filter(None, (endpoint.request, endpoint.query)):
        if message.model_fields:
            yield from _tabulate_fields(message.model_json_schema())
            yield "\n"


def _tabulate_fields(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of the fields of a JSON schema."""
    required = set(schema.get("required", ()))
    rows = [
        (
            f"`{name}`",
            spell(field),
            "required" if name in required else _spell_default(field),
            " ".join(field.get("description", "").split()),
        )
        for name, field in schema.get("properties", {}).items()
    ]
    return tabulate(("field", "type", "default", "meaning"), rows)


def tabulate(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, each with its end."""
    names = list(head)
    for cells in (names, ["---"] * len(names), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def spell(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema's type in words: `list of integer ≥ 0`, or `null`."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(spell(part) for part in schema[key]))
    if schema.get("type") == "array":
        return f"list of {spell(schema.get('items', {}))}"
    bounds = "".join(f" {sign} {schema[key]:,}" for key, sign in BOUNDS.items() if key in schema)
    return str(schema.get("type", "any")) + bounds


def _spell_default(field: Mapping[str, Any]) -> str:
    default = field.get("default")
    if isinstance(default, int) and not isinstance(default, bool):
        return f"{default:,}"
    return f"`{json.dumps(default)}`" if "default" in field else ""


def write_pages() -> Mapping[str, str]:
    """Return the text of each page by its file's name."""
    return {
        "settings.md": write_settings(),
        "errors.md": write_errors(),
        "endpoints.md": write_endpoints(),
        "metrics.md": write_metrics(),
    }


def main(argv: list[str] | None = None) -> int:
    """Write the pages into a directory, or with --check compare them; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m logsteer_server.reference")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--check", action="store_true", help="fail where a file differs")
    arguments = parser.parse_args(argv)
    stale = []
    for name, text in write_pages().items():
        path = arguments.directory / name
        if arguments.check and (not path.is_file() or path.read_text() != text):
            stale.append(str(path))
        elif not arguments.check:
            path.write_text(text)
    if stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run `make docs` and commit what it writes\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())

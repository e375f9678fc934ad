"""The pages of the documentation that follow from the code: `python -m docs.reference docs`.

Settings, endpoints with the fields of their requests, problem codes and metrics, as Markdown.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from logsteer._endpoints import ENDPOINTS, Endpoint
from logsteer.errors import KINDS, api_error
from logsteer.schemas.common import Column
from logsteer_server.api.routes.tasks import TASKS
from logsteer_server.contract.engine import TIME_BOUNDS_S
from logsteer_server.observation.metrics import Metrics
from logsteer_server.settings import MODEL_TOPICS, SERVER_TOPICS, ModelSettings, Settings

WRITTEN = "<!-- Written by `make docs` from the code: change that. -->\n"

BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
"""Keys of a JSON schema, and how a bound is shown."""
LARGEST = 2**31 - 1
"""Bounds from here on are those of a number's type, and not shown."""
HAND_WRITTEN = {"vectors.combine": "Store a weighted sum of vectors, less its part along others."}
"""Endpoints whose method of the client no schema describes."""


def write_settings() -> str:
    """Return the page of all settings, the server's and a model's."""
    return "".join(
        [
            "# Settings\n\n",
            WRITTEN,
            "\nSet a value in the configuration file, in a variable `LOGSTEER_` and the name in "
            "capitals, or in a `.env` file; a variable comes before the file. Relative paths start "
            "at the configuration file. `logsteer-server --check` validates a configuration.\n",
            *_write_topics(Settings.model_json_schema(), SERVER_TOPICS, "The server"),
            *_write_topics(
                ModelSettings.model_json_schema(), MODEL_TOPICS, "A model: an entry of `models`"
            ),
        ]
    )


def _write_topics(
    schema: Mapping[str, Any], topics: Mapping[str, str], title: str
) -> Iterator[str]:
    """Yield a section with a table of each topic's settings."""
    yield f"\n## {title}\n"
    for topic, names in topics.items():
        yield f"\n### {topic}\n\n"
        rows = []
        for name in names.split():
            field = schema["properties"][name]
            values = ", ".join(f"`{value}`" for value in field.get("enum", ()))
            words = " ".join(field.get("description", "").split())
            default = "required" if name in schema.get("required", ()) else _spell_default(field)
            rows.append((f"`{name}`", default, f"{values}. {words}" if values else words))
        yield from tabulate(("setting", "default", "meaning"), rows)


def write_errors() -> str:
    """Return the page of all problem codes."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for code, kind in KINDS.items():
        raised = type(api_error(code, ""))
        why = (raised.__doc__ or "").partition("\n")[0]
        row = (str(kind.status), "yes" if kind.retryable else "no", f"`{raised.__name__}`", why)
        found.setdefault(row, []).append(f"`{code}`")
    rows = [(", ".join(codes), *row) for row, codes in found.items()]
    return "".join(
        [
            "# Errors\n\n",
            WRITTEN,
            "\nErrors are problem documents (RFC 9457, `application/problem+json`) with `type`, "
            "`title`, `status`, `detail`, `code`, `param`, `retryable` and `request_id`. `detail` "
            "says what was wrong and what to do. A retryable answer has `Retry-After`, which "
            "the client obeys. Errors of `/v1` have OpenAI's shape, and 400 in place of 422.\n\n",
            *tabulate(("code", "status", "try again", "in Python", "means"), rows),
        ]
    )


FIELD_GROUPS = {
    "Model": "model override adapter bos special_tokens on_overflow cache precision",
    "Windows": "protocol context_length stride rows",
    "Prompts": "prompts prompt_ids messages max_tokens n seed stop include_stop stream",
    "Chat": "chat_template_kwargs continue_final_message add_generation_prompt tools",
    "Sampling": "temperature top_p top_k min_p ignore_eos",
}
"""Fields that go together, so that an endpoint names the group."""


def write_endpoints() -> str:
    """Return the page of all endpoints, with the fields of their requests."""
    schemas = {name: _merge_fields(endpoint) for name, endpoint in ENDPOINTS.items()}
    uses = Counter(field for fields in schemas.values() for field in fields.items())
    shared: dict[str, str] = {}  # a name of two meanings is shared by its most frequent one
    for (name, field), count in uses.most_common():
        if count > 1 and "description" in json.loads(field):
            shared.setdefault(name, field)
    rows, sections, plain = [], [], defaultdict(list)
    for name, endpoint in ENDPOINTS.items():
        own = dict(field for field in schemas[name].items() if field not in shared.items())
        also = [field for field in schemas[name] if field not in own]
        what, key = f"`{endpoint.method} {endpoint.path}`", endpoint.scope or "none"
        if own:
            sections.append("".join(_write_section(endpoint, own, also)))
        elif endpoint.summary:
            taken = ", ".join(f"`{field}`" for field in also)
            rows.append((what, endpoint.summary, taken, key, f"`client.{name}`"))
        else:
            plain[key].append(what)
    return "".join(
        [
            "# HTTP endpoints\n\n",
            WRITTEN,
            "\nRequests are JSON; unknown fields are refused. Answers are JSON, or MessagePack by "
            "`Accept: application/msgpack`. `/docs` of a running server has every "
            "schema. A field without a default is optional unless it is required.\n\n"
            f"A `Column` is one of {', '.join(f'`{name}`' for name in get_args(Column))}: see "
            "[Columns](scoring.md#columns).\n\n## Shared fields\n\nEach endpoint below names the "
            "groups and fields that it takes.\n\n",
            *_write_shared(shared),
            *sections,
            "## Without fields of their own\n\n",
            *tabulate(("endpoint", "does", "fields", "scope", "Python"), rows),
            *(f"\nAnd with scope {key}: {', '.join(plain[key])}.\n" for key in plain),
        ]
    )


def _write_shared(shared: Mapping[str, str]) -> Iterator[str]:
    """Yield the tables of the fields that several endpoints take, by group."""
    others = set(shared) - {name for names in FIELD_GROUPS.values() for name in names.split()}
    for group, names in (FIELD_GROUPS | {"Others": " ".join(sorted(others))}).items():
        yield f"### {group}\n\n"
        fields = {name: shared[name] for name in names.split() if name in shared}
        yield from tabulate(("field", "type", "meaning"), _describe_fields(fields))
        yield "\n"


def _name_groups(names: list[str]) -> Iterator[str]:
    """Yield what an endpoint takes of the shared fields: groups, and names."""
    left = list(names)
    for group, members in FIELD_GROUPS.items():
        lacks = [name for name in members.split() if name not in names]
        if len(lacks) < min(4, len(members.split()) - 1):
            but = f" (without {', '.join(f'`{name}`' for name in lacks)})" if lacks else ""
            yield f"*{group}*{but}"
            left = [name for name in left if name not in members.split()]
    yield from (f"`{name}`" for name in left)


def _merge_fields(endpoint: Endpoint) -> dict[str, str]:
    """Return each field of an endpoint's body and query -> its JSON schema, as text."""
    found: dict[str, str] = {}
    for message in filter(None, (endpoint.request, endpoint.query)):
        schema = message.model_json_schema()
        for name, field in schema.get("properties", {}).items():
            required = {"required": name in schema.get("required", ())}
            found[name] = json.dumps(field | required, sort_keys=True)
    return found


def _summarise(endpoint: Endpoint) -> str:
    task = TASKS.get(endpoint.name)
    words = endpoint.summary or (task and task.__doc__) or endpoint.events_summary
    words = words or HAND_WRITTEN.get(endpoint.name, "")
    return " ".join(words.partition("\n\n")[0].split())


def _write_section(endpoint: Endpoint, own: Mapping[str, str], also: list[str]) -> Iterator[str]:
    """Yield an endpoint's section: what it does, the shared fields by name, its own described."""
    told = {name: field for name, field in own.items() if "description" in json.loads(field)}
    named = [name for name in own if name not in told]
    yield f"## {endpoint.method} {endpoint.path}\n\n{_summarise(endpoint)}"
    yield f" Scope `{endpoint.scope}`"
    yield "." if endpoint.path.startswith("/v1/") else f"; `client.{endpoint.name}`."
    yield f" Takes {', '.join(_name_groups([*also, *named]))}.\n\n" if also or named else "\n\n"
    for name, kind, words in _describe_fields(told):
        yield f"- {name} ({kind}): {words}\n"
    yield "\n" if told else ""


def _describe_fields(fields: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield a row of each field: its name, its type and default, what it means."""
    for name, text in fields.items():
        field = json.loads(text)
        kind = spell(field) + (", required" if field["required"] else "")
        default = _spell_default(field)
        words = " ".join(field.get("description", "").split())
        yield f"`{name}`", f"{kind} = {default}" if default else kind, words


def write_metrics() -> str:
    """Return the page of all metrics."""
    metrics = Metrics()
    rows = []
    for family in metrics.registry.collect():
        if family.name.startswith("process_"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(metrics.labels.get(family.name, ()))
        rows.append((f"`{name}`", labels, family.documentation))
    return "".join(
        [
            "# Metrics\n\n",
            WRITTEN,
            "\n`GET /metrics` answers in Prometheus' text format, and needs `metrics_key` where "
            "there is one. A name in `_total` is a counter. A name in `_seconds` is a "
            f"histogram with buckets of {', '.join(f'{bound:g}' for bound in TIME_BOUNDS_S)} s, "
            "but `logsteer_engine_heartbeat_age_seconds`. Others are gauges. `replica` "
            "names an engine process, and an engine's counters start at 0 with its process. "
            "`process_` metrics are those of the HTTP process.\n\n",
            *tabulate(("name", "labels", "meaning"), rows),
        ]
    )


def tabulate(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, each with its end."""
    names = list(head)
    for cells in (names, ["---"] * len(names), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def spell(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema's type in words: `list of integer ≥ 0`, or `null`."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if tuple(schema.get("enum", ())) == get_args(Column):
        return "`Column`"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            parts = [part for part in schema[key] if part.get("type") != "null"]
            return " or ".join(dict.fromkeys(spell(part) for part in parts))
    if schema.get("type") == "array":
        return f"list of {spell(schema.get('items', {})).removesuffix(' ≥ 0')}"
    bounds = "".join(
        f" {sign} {schema[key]:,}"
        for key, sign in BOUNDS.items()
        if key in schema and abs(schema[key]) < LARGEST
    )
    return str(schema.get("type", "any")) + bounds


def _spell_default(field: Mapping[str, Any]) -> str:
    default = field.get("default")
    if isinstance(default, int) and not isinstance(default, bool):
        return f"{default:,}"
    return f"`{json.dumps(default)}`" if default is not None else ""


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
    parser = argparse.ArgumentParser(prog="python -m docs.reference")
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

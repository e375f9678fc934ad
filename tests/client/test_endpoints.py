"""The table of endpoints: it is the server's, and both clients' methods follow it."""

import inspect
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from client.generator import render_all

from logsteer import AsyncClient, Client
from logsteer._calls import NOT_GIVEN, SOURCES
from logsteer._endpoints import ENDPOINTS, Endpoint
from logsteer.schemas.chat import CHAT_FIELDS
from tests.conftest import ROOT

OPENAPI = json.loads((ROOT / "openapi.json").read_text())
OPERATIONS = {
    (method.upper(), path): operation
    for path, methods in OPENAPI["paths"].items()
    for method, operation in methods.items()
}
SPELLED = {("vectors.combine", "vectors"): "weights"}
"""Request fields that a method takes under another name."""
UNASKED = {
    "metrics", "tokenizer_info", "v1.models", "v1.model", "v1.completions", "v1.chat.completions",
    "v1.score", "vllm.health", "vllm.ping", "vllm.post_ping", "vllm.version", "vllm.server_info",
    "vllm.get_world_size", "vllm.reset_prefix_cache",
}  # fmt: skip
"""Endpoints for other programs, which have no method."""
KINDS = {"text": "text/plain", "file": "application/octet-stream", "form": "multipart/form-data"}
ASKED = [endpoint for endpoint in ENDPOINTS.values() if endpoint.name not in UNASKED]


def name_of(endpoint: Endpoint) -> str:
    return endpoint.name


def operation_of(endpoint: Endpoint) -> Any:
    return OPERATIONS[endpoint.method, endpoint.path]


def schema_of(contents: Any) -> str:
    """The name of the message in a body of JSON; empty for a body of another kind."""
    schema = contents.get("application/json", {}).get("schema", {})
    return str(schema.get("$ref", "")).rpartition("/")[2]


def method_of(client: type, name: str) -> Any:
    """The method of a client, or of its resource, that asks an endpoint."""
    resource, _, verb = name.rpartition(".")
    if resource:
        return getattr(getattr(client(), resource), verb)
    return getattr(client, verb)


def test_the_table_has_the_endpoints_of_the_server_and_no_others() -> None:
    assert {(e.method, e.path) for e in ENDPOINTS.values()} == set(OPERATIONS)
    assert len(ENDPOINTS) == len(OPERATIONS)
    assert all(name == endpoint.name for name, endpoint in ENDPOINTS.items())


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=name_of)
def test_the_table_says_what_the_server_takes_and_answers(endpoint: Endpoint) -> None:
    operation = operation_of(endpoint)
    assert operation["tags"] == [endpoint.tag]
    body = operation.get("requestBody", {}).get("content", {})
    assert schema_of(body) == (endpoint.request.__name__ if endpoint.request else "")
    assert (endpoint.upload is not None) == (bool(body) and not schema_of(body))
    assert endpoint.upload is None or list(body) == [KINDS[endpoint.upload]]
    answers = operation["responses"]["200"].get("content", {})
    assert schema_of(answers) == (endpoint.answer.__name__ if endpoint.answer else "")
    formats = re.findall("{format}", endpoint.file_type or "")
    for answer in answers if formats else ():
        assert re.fullmatch(str(endpoint.file_type).replace("{format}", r"\w+"), answer)
    named = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"}
    assert named == set(endpoint.query.model_fields if endpoint.query else ())


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize("endpoint", ASKED, ids=name_of)
def test_every_field_is_an_option_of_the_method(endpoint: Endpoint, client: type) -> None:
    fields = set(re.findall(r"{(\w+)}", endpoint.path))
    for message in filter(None, (endpoint.request, endpoint.query)):
        fields |= set(message.model_fields)
    fields |= {SOURCES[endpoint.upload]} if endpoint.upload else set()
    fields = {SPELLED.get((endpoint.name, field), field) for field in fields - set(endpoint.hidden)}
    names = [endpoint.name] if endpoint.answer or endpoint.file_type else []
    names += [f"{endpoint.name}_events"] if endpoint.answer and endpoint.events else []
    for name in names or [endpoint.name]:
        parameters = inspect.signature(method_of(client, name)).parameters
        assert set(parameters) - {"self"} == fields - {"stream"}
        assert not [p for p in parameters.values() if p.kind is p.VAR_KEYWORD]


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_every_option_of_every_method_is_described(client: type) -> None:
    methods = [name for name in vars(client.__mro__[1]) if not name.startswith("_")]
    assert {"logprob", "steer_events", "sample"} <= set(methods)
    for name in methods:
        method = method_of(client, name)
        described = re.findall(r"^    (\w+): \S", inspect.getdoc(method) or "", re.MULTILINE)
        assert described == list(inspect.signature(method).parameters)[1:], name


def test_options_left_out_are_left_to_the_server() -> None:
    for name in ("logprob", "generate", "perplexity_stream", "score", "get_log_prob"):
        for parameter in inspect.signature(method_of(Client, name)).parameters.values():
            own = {("get_log_prob", "space")}  # whose default is not the endpoint's
            is_option = parameter.kind is parameter.KEYWORD_ONLY
            if is_option and (name, parameter.name) not in own:
                assert parameter.default is NOT_GIVEN
    assert repr(NOT_GIVEN) == "NOT_GIVEN"


def test_convenience_takes_the_options_of_its_endpoint() -> None:
    def named(name: str) -> set[str]:
        parameters = inspect.signature(getattr(Client, name)).parameters.values()
        return {p.name for p in parameters if p.default is NOT_GIVEN}

    assert named("logprob") - named("score") == {"on_error", *CHAT_FIELDS}
    assert named("logprob") - named("get_log_prob") == {
        "columns", "on_error", "policy", "top", "per_token", "probes", "space", *CHAT_FIELDS,
    }  # fmt: skip
    assert named("generate") - named("sample") == {
        "prompts", "prompt_ids", "messages", "on_error",
    }  # fmt: skip


def test_the_written_modules_are_up_to_date() -> None:
    stale = [path.name for path, text in render_all().items() if path.read_text() != text]
    assert not stale, "run `make client`"


def test_the_table_loads_without_a_client() -> None:
    code = (
        "import sys; from logsteer._endpoints import ENDPOINTS;"
        "sys.exit(bool({'httpx', 'rich', 'msgpack'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

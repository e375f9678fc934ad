"""Requests in OpenAI's shape: each field is honoured, taken as asking for nothing, or refused."""

import json
import time
from typing import Any, get_type_hints

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import ValidationError

from logsteer.schemas.openai import (
    LABELS,
    ChatCompletionRequest,
    CompletionRequest,
    SamplingRequest,
    Unsupported,
)
from logsteer_server.tasks.tool_calls import check_cost, find_plain, find_schema, read_calls
from tests.conftest import Server
from tests.refusals import refused

COMPLETION = {"prompt": "Once"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOOLS = CHAT | {"tools": [{"type": "function", "function": {"name": "find"}}]}
FORM = {"response_format": {"type": "json_object"}}


def named(function: str) -> dict[str, Any]:
    """The choice of one function."""
    return {"type": "function", "function": {"name": function}}


REQUESTS: list[tuple[type[SamplingRequest], dict[str, Any]]] = [
    (CompletionRequest, COMPLETION),
    (ChatCompletionRequest, CHAT),
]
UNSUPPORTED = [
    pytest.param(kind, body, name, entry, id=f"{kind.__name__}-{name}")
    for kind, body in REQUESTS
    for name, entry in kind.unsupported.items()
]


def refusal(kind: type[SamplingRequest], body: dict[str, Any]) -> tuple[str | None, str]:
    """The field that is refused, and the reason."""
    with pytest.raises(ValidationError) as caught:
        kind(**body)
    (error,) = caught.value.errors()
    return error.get("ctx", {}).get("param"), error["msg"]


@pytest.mark.parametrize(("kind", "body", "name", "entry"), UNSUPPORTED)
def test_what_is_not_supported_is_refused_unless_it_asks_for_nothing(
    kind: type[SamplingRequest], body: dict[str, Any], name: str, entry: Unsupported
) -> None:
    assert refusal(kind, body | {name: "anything"}) == (name, f"{name}: {entry.reason}.")
    plain = kind(**body)
    for value in (None, *entry.off):
        assert kind(**body, **{name: value}) == plain


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
def test_null_stands_for_a_field_that_is_left_out(
    kind: type[SamplingRequest], body: dict[str, Any]
) -> None:
    names = kind.model_fields.keys() - body.keys()
    assert kind(**body, **dict.fromkeys(names)) == kind(**body)
    assert kind(**body, **dict.fromkeys(LABELS, "mine")) == kind(**body)


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
def test_unknown_fields_are_refused(kind: type[SamplingRequest], body: dict[str, Any]) -> None:
    for value in (None, 0, "x"):
        with pytest.raises(ValidationError, match=r"sterring\n *Extra inputs are not permitted"):
            kind(**body, sterring=value)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (ChatCompletionRequest, chat_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_the_openai_client_is_known(
    kind: type[SamplingRequest], params: type
) -> None:
    known = kind.model_fields.keys() | kind.unsupported.keys() | LABELS
    assert get_type_hints(params).keys() - known == set()


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, COMPLETION | {"stream_options": {}}, "stream_options"),
        (CompletionRequest, {"prompt": ""}, "prompt"),
        (CompletionRequest, COMPLETION | {"max_tokens": 0}, "max_tokens"),
        (CompletionRequest, COMPLETION | {"cache": False}, "cache"),
        (ChatCompletionRequest, CHAT | {"top_logprobs": 3}, "top_logprobs"),
        (ChatCompletionRequest, CHAT | {"tool_choice": "required"}, "tool_choice"),
        (ChatCompletionRequest, TOOLS | {"tool_choice": named("seek")}, "tool_choice"),
        (ChatCompletionRequest, TOOLS | FORM | {"tool_choice": "required"}, "response_format"),
        (ChatCompletionRequest, CHAT | FORM | {"ignore_eos": True}, "ignore_eos"),
        (
            ChatCompletionRequest,
            CHAT | {"response_format": {"type": "json_schema"}},
            "response_format",
        ),
    ],
)
def test_a_request_that_contradicts_itself_is_refused_by_name(
    kind: type[SamplingRequest], body: dict[str, Any], param: str
) -> None:
    named, reason = refusal(kind, body)
    assert named == param
    assert reason.startswith(f"{param}: ")


CALL = '<tool_call>\n{"name": "find", "arguments": {"x": 1}}\n</tool_call>'
FOUND = ("find", '{"x": 1}')


@pytest.mark.parametrize(
    ("choice", "text", "said", "calls"),
    [
        ("auto", "Hello.", "Hello.", []),
        ("auto", f"I look. {CALL}{CALL}", "I look.", [FOUND, FOUND]),
        ("auto", "<tool_call>{", "<tool_call>{", []),
        ("none", CALL, CALL, []),
        (named("find"), '{"x": 1}', None, [FOUND]),
        ("required", '[{"name": "find", "arguments": {"x": 1}}]', None, [FOUND]),
        ("required", '[{"name": "fi', '[{"name": "fi', []),
    ],
)
def test_calls_are_found_in_a_reply(
    choice: Any, text: str, said: str | None, calls: list[tuple[str, str]]
) -> None:
    request = ChatCompletionRequest(**TOOLS, tool_choice=choice)
    found_said, found = read_calls(text, request)
    written = [(call["function"]["name"], call["function"]["arguments"]) for call in found]
    assert (found_said, written) == (said, calls)
    shown = [text[: find_plain(text[:end], request)] for end in range(len(text) + 1)]
    assert all((said or "").startswith(part.strip()) or not calls for part in shown)
    assert (said is None) <= (shown[-1] == "")


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        (FORM, {"type": "object"}),
        ({"tool_choice": named("find")}, {"type": "object", "$defs": {"a": {}}}),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {
                "type": "array",
                "minItems": 1,
                "maxItems": 1,
                "$defs": {"a": {}},
                "items": {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {
                                "name": {"type": "string", "enum": ["find"]},
                                "arguments": {"type": "object"},
                            },
                            "required": ["name", "arguments"],
                            "additionalProperties": False,
                        }
                    ]
                },
            },
        ),
    ],
)
def test_the_form_that_a_reply_is_forced_into(fields: Any, wanted: Any) -> None:
    parameters = {"type": "object", "$defs": {"a": {}}}
    tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    found = find_schema(ChatCompletionRequest(**CHAT, tools=[tool], **fields))
    assert (found and json.loads(found)) == wanted


PATTERN = {"type": "string", "pattern": "^[0-9a-f]{8}-[0-9a-f]{4}$"}


def require(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {} for n in range(count)}}


@pytest.mark.parametrize(
    ("schema", "samples", "reason"),
    [
        (PATTERN, 9, None),
        (PATTERN, 1024, "unfold to 15360 characters, all samples"),
        ({"type": "string", "pattern": "^(a|b)*a(a|b){2000}$"}, 1, "unfolds to 4005"),
        ({"patternProperties": {"a{2000}": {}}}, 1, "unfolds to 2000"),
        ({"pattern": r"^([0-9]{1,3}\.){3}[0-9]{1,3}$"}, 1, None),
        ({"items": [{"pattern": "([a-z]{1,30}){1,30}"}]}, 1, "unfolds to 3600"),
        (require(256), 1, None),
        (require(257), 1, "257 properties are not required"),
        (require(257) | {"required": ["p1"]}, 1, None),
        (require(65) | {"maxProperties": 30}, 1, "65 properties are not required"),
        ({"enum": ["a" * 70_000]}, 1, "70014 characters"),
    ],
)
def test_a_schema_that_takes_long_to_compile_is_refused(
    schema: Any, samples: int, reason: str | None
) -> None:
    """xgrammar takes between seconds and hours for each of those that are refused."""
    if reason is None:
        check_cost(json.dumps(schema), samples, "response_format")
        return
    with refused("invalid_request", reason, param="response_format"):
        check_cost(json.dumps(schema), samples, "response_format")


def test_calls_are_found_in_time_that_grows_with_the_text() -> None:
    """An expression that went back took 30 s for these 96 kB."""
    tool = {"type": "function", "function": {"name": "find"}}
    request = ChatCompletionRequest(**CHAT, tools=[tool])
    text = "<tool_call>{" * 100_000
    began = time.process_time()
    assert read_calls(text, request) == (text, [])
    assert time.process_time() - began < 5


def test_what_the_harness_sends_is_taken() -> None:
    """As `_create_payload` of its `local-completions` and `local-chat-completions` writes it."""
    score = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    CompletionRequest(model="m", prompt=[[1, 2]], **score)
    generate = {"max_tokens": 256, "temperature": 0, "stop": ["\n\n"], "seed": 1234}
    CompletionRequest(model="m", prompt=["a"], **generate)
    ChatCompletionRequest(model="m", **CHAT, **generate)


def test_a_prompt_counts_once_however_many_completions_it_has(fake_server: Server) -> None:
    body = {"prompt": [[5, 6, 7, 8, 9], [5, 6]], "n": 3, "max_tokens": 4}
    answer = httpx.post(f"{fake_server.url}/v1/completions", json=body, timeout=60)
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == 7
    assert usage["total_tokens"] == 7 + usage["completion_tokens"]
    assert len(answer.json()["choices"]) == 6

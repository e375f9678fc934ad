"""Requests in OpenAI's shape: each field is honoured, taken as asking for nothing, or refused.

And conversations, as a template that reads tools and a variable writes them.
"""

import json
import re
import time
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import ValidationError

from logsteer.errors import APIError
from logsteer.schemas import GenerateRequest, TokenizeRequest, TrainRequest, list_conversations
from logsteer.schemas.openai import (
    LABELS,
    ChatCompletionRequest,
    CompletionRequest,
    SamplingRequest,
    Unsupported,
)
from logsteer_server.contract.jobs import ReplyForm
from logsteer_server.tasks.reply_form import check_reply, plan_form
from logsteer_server.tasks.tool_calls import find_form, find_plain, read_calls
from logsteer_server.tasks.training import list_sides, read_sides
from logsteer_server.text.chat import ChatForm
from logsteer_server.text.tokenizer import TextCodec
from tests.conftest import DEMO_MODEL, Server
from tests.refusals import refused
from tests.server.steering_cases import INFO

COMPLETION = {"prompt": "Once"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOOLS = CHAT | {"tools": [{"type": "function", "function": {"name": "find"}}]}
FORM = {"response_format": {"type": "json_object"}}


PARAMETERS = {
    "type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}, "$defs": {"a": {}},
}  # fmt: skip


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
        (CompletionRequest, COMPLETION | {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (ChatCompletionRequest, CHAT | {"logprob_token_ids": [1]}, "logprob_token_ids"),
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
        ({"tool_choice": named("find")}, PARAMETERS),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {
                "type": "array",
                "minItems": 1,
                "maxItems": 1,
                "$defs": {"0": PARAMETERS | {"properties": {"b": {"$ref": "#/$defs/0/$defs/a"}}}},
                "items": {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {
                                "name": {"type": "string", "enum": ["find"]},
                                "arguments": {"$ref": "#/$defs/0"},
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
    tool = {"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}
    found = find_form(ChatCompletionRequest(**CHAT, tools=[tool], **fields))
    assert (found and json.loads(found[1])) == wanted


@pytest.mark.parametrize("place", ["$defs", "definitions"])
def test_each_function_has_its_own_definitions(place: str) -> None:
    """As in smg-project/smg#1090: the last of two with one name was forced on both functions; and
    as in vllm-project/vllm#20470: a reference to the root found the list of calls there.
    """

    def describe(name: str, kind: str) -> dict[str, Any]:
        inner = {"anyOf": [{"$ref": "#"}, {"$ref": f"#/{place}/A"}]}
        parameters = {"type": "object", "properties": {"a": inner}, place: {"A": {"type": kind}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = [describe("one", "integer"), describe("two", "string")]
    request = ChatCompletionRequest(**CHAT, tools=tools, tool_choice="required")
    form = plan_form(request, 1, INFO)
    assert form is not None
    for name, right, wrong in [("one", "1", '"x"'), ("two", '"x"', "1")]:
        for nested in (right, f'{{"a":{right}}}'):
            check_reply(form, f'[{{"name":"{name}","arguments":{{"a":{nested}}}}}]')
        with refused("unsupported_by_engine"):
            check_reply(form, f'[{{"name":"{name}","arguments":{{"a":{wrong}}}}}]')


NUMBER = {"type": "integer"}
A = {"type": "object", "properties": {"a": NUMBER}}


def force(form: Any, samples: int = 1) -> ReplyForm:
    """The planned form of replies: a JSON Schema's, or a regular expression's."""
    kind = "regex" if isinstance(form, str) else "json"
    request = CompletionRequest(**COMPLETION, structured_outputs={kind: form})
    found = plan_form(request, samples, INFO)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (A, ['{"a":1}', "{}"], ['{"a": 1}', '{"a":"b"}', '{"b":1}', '{"a":', ""]),
        (A | {"additionalProperties": True}, ['{"b":[]}'], ['{"a":[]}']),
        (A | {"x-guidance": {"lenient": True}}, ['{"a":1}'], ['{"a": 1}']),
        ({"const": {"properties": {}}}, ['{"properties":{}}'], ["{}"]),
        ({"type": "object", "properties": {"next": {"$ref": "#"}}}, ['{"next":{}}'], ['{"n":{}}']),
        ({"$ref": "#/$defs/a~1b", "minimum": 3, "$defs": {"a/b": NUMBER}}, ["3"], ["2", '"x"']),
        ({"allOf": [NUMBER, {"minimum": 2, "multipleOf": 3}]}, ["3"], ["0", "4", "4.5"]),
        ({"type": "string", "pattern": "a", "maxLength": 2}, ['"ba"'], ['"b"', '"bba"']),
        ({"type": "string", "pattern": '^"$'}, [r'"\""'], ['"a"']),
        ({"oneOf": [NUMBER, {"type": "string", "format": "date"}]}, ['"2020-01-31"'], ['"2020"']),
        (r"^(a|b)\.$", ["a."], ["a", "ab"]),
    ],
)
def test_a_form_is_forced_in_full(form: Any, right: list[str], wrong: list[str]) -> None:
    planned = force(form)
    for text in right:
        check_reply(planned, text)
    for text in wrong:
        with refused("unsupported_by_engine", "does not have its form"):
            check_reply(planned, text)


def describe(count: int, **fields: Any) -> dict[str, Any]:
    """A schema of so many properties."""
    return {"type": "object", "properties": {f"p{n}": {} for n in range(count)}} | fields


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (A | {"if": {"required": ["a"]}, "then": False}, '"if", "then"'),
        ({"anyOf": [A | {"dependentRequired": {"a": ["b"]}}]}, "dependentRequired"),
        ({"not": {}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": A}, "contains"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"$ref": "https://example.com/schema"}, "not present"),
        ({"$ref": "#"}, "no text has it"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf"),
        (A | {"required": ["b"]}, "'b' is unsatisfiable"),
        ({"type": "string", "pattern": "^(?!a)"}, "look-ahead"),
        ({"type": "string", "format": "binary"}, "Unknown format: binary"),
        ({"type": "cat"}, "Invalid type: cat"),
        ({"type": "object", "required": 3}, "Expected array"),
        (r"\bno", "lookarounds"),
        ("(", "unclosed group"),
        ({"enum": ["a" * 70_000]}, "70014 characters"),
        (describe(257), "`properties` has 257, at most 256"),
        ({"type": "array", "maxItems": 10**9}, "`maxItems` has 1000000000"),
        ({"anyOf": [{"type": "array", "maxItems": 4096 - n} for n in range(6)]}, "too big"),
    ],
)
def test_a_form_that_cannot_be_forced_is_refused(form: Any, reason: str) -> None:
    with refused("invalid_request", f"response_format: .*{reason}", param="response_format"):
        force(form)


@pytest.mark.parametrize(
    "form",
    ["(a|b)*a(a|b){2000}", "(a*)*b", "([a-z]{1,30}){1,30}", "a{1,1000000000}", describe(256),
     describe(64, minProperties=1), {"type": "array", "minItems": 4096, "maxItems": 4096},
     {"enum": ["a" * 60_000]}],
)  # fmt: skip
def test_a_form_is_planned_in_bounded_time(form: Any) -> None:
    """xgrammar takes seconds to hours for some of them."""
    began = time.process_time()
    force(form)
    assert time.process_time() - began < 2
    with refused("invalid_request", "in all samples"):
        force(form, 2**18)


def test_calls_are_found_in_time_that_grows_with_the_text() -> None:
    """An expression that went back took 30 s for these 96 kB."""
    tool = {"type": "function", "function": {"name": "find"}}
    request = ChatCompletionRequest(**CHAT, tools=[tool])
    text = "<tool_call>{" * 100_000
    began = time.process_time()
    assert read_calls(text, request) == (text, [])
    assert time.process_time() - began < 5


def test_a_prompt_counts_once_however_many_completions_it_has(fake_server: Server) -> None:
    body = {"prompt": [[5, 6, 7, 8, 9], [5, 6]], "n": 3, "max_tokens": 4}
    answer = httpx.post(f"{fake_server.url}/v1/completions", json=body, timeout=60)
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == 7
    assert usage["total_tokens"] == 7 + usage["completion_tokens"]
    assert len(answer.json()["choices"]) == 6


# ------------------------------------------------------------------ conversations


PLAIN = TextCodec.load(str(DEMO_MODEL))
CODEC = TextCodec.load(str(DEMO_MODEL))
CODEC._tokenizer.chat_template = (
    Path(__file__).parents[1].joinpath("chat_template.jinja").read_text()
)

USER = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Yes, "}
PARTS = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
NULLS = dict.fromkeys(("refusal", "audio", "annotations", "function_call"))
END = "<|assistant|>\n\n"

RENDERED: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "a turn begins": ([USER], {}, f"<|user|>Hi{END}"),
    "after the assistant's, too": ([USER, SAID], {}, f"<|user|>Hi<|assistant|>Yes, </s>{END}"),
    "parts": ([{"role": "user", "content": PARTS}], {}, f"<|user|>Hi{END}"),
    "developer": ([{"role": "developer", "content": "Be kind."}, USER], {},
                  f"<|system|>Be kind.<|user|>Hi{END}"),
    "variable": ([USER], {"chat_template_kwargs": {"enable_thinking": False}},
                 "<|user|>Hi<|assistant|><think></think>\n\n"),
    "no turn": ([USER], {"add_generation_prompt": False}, "<|user|>Hi\n\n"),
    "prefill": ([USER, SAID], {"continue_final_message": True}, "<|user|>Hi<|assistant|>Yes, "),
    "tools": ([USER], {"tools": [TOOL]}, '<|system|>{"type": "function", "function": '
              '{"name": "find", "parameters": {"type": "object"}}}<|user|>Hi' + END),
    "calls": ([USER, {**NULLS, "role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
               {"role": "tool", "tool_call_id": "c", "content": "2"}], {},
              f"<|user|>Hi<|assistant|><tool_call>find of x</tool_call></s><|tool|>2{END}"),
}  # fmt: skip


@pytest.mark.parametrize("name", RENDERED)
def test_a_conversation_is_rendered(name: str) -> None:
    messages, fields, wanted = RENDERED[name]
    request = GenerateRequest.model_validate({"messages": messages, **fields})
    (turns,) = list_conversations(request.messages)
    assert CODEC.render_chat(turns, ChatForm.of(request)) == f"<s>{wanted}"


@pytest.mark.parametrize(
    ("codec", "messages", "fields", "param", "reason"),
    [
        (PLAIN, [USER], {"chat_template_kwargs": {"enable_thinking": False}},
         "chat_template_kwargs", "does not read"),
        (CODEC, [USER], {"chat_template_kwargs": {"tokenize": True}},
         "chat_template_kwargs", "not a variable"),
        (PLAIN, [USER], {"tools": [TOOL]}, "tools", "does not read tools"),
        (PLAIN, [{"role": "tool", "content": "2"}], {}, "messages", "The roles are"),
    ],
)  # fmt: skip
def test_a_template_is_given_nothing_that_it_would_not_notice(
    codec: TextCodec, messages: list[Any], fields: dict[str, Any], param: str, reason: str
) -> None:
    request = GenerateRequest.model_validate({"messages": messages, **fields})
    (turns,) = list_conversations(request.messages)
    with pytest.raises(APIError, match=reason) as refused:
        codec.render_chat(turns, ChatForm.of(request))
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("templates", "tools", "found"),
    [
        (None, [], "no chat template: write the conversation as text"),
        ({"rag": "r"}, [], "chat templates named rag, and none named default: write"),
        ({"default": "d", "tool_use": "{{ tools }}", "rag": "r"}, [], "d"),
        ({"default": "d", "tool_use": "t{# tools #}"}, [TOOL], "t"),
    ],
)
def test_the_template_in_use_is_the_default_or_that_for_tools(
    templates: Any, tools: list[Any], found: str
) -> None:
    tokenizer = TextCodec.load(str(DEMO_MODEL))._tokenizer
    tokenizer.chat_template = templates
    codec = TextCodec(tokenizer, "digest")
    request = GenerateRequest.model_validate({"messages": [USER], "tools": tools})
    (turns,) = list_conversations(request.messages)
    assert codec.has_chat_template == (len(found) == 1)
    if codec.has_chat_template:
        assert codec.render_chat(turns, ChatForm.of(request)) == found
        described = codec.describe()
        assert (described["chat_template_name"], described["chat_template"]) == ("default", "d")
        return
    with pytest.raises(APIError, match=found):
        codec.render_chat(turns)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": []}, "at least 1"),
        ({"messages": [[USER], []]}, "messages.1"),
        ({"messages": [{"role": "user"}]}, "content, or else tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "'assistant'"),
        ({"prompts": ["a"], "tools": [TOOL]}, "goes with messages"),
        ({"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
         "leave out one"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(reason)):
        GenerateRequest.model_validate(fields)


@pytest.mark.parametrize(
    ("read", "end"),
    [("last", "Yes, </s>\n\n"), ("mean", "Yes, </s>\n\n"), ("answer", "Yes, ")],
)
def test_a_pair_of_conversations_is_read_where_the_answer_ends(read: str, end: str) -> None:
    pair = {"positive": [USER, SAID], "negative": [USER, {"role": "assistant", "content": "No"}]}
    request = TrainRequest.model_validate({"name": "v", "pairs": [pair, ["a", "b"]], "read": read})
    form = ChatForm.of(request, is_whole=True)
    sides = read_sides(list_sides(request.pairs), request.read, form, request.bos, CODEC)
    assert CODEC.decode(next(sides)) == f"<s><|user|>Hi<|assistant|>{end}"
    assert "No" in CODEC.decode(next(sides))
    if read != "answer":
        assert CODEC.decode(next(sides)) == "<s>a"
        return
    with pytest.raises(APIError, match=re.escape("pairs[1].positive does not")):
        next(sides)


def test_what_is_written_into_each_conversation_is_bounded() -> None:
    """16,000 conversations with 4 MB of tools would be 64 GB of text."""
    big = {**TOOL, "function": {"name": "find", "description": "x" * 2**22}}
    TokenizeRequest(messages=[[USER]] * 3, tools=[big])
    with pytest.raises(ValidationError, match=r"tools: .* into each conversation"):
        TokenizeRequest(messages=[[USER]] * 4, tools=[big])
    named = {"enable_thinking": "x" * 2**22}
    with pytest.raises(ValidationError, match=r"chat_template_kwargs: .* into each conversation"):
        TokenizeRequest(messages=[[USER]] * 4, chat_template_kwargs=named)


def test_arguments_that_are_nested_deeply_are_refused() -> None:
    deep = {"name": "find", "arguments": "[" * 100_000 + "]" * 100_000}
    messages = [USER, {"role": "assistant", "tool_calls": [{"function": deep}]}]
    request = GenerateRequest(messages=messages, max_tokens=1)
    with pytest.raises(APIError, match="template refuses"):
        CODEC.render_chat(list_conversations(request.messages)[0], ChatForm.of(request))

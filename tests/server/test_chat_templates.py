"""Conversations as a template that reads tools and a variable writes them, and what it refuses."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from logsteer.errors import APIError
from logsteer.schemas import GenerateRequest, TokenizeRequest, TrainRequest, list_conversations
from logsteer_server.tasks.training import list_sides, read_sides
from logsteer_server.text.chat import ChatForm
from logsteer_server.text.tokenizer import TextCodec
from tests.conftest import DEMO_MODEL

PLAIN = TextCodec.load(str(DEMO_MODEL))
CODEC = TextCodec.load(str(DEMO_MODEL))
CODEC._tokenizer.chat_template = (
    Path(__file__).parents[1].joinpath("chat_template.jinja").read_text()
)

USER = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Yes, "}
PARTS = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"x": 1}'}}
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
    "calls": ([USER, {**NULLS, "role": "assistant", "content": None, "tool_calls": [CALL]},
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


def test_a_model_without_a_template_says_what_to_send() -> None:
    codec = TextCodec.load(str(DEMO_MODEL))
    codec._tokenizer.chat_template = None
    request = GenerateRequest.model_validate({"messages": [USER]})
    (turns,) = list_conversations(request.messages)
    with pytest.raises(APIError, match="no chat template: write the conversation as text"):
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

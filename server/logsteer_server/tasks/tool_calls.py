"""Tool calls in replies: forced with a JSON Schema, or parsed from the text."""

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from logsteer.schemas.chat import Tool
from logsteer.schemas.openai import ChatCompletionRequest, NamedChoice, SamplingRequest
from logsteer_server.contract.jobs import ReplyForm

CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"
"""Marks around a call in the families Qwen and Hermes."""


def find_form(request: SamplingRequest) -> ReplyForm | None:
    """Return the form that the whole reply must have; None for any reply.

    With a named function it is the schema of its arguments; with a required call, that of a list of
    calls.
    """
    wanted, choice = request.response_format, getattr(request, "tool_choice", "none")
    found: dict[str, Any] | None = None
    if isinstance(request, ChatCompletionRequest) and choice not in ("none", "auto"):
        found = _describe_choice(request.tools or [], choice, request.parallel_tool_calls)
    elif wanted is not None and wanted.type == "json_object":
        found = {"type": "object"}
    elif wanted is not None and wanted.json_schema is not None:
        found = wanted.json_schema.schema_
    elif wanted is not None and wanted.pattern is not None:
        return "regex", wanted.pattern
    return None if found is None else ("json", json.dumps(found))


def _describe_choice(
    tools: list[Tool], choice: str | NamedChoice, is_parallel: bool
) -> dict[str, Any]:
    """Return the JSON Schema of a named function's arguments, or of a list of calls.

    A list's arguments are described at the root, by number.
    """
    if isinstance(choice, NamedChoice):
        (tool,) = [one for one in tools if one.function.name == choice.function.name]
        return tool.function.parameters or {"type": "object"}
    calls, described = [], {}
    for n, tool in enumerate(tools):
        own, place = json.dumps(tool.function.parameters or {"type": "object"}), f"#/$defs/{n}"
        described[str(n)] = json.loads(own.replace('"$ref": "#', f'"$ref": "{place}'))
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [tool.function.name]},
                    "arguments": {"$ref": place},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    found: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return found | ({} if is_parallel else {"maxItems": 1}) | {"$defs": described}


def read_calls(
    text: str, request: ChatCompletionRequest
) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text and the tool calls of a complete reply, in OpenAI's shape.

    A truncated list of calls is text.
    """
    choice = request.tool_choice
    if not request.tools or choice == "none":
        return text, []
    if isinstance(choice, NamedChoice):
        return None, [_write_call(choice.function.name, text)]
    if choice == "required":
        calls = _read_json(text)
        if not isinstance(calls, list):
            return text, []
        return None, [_write_call(call["name"], call["arguments"]) for call in calls]
    found = list(map(_read_json, _find_calls(text)))
    calls = [call for call in found if isinstance(call, dict) and {"name", "arguments"} <= {*call}]
    if not calls or len(calls) < len(found):
        return text, []
    said = text[: text.index(CALL_BEGINS)].strip()
    return said or None, [_write_call(call["name"], call["arguments"]) for call in calls]


def find_plain(text: str, request: ChatCompletionRequest) -> int:
    """Return the number of characters of an unfinished reply that are surely not part of a call."""
    if not request.tools or request.tool_choice == "none":
        return len(text)
    if request.tool_choice == "required" or isinstance(request.tool_choice, NamedChoice):
        return 0
    if CALL_BEGINS in text:
        return text.index(CALL_BEGINS)
    kept = [n for n in range(1, len(CALL_BEGINS)) if text.endswith(CALL_BEGINS[:n])]
    return len(text) - max(kept, default=0)


def _find_calls(text: str) -> Iterator[str]:
    end = 0
    while (begin := text.find(CALL_BEGINS, end)) >= 0 and (end := text.find(CALL_ENDS, begin)) >= 0:
        call = text[begin + len(CALL_BEGINS) : end].strip()
        if call.startswith("{") and call.endswith("}"):
            yield call


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _write_call(name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": text}
    return {"id": f"call_{uuid4().hex}", "type": "function", "function": function}

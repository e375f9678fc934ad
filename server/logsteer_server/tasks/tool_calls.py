"""Calls of tools in what a model says: forced by a JSON Schema, or found where it makes them."""

import json
import re
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from logsteer.errors import APIError, api_error
from logsteer.schemas.chat import Tool
from logsteer.schemas.openai import ChatCompletionRequest, NamedChoice

CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"
"""What models of the families Qwen and Hermes write before and after a call."""
MAX_SCHEMA = 2**16
"""Characters of a JSON Schema that is forced."""
MAX_ATOMS, MAX_ALL_ATOMS = 2**9, 2**13
"""Characters of a regular expression with its repetitions written out, and of all of them in all
samples. vLLM reads a schema between two steps, once a sample: `(a|b)*a(a|b){2000}` takes 3 s."""
NESTED = 4
MAX_LEFT_OUT, MAX_COUNTED = 2**8, 2**6
"""Properties of an object that may be left out, and those of one that says how many it has. 2,000
of the former, or 300 of the latter, take minutes to compile, one schema after another."""
_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\d{0,9},?\d{0,9}\}|.", re.DOTALL)


def find_schema(request: ChatCompletionRequest) -> str | None:
    """Return the JSON Schema that the whole reply is to follow, as text; None: any reply will do.

    Of a named function it is that of its arguments, of any one that of a list of calls.
    """
    tools, choice, wanted = request.tools or [], request.tool_choice, request.response_format
    found: dict[str, Any] | None = None
    if isinstance(choice, NamedChoice):
        (tool,) = [one for one in tools if one.function.name == choice.function.name]
        found = tool.function.parameters or {"type": "object"}
    elif choice == "required":
        found = _describe_calls(tools, 1 if request.parallel_tool_calls is False else None)
    elif wanted is not None and wanted.type == "json_object":
        found = {"type": "object"}
    elif wanted is not None and wanted.json_schema is not None:
        found = wanted.json_schema.schema_
    return None if found is None else json.dumps(found)


def check_cost(schema: str, samples: int, param: str) -> None:
    """Refuse a JSON Schema whose grammar would take long to make.

    Errors: APIError `invalid_request`, which names `param`.
    """

    def refuse(found: str, limit: object) -> APIError:
        detail = f"{param}: its JSON Schema has {found}, at most {limit} are compiled: simplify it."
        return api_error("invalid_request", detail, param=param)

    if len(schema) > MAX_SCHEMA:
        raise refuse(f"{len(schema)} characters", MAX_SCHEMA)
    total, parts = 0, [json.loads(schema)]
    while parts:
        part = parts.pop()
        if not isinstance(part, dict):
            parts += part if isinstance(part, list) else []
            continue
        parts += part.values()
        named = part.get("patternProperties")
        for pattern in (part.get("pattern"), *(named if isinstance(named, dict) else ())):
            if isinstance(pattern, str):
                size = _count_atoms(pattern)
                total += size * samples
                if size > MAX_ATOMS:
                    raise refuse(f"a pattern that unfolds to {size} characters", MAX_ATOMS)
        if isinstance(properties := part.get("properties"), dict):
            required = part.get("required")
            left_out = len(properties) - (len(required) if isinstance(required, list) else 0)
            is_counted = "minProperties" in part or "maxProperties" in part
            if left_out > (MAX_COUNTED if is_counted else MAX_LEFT_OUT):
                limit = f"{MAX_LEFT_OUT}, and {MAX_COUNTED} beside minProperties or maxProperties,"
                raise refuse(f"an object of which {left_out} properties are not required", limit)
    if total > MAX_ALL_ATOMS:
        raise refuse(f"patterns that unfold to {total} characters, all samples", MAX_ALL_ATOMS)


def _count_atoms(pattern: str) -> int:
    """Count the characters and classes of a regular expression, its repetitions written out.

    One within another counts `NESTED` times: ([a-z]{1,30}){1,30} takes 2 s to compile.
    """
    sizes, weights, last, weight = [0], [1], 0, 1
    for part in _PART.findall(pattern):
        if part == "(":
            sizes.append(0)
            weights.append(1)
            continue
        if part in ("|", "?", "*", "+"):
            continue
        if part == ")" and len(sizes) > 1:
            last, weight = sizes.pop(), weights.pop()
            weights[-1] = max(weights[-1], weight)
        elif found := re.fullmatch(r"\{(\d*),?(\d*)\}", part):
            sizes[-1] -= last
            last *= weight * int(found[2] or found[1] or 1)
            weights[-1], weight = NESTED, 1
        else:
            last, weight = 1, 1
        sizes[-1] += last
    return sum(sizes)


def _describe_calls(tools: list[Tool], most: int | None) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    shared: dict[str, Any] = {}
    for tool in tools:
        parameters = dict(tool.function.parameters or {"type": "object"})
        shared |= parameters.pop("$defs", {})  # references look for them at the root
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [tool.function.name]},
                    "arguments": parameters,
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    found: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    found |= {} if most is None else {"maxItems": most}
    return found | ({"$defs": shared} if shared else {})


def read_calls(
    text: str, request: ChatCompletionRequest
) -> tuple[str | None, list[dict[str, Any]]]:
    """Return what a whole reply says, and the calls that it makes, in OpenAI's shape.

    A list of calls that was cut is text.
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
    """Return how many characters of a reply that goes on are no call, whatever follows."""
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

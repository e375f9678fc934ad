"""Writes the methods of both clients, from the table of endpoints: `python -m logsteer._generator`.

A method's parameters are the fields of its endpoint's messages, its docstring their descriptions.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from logsteer import _endpoints, schemas
from logsteer._conveniences import CONVENIENCES, Argument, Convenience
from logsteer._endpoints import ENDPOINTS, Content, Endpoint
from logsteer._parameters import Parameter, list_parameters, takes_texts

WIDTH = 100
OUTPUTS = {
    False: Path(__file__).with_name("_sync_methods.py"),
    True: Path(__file__).with_name("_async_methods.py"),
}
"""Whether the methods are asynchronous -> the file that they are written to."""

RESOURCES = {"vectors": "VectorMethods", "overrides": "Overrides", "adapters": "Adapters"}
"""Resource -> the class with its methods; a further method of vectors is written by hand."""

_SOURCES: Mapping[Content, str] = {
    "text": "Source", "file": "Source | bytes", "form": "str | PathLike[str]",
}  # fmt: skip
_ALIASES = {
    repr(value): name for name, value in vars(schemas).items() if get_origin(value) is Literal
}
"""The names that the schemas have for sets of values."""


EVENTS_NOTE = (
    "The request is sent when the first event is asked for. Close the generator to stop early."
)

_HEAD = '''"""{summary}

Written by `make client` from the table of endpoints and the schemas: change those.
"""

from __future__ import annotations

from collections.abc import {iterators}, Mapping, Sequence
from os import PathLike
from typing import Any

from logsteer._call import Download
from logsteer._callers import {caller}, {resource}
from logsteer._endpoints import GenerateEvent, PerplexityEvent, SelftestEvent, SteerEvent
from logsteer._pairs import LogProbs
from logsteer._parameters import NOT_GIVEN, NotGiven
from logsteer._upload import {source}
from logsteer.extras.activations import Activations
from logsteer.extras.datasets import PROMPT
from logsteer.extras.datasets import Source as PromptSource
from logsteer.extras.rewards import Reward
from logsteer.extras.samples import Samples
from logsteer.extras.shards import ActivationShards
from logsteer.schemas import (
{schemas}
)
'''


def render(asynchronous: bool) -> str:
    """Return the source of the methods of one client."""
    text = "".join(_write_classes(asynchronous))
    used = sorted(name for name in schemas.__all__ if _is_word(name, text))
    prefix = "Async" if asynchronous else ""
    head = _HEAD.format(
        summary=f"The methods of `{prefix}Client` that ask one endpoint each.",
        iterators="AsyncGenerator" if asynchronous else "Generator",
        caller=f"{prefix}Caller",
        resource=f"{prefix}StoreMethods",
        source=f"{prefix}Source",
        schemas="\n".join(f"    {name}," for name in used),
    )
    return head + text


def main(argv: list[str] | None = None) -> int:
    """Write the methods, or with --check compare them; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m logsteer._generator")
    parser.add_argument("--check", action="store_true", help="fail where the files differ")
    check = parser.parse_args(argv).check
    stale = [p for p in OUTPUTS if not check or OUTPUTS[p].read_text() != render(p)]
    if check and stale:
        names = " and ".join(OUTPUTS[asynchronous].name for asynchronous in stale)
        sys.stderr.write(f"stale: {names}; run `make client` and commit what it writes\n")
        return 1
    for asynchronous in stale:
        OUTPUTS[asynchronous].write_text(render(asynchronous))
    return 0


def _write_classes(asynchronous: bool) -> Iterator[str]:
    prefix = "Async" if asynchronous else ""
    other = " Those of the client that blocks, awaited." if asynchronous else ""
    yield f"\n\nclass {prefix}ClientMethods({prefix}Caller):\n"
    yield f'    """Methods of the client itself.{other}"""\n'
    for endpoint in ENDPOINTS.values():
        if "." not in endpoint.name:
            yield from _write_endpoint(endpoint, asynchronous)
    for convenience in CONVENIENCES:
        yield _write_convenience(convenience, asynchronous)
    for resource, name in RESOURCES.items():
        stored = ("list", "get", "delete")
        answers = [_name_answer(ENDPOINTS[f"{resource}.{verb}"]) for verb in stored]
        yield f"\n\nclass {prefix}{name}({prefix}StoreMethods[{', '.join(answers)}]):\n"
        yield f'    """Methods of `{prefix}Client.{resource}`.{other}"""\n\n'
        yield f'    _name = "{resource}"\n'
        for endpoint in ENDPOINTS.values():
            if endpoint.name.startswith(f"{resource}."):
                yield from _write_endpoint(endpoint, asynchronous)


def _write_endpoint(endpoint: Endpoint, asynchronous: bool) -> Iterator[str]:
    """Yield the method of an endpoint, and the one that yields its events."""
    name = endpoint.name.rpartition(".")[2]
    arguments = [_spell_parameter(p, asynchronous) for p in list_parameters(endpoint)]
    values = [f'"{endpoint.name}"', *(f"{one.name}={one.name}" for one in arguments)]
    if endpoint.summary:
        answer = _name_answer(endpoint)
        ask = f"{'await ' if asynchronous else ''}self._ask"
        body = [_write_call(f"answer: {answer} = {ask}", values), "return answer"]
        if endpoint.file_type:
            body = [_write_call(f"file: Download = {ask}", values), "return file.data"]
            answer = "bytes"
        head = "async def" if asynchronous else "def"
        doc = _write_docstring(endpoint.summary, endpoint.notes, arguments)
        yield _write_method(f"{head} {name}", arguments, answer, doc, body)
    if endpoint.events_summary:
        name = f"{name}_events" if endpoint.answer else name
        event = _name_event(endpoint)
        answer = (
            f"AsyncGenerator[{event}, None]" if asynchronous else f"Generator[{event}, None, None]"
        )
        doc = _write_docstring(
            endpoint.events_summary, f"{endpoint.notes} {EVENTS_NOTE}".strip(), arguments
        )
        body = [_write_call("return self._listen", values)]
        yield _write_method(f"def {name}", arguments, answer, doc, body)


def _write_convenience(convenience: Convenience, asynchronous: bool) -> str:
    options = [
        _spell_parameter(replace(parameter, named=True, required=False), asynchronous)
        for parameter in list_parameters(ENDPOINTS[convenience.endpoint])
        if parameter.name not in convenience.without
    ]
    arguments = [*convenience.own, *options]
    wait, head = ("await ", "async def") if asynchronous else ("", "def")
    values = [one.name for one in convenience.own] + [f"{one.name}={one.name}" for one in options]
    body = [_write_call(f"return {wait}self._{convenience.name}", values)]
    doc = _write_docstring(convenience.summary, convenience.notes, arguments)
    return _write_method(f"{head} {convenience.name}", arguments, convenience.answer, doc, body)


def _write_method(
    head: str, arguments: list[Argument], answer: str, doc: str, body: list[str]
) -> str:
    parameters = ["self"]
    for argument in arguments:
        if argument.named and "*" not in parameters:
            parameters.append("*")
        default = "" if argument.default is None else f" = {argument.default}"
        parameters.append(f"{argument.name}: {argument.type}{default}")
    lines = [_write_call(head, parameters, f" -> {answer}:", 4)]
    lines += [textwrap.indent(part, "    ") for part in (doc, *body)]
    return "\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def _write_call(head: str, values: list[str], tail: str = "", indent: int = 8) -> str:
    """Return `head(values)tail` as a formatter has it: in one line, or a line a value."""
    line = f"{head}({', '.join(values)}){tail}"
    if indent + len(line) <= WIDTH:
        return line
    return "\n".join([f"{head}(", *(f"    {value}," for value in values), f"){tail}"])


def _write_docstring(summary: str, notes: str, arguments: list[Argument]) -> str:
    width = WIDTH - 8
    parts = [_fill(f'"""{summary}', width)]
    if notes:
        parts.append(_fill(notes, width))
    if arguments:
        lines = [
            textwrap.indent(_fill(f"{one.name}: {one.description}", width - 8, "    "), "    ")
            for one in arguments
        ]
        parts.append("\n".join(["Args:", *lines]))
    if len(parts) == 1 and len(parts[0]) <= width - 3:
        return f'{parts[0]}"""'
    return "\n\n".join(parts) + '\n"""'


def _fill(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _spell_parameter(parameter: Parameter, asynchronous: bool) -> Argument:
    if parameter.source is not None:
        spelled = _SOURCES[parameter.source]
        spelled = spelled.replace("Source", "AsyncSource") if asynchronous else spelled
    elif takes_texts(parameter):
        rest = get_args(parameter.type) if get_origin(parameter.type) is Union else ()
        spelled = "str | Sequence[str]" + (" | None" if NoneType in rest else "")
    else:
        spelled = _spell(parameter.type)
    # Python's word for what JSON calls null.
    text = parameter.description.replace("null", "None").replace("Null", "None")
    if parameter.default is not None:
        text += f" Default {parameter.default}."
    if parameter.required:
        return Argument(parameter.name, spelled, text, parameter.named)
    none = " | None" if spelled.endswith(" | None") else ""
    spelled = f"{spelled.removesuffix(none)} | NotGiven{none}"
    return Argument(parameter.name, spelled, text, parameter.named, "NOT_GIVEN")


def _spell(kind: Any) -> str:
    """Return a type as callers may give it: any sequence for a list, a mapping for an object."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is NoneType:
        return "None"
    if origin in (Union, UnionType):
        return " | ".join(map(_spell, parts))
    if origin is list:
        return f"Sequence[{_spell(parts[0])}]"
    if origin is Literal:
        return _ALIASES[repr(kind)]
    name: str = kind.__name__
    return f"{name} | Mapping[str, Any]" if issubclass(kind, BaseModel) else name


def _name_answer(endpoint: Endpoint) -> str:
    return endpoint.answer.__name__ if endpoint.answer else ""


def _name_event(endpoint: Endpoint) -> str:
    types = set(endpoint.events.values())
    return next(n for n, value in vars(_endpoints).items() if set(get_args(value)) == types)


def _is_word(name: str, text: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


if __name__ == "__main__":
    sys.exit(main())

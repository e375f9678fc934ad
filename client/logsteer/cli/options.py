"""Options of the command line that are parameters of a client's method."""

import argparse
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from logsteer._endpoints import ENDPOINTS
from logsteer._parameters import Parameter, list_parameters


def add_options(
    parser: argparse._ActionsContainer, endpoint: str, metavars: Mapping[str, str | None]
) -> None:
    """Give a command these parameters of an endpoint as options, with what the schemas say of them.

    `metavars` is parameter -> what stands for its value in the help: {"max_tokens": "N"} makes
    `--max-tokens N`. None for one with a set of values, or none.
    """
    parameters = {parameter.name: parameter for parameter in list_parameters(ENDPOINTS[endpoint])}
    for name, metavar in metavars.items():
        parameter = parameters[name]
        flag = f"--{name.replace('_', '-')}"
        arguments: dict[str, Any] = {"help": _describe(parameter), **_read_type(parameter.type)}
        if metavar is not None:
            arguments["metavar"] = metavar
        parser.add_argument(flag, **arguments)


def _read_type(kind: Any) -> dict[str, Any]:
    """Return how argparse reads a value of a field's type."""
    rest = [part for part in get_args(kind) if part is not NoneType]
    if NoneType in get_args(kind):
        return _read_type(rest[0])
    if get_origin(kind) is Literal:
        return {"choices": rest}
    if get_origin(kind) is list:
        return {"action": "append", **_read_type(rest[0])}
    return {"action": "store_true", "default": None} if kind is bool else {"type": kind}


def _describe(parameter: Parameter) -> str:
    text = parameter.description.split(". ")[0].removesuffix(".").replace("null:", "else")
    if get_origin(parameter.type) is list:
        text += "; repeatable"
    elif parameter.default not in (None, False):
        text += f"; default {parameter.default}"
    return text.replace("%", "%%")

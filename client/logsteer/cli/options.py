"""Options of the command line that are parameters of a client's method."""

import argparse
import json
from collections.abc import Mapping
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin

from logsteer._endpoints import ENDPOINTS
from logsteer._parameters import Parameter, list_parameters
from logsteer.cli.terminal import given
from logsteer.schemas import SamplingPolicy


def add_options(
    parser: argparse._ActionsContainer,
    endpoint: str,
    metavars: Mapping[str, str | None],
    short: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Give a command these parameters of an endpoint as options, with what the schemas say of them.

    `metavars` is parameter -> what stands for its value in the help: {"max_tokens": "N"} makes
    `--max-tokens N`. None for one with a set of values, or none. `short` are further flags.
    """
    parameters = {parameter.name: parameter for parameter in list_parameters(ENDPOINTS[endpoint])}
    for name, metavar in metavars.items():
        parameter = parameters[name]
        flag = f"--{name.replace('_', '-')}"
        arguments: dict[str, Any] = {"help": _describe(parameter), **_read_type(parameter.type)}
        if metavar is not None:
            arguments["metavar"] = metavar
        flags = [*filter(None, [short.get(name)]), flag]
        parser.add_argument(*flags, **arguments)


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Give a command the options that `read_policy` reads."""
    group = parser.add_argument_group("policy that the columns refer to")
    for name, field in SamplingPolicy.model_fields.items():
        text = (field.description or "default").removesuffix(".")
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=float if field.annotation is float else int,
            metavar=name.rpartition("_")[2][0].upper(),
            help=f"{text}; default {field.default:g}".removeprefix("default; "),
        )


def read_policy(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the fields of the policy that were given."""
    return dict(given(arguments, *SamplingPolicy.model_fields))


def _read_type(kind: Any) -> dict[str, Any]:
    """Return how argparse reads a value of a field's type."""
    rest = [part for part in get_args(kind) if part is not NoneType]
    if NoneType in get_args(kind):
        return _read_type(rest[0])
    if get_origin(kind) is Literal:
        return {"choices": rest}
    if get_origin(kind) is list:
        return {"action": "append", **_read_type(rest[0])}
    if get_origin(kind) is dict:
        return {"type": json.loads}
    return {"action": "store_true", "default": None} if kind is bool else {"type": kind}


def _describe(parameter: Parameter) -> str:
    text = parameter.description.split(". ")[0].removesuffix(".").replace("null:", "else")
    if any(get_origin(kind) is list for kind in (parameter.type, *get_args(parameter.type))):
        text += "; repeatable"
    elif parameter.default not in (None, False):
        text += f"; default {parameter.default}"
    return text.replace("%", "%%")

"""Arguments of the commands: what they share, fields of requests, steering and probes."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel
from rich.console import Console

from logsteer._calls import Parameter, list_parameters
from logsteer._endpoints import ENDPOINTS
from logsteer.client import Client
from logsteer.errors import LogsteerError
from logsteer.extras.datasets import load_steering, parse_json, read_json_lines
from logsteer.extras.rows import list_grains
from logsteer.schemas import PositionName, ProbeRead, steering
from logsteer.schemas.steering import Operation, Unit, parse_vector

T = TypeVar("T")
Command = Callable[[Client, argparse.Namespace], None]
AddCommand = Callable[..., argparse.ArgumentParser]
"""Adds a command by its name, what it does, its help and its examples; returns its parser."""

MUST_STEER = "must"
"""Of a command that makes no sense without steering."""

STDIN = "-"
"""What stands for standard input among the arguments of a command."""


PIPE_COLUMNS = 100_000
"""Of what is no terminal: nothing is cut or broken there."""


class TerminalConsole(Console):
    """A console of this command, as wide as the terminal; a pipe gets whole lines."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)
        if not self.is_terminal:
            self.width = int(os.environ.get("COLUMNS", PIPE_COLUMNS))

    def on_broken_pipe(self) -> None:
        """Leave it to `main`, whose exit status says it."""
        raise BrokenPipeError


FORMATS = ("table", "json", "jsonl", "csv")
ROW_FORMATS = ("jsonl", "csv")


def begin_commands(
    parser: argparse.ArgumentParser, common: argparse.ArgumentParser, *, required: bool = True
) -> AddCommand:
    """Give a parser commands that have the `common` options; return what adds one.

    A command that `steers`, or that must (`MUST_STEER`), has the options that `read_steering` and
    `read_parameters` read; one that `probes` has those of the argument `probes` of its call; one
    with an `answer` those of `output.show` for that class. `grains` are what its rows may be one
    of, the usual one first; None: all that the class has.
    """
    commands = parser.add_subparsers(title="commands", required=required, metavar="COMMAND")

    def add(
        name: str,
        command: Command | None,
        text: str,
        examples: str,
        *,
        steers: bool | str = False,
        probes: bool = False,
        answer: type[BaseModel] | None = None,
        grains: Sequence[str] | None = None,
        plots: bool = False,
    ) -> argparse.ArgumentParser:
        one = commands.add_parser(name, parents=[common], help=text, **write_examples(examples))
        unset = dict.fromkeys(("output", "output_format", "per", "plot"))
        one.set_defaults(command=command, refuse=one.error, **unset)
        if steers:
            _add_steering_options(one, steers == MUST_STEER)
        if probes:
            one.add_argument_group("reading").add_argument(
                "--probe", type=_parse_probe, action="append", dest="probes",
                metavar="NAME[@LAYERS][:READ]",
                help="a stored vector to read at every token, as in mood, mood@2,5 or "
                "mood@2:cosine; repeatable",
            )  # fmt: skip
        if answer is not None:
            _add_output_options(one, list_grains(answer) if grains is None else grains, plots)
        return one

    return add


def _add_output_options(
    parser: argparse.ArgumentParser, grains: Sequence[str], plots: bool
) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--format", choices=FORMATS, dest="output_format",
        help=f"table, the whole answer as json, or a row per {grains[0]}; default table, or by the "
        "name of --output",
    )  # fmt: skip
    group.add_argument("--output", metavar="FILE", help="write to this file")
    if len(grains) > 1:
        text = f"what a row of jsonl or csv is; default {grains[0]}"
        group.add_argument("--per", choices=grains, help=text)
    if plots:
        group.add_argument("--plot", metavar="FILE", help="plot to a .png, .svg or .pdf file")


def write_examples(examples: str) -> dict[str, Any]:
    """Return the options of a parser whose help ends in these examples, as they are written."""
    formatter = argparse.RawDescriptionHelpFormatter
    return {"epilog": f"examples:{examples}", "formatter_class": formatter}


def read_server(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a client: where the server is, key, patience, model."""
    names = ("base_url", "api_key", "timeout", "model")
    return {name: value for name, value in vars(arguments).items() if name in names}


def given(arguments: argparse.Namespace, *names: str) -> Mapping[str, Any]:
    """Return those of the arguments that were given."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def reading(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return what parses an argument, and has argparse say why a value is refused."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


parse_layers = reading(steering.parse_layers)


def cut_pair(text: str, form: str) -> tuple[str, str]:
    """Return both sides of a text of a form such as NAME:ETA; raise ValueError for another."""
    first, _, second = text.partition(re.sub(r"\w", "", form))
    if not first or not second:
        raise ValueError(f"{text!r} has not the form {form}")
    return first, second


def parse_scales(text: str) -> list[float]:
    """Return the numbers of a list such as -4,-2,0,2,4; else raise ArgumentTypeError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as -4,-2,0,2,4") from error


def read_entries(name: str, form: str) -> Iterator[tuple[str, Any]]:
    """Yield the entries of JSON lines, or of a JSON list, each with its place.

    `form` is what to write for one. Raises LogsteerError for a file that is neither.
    """
    place, data = read_input(name)
    if data.lstrip().startswith(b"["):
        for number, entry in enumerate(parse_json(data, place), 1):
            yield f"{place}, entry {number}", entry
        return
    for number, entry in read_json_lines(BytesIO(data), place, form):
        yield f"{place}, line {number}", entry


def read_input(name: str) -> tuple[str, bytes]:
    """Return what a file is called in errors and its bytes, read once: it may be a pipe.

    - is standard input. Raises LogsteerError where it is empty.
    """
    place = "standard input" if name == STDIN else name
    data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    if not data:
        raise LogsteerError(f"{place} is empty")
    return place, data


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


def _read_type(kind: Any) -> dict[str, Any]:
    """Return how argparse reads a value of a field's type."""
    rest = [part for part in get_args(kind) if part is not NoneType]
    if NoneType in get_args(kind):
        return _read_type(rest[0])
    if bool in rest:  # a flag, or a value of the other type behind it
        return {"nargs": "?", "const": True, "type": rest[-1]}
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


POSITIONS = f"{', '.join(get_args(PositionName))}, or slices as in 0:5,8:10"
"""What `parse_positions` reads."""
_PROBE = re.compile(r"(?P<name>[^:@]+)(@(?P<layers>[^:@]+))?(:(?P<read>[^:@]+))?")
_BOUNDS = ("above", "below", "of")
_DEPENDENT = ("op", "unit", "clamp", "positions", "when", *_BOUNDS)


def _add_steering_options(parser: argparse.ArgumentParser, required: bool) -> None:
    group = parser.add_argument_group("steering")
    either = group.add_mutually_exclusive_group(required=required)
    either.add_argument(
        "--vector",
        type=reading(parse_vector),
        action="append",
        dest="vectors",
        metavar="NAME[:SCALE][@LAYERS]",
        help="a stored vector, as in mood, mood:-2.5, mood:4@2 or mood:4@2,5-7; what is left out "
        "is what its training recommends; refusal@14:all ablates layer 14's direction at every "
        "layer; repeatable",
    )
    either.add_argument("--steering", metavar="FILE", help="a steering object as JSON")
    group.add_argument(
        "--op", choices=get_args(Operation), help="operation of every --vector; default add"
    )
    group.add_argument("--unit", choices=get_args(Unit), help="unit of every scale; default raw")
    group.add_argument(
        "--clamp",
        type=reading(_parse_bounds),
        metavar="MIN:MAX",
        help="bounds of --op clamp; either may be left out",
    )
    group.add_argument(
        "--positions",
        type=parse_positions,
        metavar="WHICH",
        help=f"tokens to steer: {POSITIONS}; default all",
    )
    group.add_argument(
        "--when",
        type=_parse_probe,
        metavar="NAME[@LAYER][:READ]",
        help="steer only tokens at which this vector reads --above or --below a number; READ is "
        f"{', '.join(get_args(ProbeRead))}; default projection",
    )
    group.add_argument("--above", type=float, metavar="X", help="of --when")
    group.add_argument("--below", type=float, metavar="X", help="of --when")
    group.add_argument(
        "--of", choices=["token", "prompt"],
        help="what --when compares: each token's own reading, or that of the prompt's last token "
        "for all that follow; default token",
    )  # fmt: skip
    parameters = parser.add_argument_group("parameters")
    parameters.add_argument(
        "--adapter", metavar="NAME", help="a stored LoRA adapter, added to the model's parameters"
    )
    parameters.add_argument(
        "--override",
        type=reading(_parse_override),
        metavar="NAME:ETA",
        help="a stored direction v, as in gradient:1e-3: the parameters are theta + ETA v",
    )
    parameters.add_argument(
        "--cast",
        choices=["float32"],
        help="with --override: compute the whole model in this dtype",
    )


def _read_steering(arguments: argparse.Namespace) -> dict[str, Any] | None:
    refuse: Callable[[str], NoReturn] = arguments.refuse
    dependent = given(arguments, *_DEPENDENT)
    if not arguments.vectors:
        if dependent:
            refuse(f"{', '.join(f'--{name}' for name in dependent)}: only with --vector")
        return load_steering(arguments.steering) if arguments.steering else None
    common: dict[str, Any] = dict(given(arguments, "op", "unit"))
    if arguments.clamp:
        common["params"] = arguments.clamp
    bounds = given(arguments, *_BOUNDS)
    if arguments.when:
        common["when"] = {"probe": arguments.when, **bounds}
    elif bounds:
        refuse(f"{', '.join(f'--{name}' for name in bounds)}: only with --when")
    steering: dict[str, Any] = {"vectors": [vector | common for vector in arguments.vectors]}
    return {**steering, **given(arguments, "positions")}


def read_changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return `steering`, `adapter` and `override` where they were given.

    Exits with 2 where options do not go together. Raises LogsteerError for a file without a JSON
    object.
    """
    steering = _read_steering(arguments)
    changes = {} if steering is None else {"steering": steering}
    changes |= given(arguments, "adapter", "override")
    if arguments.cast is not None:
        if "override" not in changes:
            arguments.refuse("--cast: only with --override")
        changes["override"] = {**changes["override"], "cast": arguments.cast}
    return changes


def _parse_override(text: str) -> dict[str, Any]:
    name, eta = cut_pair(text, "NAME:ETA")
    return {"name": name, "eta": float(eta)}


def _parse_probe(text: str) -> dict[str, Any]:
    found = _PROBE.fullmatch(text)
    if found is None or found["read"] not in (None, *get_args(ProbeRead)):
        reads = ", ".join(get_args(ProbeRead))
        raise argparse.ArgumentTypeError(
            f"{text!r} has not the form NAME[@LAYERS][:READ] with READ one of {reads}"
        )
    probe: dict[str, Any] = {"name": found["name"]}
    if found["layers"] is not None:
        probe["layers"] = parse_layers(found["layers"])
    if found["read"] is not None:
        probe["read"] = found["read"]
    return probe


def _parse_bounds(text: str) -> dict[str, float]:
    low, colon, high = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} has not the form MIN:MAX")
    return {name: float(part) for name, part in (("min", low), ("max", high)) if part}


def parse_positions(
    text: str, names: Sequence[str] = get_args(PositionName)
) -> str | dict[str, list[list[int]]]:
    """Return one of the names, or slices as in 0:5,8:10; else raise ArgumentTypeError."""
    if text in names:
        return text
    slices = [re.fullmatch(r"(\d+):(\d+)", part) for part in text.split(",")]
    if not all(slices):
        known = f"none of {', '.join(names)}, nor" if len(names) > 1 else f"neither {names[0]} nor"
        raise argparse.ArgumentTypeError(f"{text!r} is {known} slices as in 0:5,8:10")
    return {"slices": [[int(found[1]), int(found[2])] for found in slices if found]}

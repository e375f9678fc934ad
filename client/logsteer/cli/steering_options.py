"""The options of the command line that change a model for one request, and read from it.

Those about steering are read into a steering object.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, get_args

from logsteer.cli.terminal import given, parse_layers, reading
from logsteer.extras.json_files import load_steering
from logsteer.schemas import PositionName, ProbeRead
from logsteer.schemas.steering import Operation, Unit, parse_vector

POSITIONS = f"{', '.join(get_args(PositionName))}, or slices as in 0:5,8:10"
"""What `parse_positions` reads."""
_PROBE = re.compile(r"(?P<name>[^:@]+)(@(?P<layers>[^:@]+))?(:(?P<read>[^:@]+))?")
_BOUNDS = ("above", "below", "of")
_DEPENDENT = ("op", "unit", "clamp", "positions", "when", *_BOUNDS)


def add_steering_options(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Give a command the options that `read_steering` and `read_parameters` read."""
    group = parser.add_argument_group("steering")
    either = group.add_mutually_exclusive_group(required=required)
    either.add_argument(
        "--vector",
        type=reading(parse_vector),
        action="append",
        dest="vectors",
        metavar="NAME[:SCALE][@LAYERS]",
        help="a stored vector, as in mood, mood:-2.5, mood:4@2 or mood:4@2,5-7; what is left out "
        "is what its training recommends; repeatable",
    )
    either.add_argument("--steering", metavar="FILE", help="a steering object as JSON")
    group.add_argument(
        "--op", choices=get_args(Operation), help="operation of every --vector; default add"
    )
    group.add_argument("--unit", choices=get_args(Unit), help="unit of every scale; default raw")
    group.add_argument(
        "--clamp",
        type=_parse_bounds,
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
        type=_parse_override,
        metavar="NAME:ETA",
        help="a stored direction v, as in gradient:1e-3: the parameters are theta + ETA v",
    )
    parameters.add_argument(
        "--cast",
        choices=["float32"],
        help="with --override: compute the whole model in this dtype",
    )
    parser.set_defaults(refuse=parser.error)


def add_probe_option(parser: argparse.ArgumentParser) -> None:
    """Give a command `--probe`, whose values are the argument `probes` of its call."""
    parser.add_argument_group("reading").add_argument(
        "--probe",
        type=_parse_probe,
        action="append",
        dest="probes",
        metavar="NAME[@LAYERS][:READ]",
        help="a stored vector to read at every token, as in mood, mood@2,5 or mood@2:cosine; "
        "repeatable",
    )


def read_steering(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the steering object of the arguments, or None.

    Exits with 2 where options do not go together. Raises LogsteerError for a file without a JSON
    object.
    """
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
    """Return `steering`, `adapter` and `override` where given; fail as `read_steering` does."""
    steering = read_steering(arguments)
    changes = {} if steering is None else {"steering": steering}
    return {**changes, **read_parameters(arguments)}


def read_parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return `adapter` and `override` where they were given.

    Exits with 2 where options do not go together.
    """
    changes: dict[str, Any] = dict(given(arguments, "adapter", "override"))
    if arguments.cast is not None:
        if "override" not in changes:
            arguments.refuse("--cast: only with --override")
        changes["override"] = {**changes["override"], "cast": arguments.cast}
    return changes


def _parse_override(text: str) -> dict[str, Any]:
    name, colon, eta = text.rpartition(":")
    if not colon or not name:
        raise argparse.ArgumentTypeError(f"{text!r} has not the form NAME:ETA")
    return {"name": name, "eta": _parse_number(eta)}


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
        raise argparse.ArgumentTypeError(f"{text!r} has not the form MIN:MAX")
    return {name: _parse_number(part) for name, part in (("min", low), ("max", high)) if part}


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


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error

"""`logsteer lens` and `logsteer patch`: what layers predict, and which activations carry it."""

import argparse
import math
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from logsteer.cli import tables
from logsteer.cli.options import add_options
from logsteer.cli.output import add_output_options, show
from logsteer.cli.steering_options import add_steering_options, read_changes
from logsteer.cli.terminal import add_examples, given, parse_layers
from logsteer.client import Client
from logsteer.extras.labels import show_value
from logsteer.extras.maps import LayerMap, map_lens, map_patch
from logsteer.schemas import LensAnswer, PatchAnswer

LENS_EXAMPLES = """
  logsteer lens "The capital of France is" " Paris" --top 1
  logsteer lens "Once upon a time there was a little girl." --layers 0,2,4
"""
PATCH_EXAMPLES = """
  logsteer patch "The capital of France is" "The capital of Spain is" " Paris"
  logsteer patch "The capital of France is" "The capital of Spain is" " Paris" --metric kl
"""
_LENS = {"columns": "NAME", "top": "N", "boundary": None, "bos": None, "on_overflow": None}
_PATCH = {"metric": None, "direction": None, "hook": "NAME", "boundary": None, "bos": None}
_ORANGE, _BLUE = (222, 84, 30), (31, 111, 180)
"""Above and below 0, as on the server's page."""
_STRONGEST = 0.7
_BRIGHT = 0.6
"""Share of the strongest colour from which on black letters are read more easily than white."""


def add_lens(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer lens`."""
    add_examples(parser, LENS_EXAMPLES)
    parser.add_argument(
        "context", metavar="CONTEXT", help="what the targets follow; alone, a text to score whole"
    )
    parser.add_argument("targets", metavar="TARGET", nargs="*")
    parser.add_argument("--layers", type=parse_layers, metavar="N,N-N,…", help="default all")
    add_options(parser, "lens", _LENS)
    add_steering_options(parser)
    add_output_options(parser, LensAnswer, plot=True)
    parser.set_defaults(command=_read_lens)


def add_patch(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer patch`."""
    add_examples(parser, PATCH_EXAMPLES)
    parser.add_argument("clean", metavar="CLEAN", help="a context")
    parser.add_argument("corrupted", metavar="CORRUPTED", help="one with as many tokens")
    parser.add_argument("targets", metavar="TARGET", nargs="+", help="scored after both")
    parser.add_argument(
        "--layers", type=parse_layers, action="append", metavar="N,N-N,…",
        help="a set of layers that are patched together, as in 0-2; repeatable; default each alone",
    )  # fmt: skip
    add_options(parser, "patch", _PATCH)
    add_output_options(parser, PatchAnswer, plot=True)
    parser.set_defaults(command=_patch)


def _read_lens(client: Client, arguments: argparse.Namespace) -> None:
    item: Any = arguments.context
    if arguments.targets:
        item = {"context": arguments.context, "targets": arguments.targets}
    answer = client.lens([item], **given(arguments, "layers", *_LENS), **read_changes(arguments))
    drawn = [part for one in answer.results[0].targets for part in draw_map(map_lens(one))]
    show(arguments, answer, *drawn, *tables.draw_changes(answer))


def _patch(client: Client, arguments: argparse.Namespace) -> None:
    clean, corrupted = (
        {"context": context, "targets": arguments.targets}
        for context in (arguments.clean, arguments.corrupted)
    )
    pair = {"clean": clean, "corrupted": corrupted}
    answer = client.patch([pair], **given(arguments, "layers", *_PATCH))
    result = answer.results[0]
    runs = f"clean {show_value(result.clean)}, corrupted {show_value(result.corrupted)}"
    drawn = draw_map(map_patch(answer))
    show(arguments, answer, *drawn, Text(f"{answer.metric}, unpatched: {runs}"))


def draw_map(found: LayerMap) -> Iterator[Text | Table]:
    """Draw layers by tokens, the first layer at the bottom, on colours as strong as the values."""
    yield Text(f"{found.title}: {found.unit}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0))
    table.add_column("layer ", justify="right", no_wrap=True)
    for token in found.tokens:
        table.add_column(Text(repr(token)[1:-1]), justify="center")
    sizes = [abs(value) for row in found.values for value in row if value is not None]
    most = max(sizes, default=0) if found.signed else 1
    for number in reversed(range(len(found.layers))):
        cells = [
            Text(f" {_write_cell(found, number, place)} ", style=_colour(value, most or 1))
            for place, value in enumerate(found.values[number])
        ]
        table.add_row(f"{found.layers[number]} ", *cells)
    yield table


def _write_cell(found: LayerMap, row: int, place: int) -> str:
    value = found.values[row][place]
    shown = "-" if value is None else f"{value:+.2f}" if found.signed else f"{value:.2f}"
    return shown if found.marks is None else f"{found.marks[row][place]!r} {shown}"


def _colour(value: float | None, most: float) -> str:
    if value is None or not math.isfinite(value):
        return ""
    share = min(abs(value) / most, 1.0)
    strength = _STRONGEST * share
    mixed = [round(255 + (part - 255) * strength) for part in (_ORANGE if value > 0 else _BLUE)]
    return f"{'black' if share < _BRIGHT else 'white'} on rgb({','.join(map(str, mixed))})"

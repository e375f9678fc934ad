"""`logsteer overrides …`: the commands about directions of the parameters."""

import argparse
from pathlib import Path
from typing import Any

from logsteer.cli import tables
from logsteer.cli.options import add_options
from logsteer.cli.output import add_output_options, show
from logsteer.cli.stored import add_stored_commands
from logsteer.cli.terminal import add_examples, given
from logsteer.client import Client
from logsteer.schemas import OverrideCard, OverrideList

EXAMPLES = """
  logsteer overrides put gradient direction.safetensors
  logsteer overrides show gradient
  logsteer score "I feel" " happy" " sad" --override gradient:1e-3
"""
SHOW_EXAMPLES = """
  logsteer overrides show gradient
"""
PUT_EXAMPLES = """
  logsteer overrides put gradient direction.safetensors
"""


def add_override_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Give the parser of `logsteer overrides` its commands."""
    add_examples(parser, EXAMPLES)
    add = add_stored_commands(
        parser, common, "overrides", tables.draw_overrides, OverrideList, "gradient"
    )
    showing = add("show", _show, "one direction: what it moves, and how far", SHOW_EXAMPLES)
    add_output_options(showing, OverrideCard)
    put = add("put", _put, "upload a file as a direction", PUT_EXAMPLES)
    put.add_argument(
        "file",
        metavar="FILE",
        help="safetensors, a tensor for each parameter that moves, under its name in transformers",
    )
    add_options(put, "overrides.put", {"overwrite": None})


def _show(client: Client, arguments: argparse.Namespace) -> None:
    card = client.overrides.get(arguments.name)
    show(arguments, card, tables.draw_overrides([card]))


def _put(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = given(arguments, "overwrite")
    card = client.overrides.put(arguments.name, Path(arguments.file), **options)
    show(arguments, card, tables.draw_overrides([card]))

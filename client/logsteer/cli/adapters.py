"""`logsteer adapters …`: the commands about LoRA adapters."""

import argparse
from pathlib import Path
from typing import Any

from logsteer.cli import tables
from logsteer.cli.options import add_options
from logsteer.cli.output import show
from logsteer.cli.stored import add_stored_commands
from logsteer.cli.terminal import add_examples, given
from logsteer.client import Client
from logsteer.schemas import AdapterList

EXAMPLES = """
  logsteer adapters put story adapter
  logsteer adapters list
"""
PUT_EXAMPLES = """
  logsteer adapters put story adapter
  logsteer score "I feel" " happy" " sad" --adapter story
"""


def add_adapter_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Give the parser of `logsteer adapters` its commands."""
    add_examples(parser, EXAMPLES)
    add = add_stored_commands(
        parser, common, "adapters", tables.draw_adapters, AdapterList, "story"
    )
    put = add("put", _put, "upload what PEFT has saved as an adapter", PUT_EXAMPLES)
    put.add_argument(
        "directory",
        metavar="DIRECTORY",
        help="has adapter_config.json and adapter_model.safetensors",
    )
    add_options(put, "adapters.put", {"overwrite": None})


def _put(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = given(arguments, "overwrite")
    card = client.adapters.put(arguments.name, Path(arguments.directory), **options)
    show(arguments, card, tables.draw_adapters([card]))

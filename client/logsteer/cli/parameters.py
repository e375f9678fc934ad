"""`logsteer adapters …`, `overrides …` and `saes …`: what is stored beside vectors."""

import argparse
from pathlib import Path
from typing import Any

from logsteer.cli import tables
from logsteer.cli.options import add_options
from logsteer.cli.output import add_output_options, show
from logsteer.cli.stored import add_stored_commands
from logsteer.cli.terminal import add_examples, given
from logsteer.client import Client
from logsteer.schemas import AdapterList, OverrideCard, OverrideList, SaeList

ADAPTER_EXAMPLES = """
  logsteer adapters put story adapter
  logsteer adapters list
"""
PUT_ADAPTER_EXAMPLES = """
  logsteer adapters put story adapter
  logsteer score "I feel" " happy" " sad" --adapter story
"""
SAE_EXAMPLES = """
  logsteer saes put res8 gpt2-small-res-jb/blocks.8.hook_resid_pre
  logsteer saes list
"""
PUT_SAE_EXAMPLES = """
  logsteer saes put res8 gpt2-small-res-jb/blocks.8.hook_resid_pre
  logsteer steer "I feel" --vector res8/123:4
"""
OVERRIDE_EXAMPLES = """
  logsteer overrides put gradient direction.safetensors
  logsteer overrides show gradient
  logsteer score "I feel" " happy" " sad" --override gradient:1e-3
"""
SHOW_OVERRIDE_EXAMPLES = """
  logsteer overrides show gradient
"""
PUT_OVERRIDE_EXAMPLES = """
  logsteer overrides put gradient direction.safetensors
"""


def add_adapter_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Give the parser of `logsteer adapters` its commands."""
    add_examples(parser, ADAPTER_EXAMPLES)
    add = add_stored_commands(parser, common, "adapters", AdapterList, "story")
    text = "upload what PEFT has saved as an adapter"
    put = add("put", _put_adapter, text, PUT_ADAPTER_EXAMPLES)
    put.add_argument(
        "directory",
        metavar="DIRECTORY",
        help="has adapter_config.json and adapter_model.safetensors",
    )
    add_options(put, "adapters.put", {"overwrite": None})


def add_sae_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Give the parser of `logsteer saes` its commands."""
    add_examples(parser, SAE_EXAMPLES)
    add = add_stored_commands(parser, common, "saes", SaeList, "res8")
    put = add("put", _put_sae, "upload what SAELens has saved", PUT_SAE_EXAMPLES)
    put.add_argument(
        "directory",
        metavar="DIRECTORY",
        help="has cfg.json and sae_weights.safetensors; and labels.json, feature -> text",
    )
    add_options(put, "saes.put", {"layer": "N", "activation_scale": "S", "overwrite": None})


def add_override_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Give the parser of `logsteer overrides` its commands."""
    add_examples(parser, OVERRIDE_EXAMPLES)
    add = add_stored_commands(parser, common, "overrides", OverrideList, "gradient")
    text = "one direction: what it moves, and how far"
    showing = add("show", _show_override, text, SHOW_OVERRIDE_EXAMPLES)
    add_output_options(showing, OverrideCard)
    put = add("put", _put_override, "upload a file as a direction", PUT_OVERRIDE_EXAMPLES)
    put.add_argument(
        "file",
        metavar="FILE",
        help="safetensors, a tensor for each parameter that moves, under its name in transformers",
    )
    add_options(put, "overrides.put", {"overwrite": None})


def _put_adapter(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = given(arguments, "overwrite")
    card = client.adapters.put(arguments.name, Path(arguments.directory), **options)
    show(arguments, card, tables.draw_answer(card))


def _put_sae(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = given(arguments, "layer", "activation_scale", "overwrite")
    card = client.saes.put(arguments.name, Path(arguments.directory), **options)
    show(arguments, card, tables.draw_answer(card))


def _show_override(client: Client, arguments: argparse.Namespace) -> None:
    card = client.overrides.get(arguments.name)
    show(arguments, card, tables.draw_answer(card))


def _put_override(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = given(arguments, "overwrite")
    card = client.overrides.put(arguments.name, Path(arguments.file), **options)
    show(arguments, card, tables.draw_answer(card))

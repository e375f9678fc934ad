"""`logsteer adapters …`: the commands about LoRA adapters."""

import argparse
from collections.abc import Callable
from pathlib import Path

from logsteer.cli import tables
from logsteer.cli.terminal import show
from logsteer.client import Client


def add_adapter_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Give the parser of `logsteer adapters` its commands."""
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Callable[..., None], text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, parents=[common], help=text)
        one.set_defaults(command=command)
        if name != "list":
            one.add_argument("name", metavar="NAME")
        return one

    add("list", _list, "list the adapters that the server has")
    put = add("put", _put, "upload what PEFT has saved as an adapter")
    put.add_argument(
        "directory",
        metavar="DIRECTORY",
        help="has adapter_config.json and adapter_model.safetensors",
    )
    add("delete", _delete, "forget an adapter")


def _list(client: Client, arguments: argparse.Namespace) -> None:
    answer = client.adapters.list()
    show(arguments, answer, tables.draw_adapters(answer.adapters))


def _put(client: Client, arguments: argparse.Namespace) -> None:
    card = client.adapters.put(arguments.name, Path(arguments.directory))
    show(arguments, card, tables.draw_adapters([card]))


def _delete(client: Client, arguments: argparse.Namespace) -> None:
    gone = client.adapters.delete(arguments.name)
    show(arguments, gone, f"deleted {gone.name}, {gone.sha256}")

"""What the commands about vectors and adapters have in common: to list them and to delete one."""

import argparse
from collections.abc import Callable
from typing import TypeAlias

from pydantic import BaseModel

from logsteer.cli.output import add_output_options, show
from logsteer.cli.tables import draw_answer
from logsteer.cli.terminal import Command, add_examples
from logsteer.client import Client

AddCommand: TypeAlias = Callable[..., argparse.ArgumentParser]
"""Gives `logsteer RESOURCE` one more command: its name, function, help and examples; `named` says
whether its first argument is the name of a content."""


def add_stored_commands(
    parser: argparse.ArgumentParser,
    common: argparse.ArgumentParser,
    resource: str,
    kind: type[BaseModel],
    example: str,
) -> AddCommand:
    """Give the parser of `logsteer RESOURCE` its commands; return what adds further ones.

    `kind` is the class of the list of cards, and `example` the name of one in examples.
    """
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, command: Command, text: str, examples: str, *, named: bool = True
    ) -> argparse.ArgumentParser:
        one = commands.add_parser(name, parents=[common], help=text)
        one.set_defaults(command=command)
        add_examples(one, examples)
        if named:
            one.add_argument("name", metavar="NAME")
        return one

    def list_cards(client: Client, arguments: argparse.Namespace) -> None:
        answer = getattr(client, resource).list()
        table = draw_answer(answer)
        if answer.damaged:
            table.caption = f"damaged: {', '.join(answer.damaged)}; put or delete them"
        show(arguments, answer, table)

    def delete(client: Client, arguments: argparse.Namespace) -> None:
        gone = getattr(client, resource).delete(arguments.name)
        show(arguments, gone, f"deleted {gone.name}, {gone.sha256 or 'damaged'}")

    examples = f"\n  logsteer {resource} list\n  logsteer {resource} list --format csv\n"
    listing = add(
        "list", list_cards, f"list the {resource} that the server has", examples, named=False
    )
    add_output_options(listing, kind)
    add("delete", delete, f"delete one of the {resource}",
        f"\n  logsteer {resource} delete {example}\n")  # fmt: skip
    return add

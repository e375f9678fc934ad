"""What every command of the command line does with its arguments and its answer."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel
from rich.console import Console

from logsteer.client import Client

Command = Callable[[Client, argparse.Namespace], None]


def given(arguments: argparse.Namespace, *names: str) -> Mapping[str, Any]:
    """Those of the arguments that were given."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def show(arguments: argparse.Namespace, answer: BaseModel, *tables: Any) -> None:
    """Print the tables, or with --json the answer and nothing else."""
    if getattr(arguments, "json", False):
        print(answer.model_dump_json(indent=2))
        return
    console = Console(highlight=False)
    for table in tables:
        console.print(table)

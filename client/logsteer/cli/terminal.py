"""What every command of the command line does with its arguments and its answer."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from logsteer.client import Client
from logsteer.errors import LogsteerError
from logsteer.schemas import steering

T = TypeVar("T")
Command = Callable[[Client, argparse.Namespace], None]

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


def add_examples(parser: argparse.ArgumentParser, examples: str) -> None:
    """Have the parser's help end in these examples, as they are written."""
    parser.epilog = f"examples:{examples}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


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


def parse_scales(text: str) -> list[float]:
    """Return the numbers of a list such as -4,-2,0,2,4; else raise ArgumentTypeError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as -4,-2,0,2,4") from error


def read_input(name: str) -> tuple[str, bytes]:
    """Return what a file is called in errors and its bytes, read once: it may be a pipe.

    - is standard input. Raises LogsteerError where it is empty.
    """
    place = "standard input" if name == STDIN else name
    data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    if not data:
        raise LogsteerError(f"{place} is empty")
    return place, data

"""What every command of the command line does with its arguments and its answer."""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from logsteer.client import Client
from logsteer.errors import LogsteerError

Command = Callable[[Client, argparse.Namespace], None]

STDIN = "-"
"""What stands for standard input among the arguments of a command."""


class TerminalConsole(Console):
    """A console of this command: words are not coloured by what they look like."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def on_broken_pipe(self) -> None:
        """Leave it to `main`, which tells it by its exit status."""
        raise BrokenPipeError


def add_examples(parser: argparse.ArgumentParser, examples: str) -> None:
    """Have the parser's help end in these examples, as they are written."""
    parser.epilog = f"examples:{examples}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def given(arguments: argparse.Namespace, *names: str) -> Mapping[str, Any]:
    """Return those of the arguments that were given."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def parse_layers(text: str) -> list[int]:
    """Return the layers of a list such as 2 or 2,5-7; else raise ArgumentTypeError."""
    layers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        last = int(found[2] or found[1]) if found else -1
        if found is None or last < int(found[1]):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of layers such as 10,12-14")
        layers += range(int(found[1]), last + 1)
    return layers


def parse_scales(text: str) -> list[float]:
    """Return the numbers of a list such as -4,-2,0,2,4; else raise ArgumentTypeError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as -4,-2,0,2,4") from error


def read_input(name: str) -> tuple[str, bytes]:
    """Return what a file is called in errors and its bytes, read once: it may be a pipe.

    - is standard input. Raises LogsteerError where it is empty.
    """
    place = "standard input" if name == STDIN else name
    data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    if not data:
        raise LogsteerError(f"{place} is empty")
    return place, data

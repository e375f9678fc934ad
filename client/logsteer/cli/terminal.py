"""What every command of the command line does with its arguments and its answer."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

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


class Parser(argparse.ArgumentParser):
    """A parser that tells wrong usage in two lines: what is wrong, and what may have been meant.

    A value such as -4,4 is not an option.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-\.?\d.*")
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words of one command, and leave none unread."""
        self._words = list(args or [])
        found, unread = super().parse_known_args(args, namespace)
        if unread:
            self.error(f"unknown: {' '.join(unread)}")
        return found, unread

    def error(self, message: str) -> NoReturn:
        """Tell what is wrong, and what comes nearest to a word that is not known; exit with 2."""
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        options = list(self._option_string_actions)
        flags = [word.partition("=")[0] for word in self._words if word.startswith("--")]
        wrong = next((f for f in flags if not any(o.startswith(f) for o in options)), "")
        known = re.findall(r"[^\s',]+", choice[2]) if choice else options
        near = difflib.get_close_matches(choice[1] if choice else wrong, known, 1, 0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        self.exit(2, f"error: {message}\n{hint}See {self.prog} --help\n")


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

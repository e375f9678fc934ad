"""JSON lines from standard input and to standard output: commands with - in place of arguments."""

import argparse
import json
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, TypeAlias

from pydantic_core import to_json

from logsteer.errors import LogsteerError

STDIN = "-"
"""What stands for standard input among the arguments of a command."""

Row: TypeAlias = dict[str, Any]
NumberedRow: TypeAlias = tuple[int, Row]


def add_batch_option(parser: argparse.ArgumentParser) -> None:
    """Give a command the option that says how many lines go into one request."""
    parser.add_argument(
        "--batch-size", type=_parse_count, default=32, metavar="N",
        help="lines of one request, with -; default 32",
    )  # fmt: skip


def read_rows(text_field: str | None = None) -> Iterator[NumberedRow]:
    """Yield the lines of standard input as they come, each with its number from 1.

    A line that is a string stands for an object with that text in `text_field`.
    Raises LogsteerError for a line that is no JSON object.
    """
    for number, line in enumerate(sys.stdin.buffer, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise LogsteerError(f"standard input, line {number}: no JSON: {error}") from error
        if isinstance(row, str) and text_field is not None:
            row = {text_field: row}
        if not isinstance(row, dict):
            raise LogsteerError(f"standard input, line {number}: no JSON object")
        yield number, row


def answer_rows(
    rows: Iterable[NumberedRow],
    size: int,
    ask: Callable[[Sequence[Row]], Iterable[Mapping[str, Any]]],
    kind: Callable[[NumberedRow], Hashable] = lambda _: None,
) -> None:
    """Write a line for each row: its fields, and those that `ask` yields for it.

    Neighbouring rows of one kind are asked about together, at most `size` of them.
    Raises LogsteerError that names the lines it is about, after the lines in front of them.
    """
    for _, same in groupby(rows, kind):
        while batch := list(islice(same, size)):
            numbers = [number for number, _ in batch]
            try:
                answers = list(ask([row for _, row in batch]))
            except LogsteerError as error:
                last = f" to {numbers[-1]}" if len(numbers) > 1 else ""
                raise LogsteerError(f"line {numbers[0]}{last}: {error}") from error
            for (_, row), answer in zip(batch, answers, strict=True):
                sys.stdout.write(to_json({**row, **answer}).decode() + "\n")
            sys.stdout.flush()


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)

"""JSON lines from standard input and to standard output: commands with - in place of arguments."""

import argparse
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Self, TypeAlias

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json

from logsteer._progress import CountingProgress
from logsteer.cli.output import RowSink, choose_format
from logsteer.errors import DIVISIBLE, LogsteerError
from logsteer.extras.json_files import read_json_lines
from logsteer.extras.rows import FlatRow, list_rows

Row: TypeAlias = dict[str, Any]
NumberedRow: TypeAlias = tuple[int, Row]


class UnusableRowError(LogsteerError):
    """No part of a request can be made of a line."""


def add_batch_option(parser: argparse.ArgumentParser) -> None:
    """Give a command the option that says how many lines go into one request."""
    parser.add_argument(
        "--batch-size", type=_parse_count, default=32, metavar="N",
        help="lines of one request, with -; default 32, and 1 answers each as it comes",
    )  # fmt: skip


def read_rows(form: str, text_field: str | None = None) -> Iterator[NumberedRow]:
    """Yield the lines of standard input as they come, each with its number from 1.

    A line that is a string stands for an object with that text in `text_field`. `form` is said in
    errors: what to write in a line. Raises LogsteerError for a line that is no JSON object.
    """
    for number, row in read_json_lines(sys.stdin.buffer, "standard input", form):
        if isinstance(row, str) and text_field is not None:
            row = {text_field: row}
        if not isinstance(row, dict):
            raise LogsteerError(f"standard input, line {number}: no JSON object; write {form}")
        try:
            to_json(row)
        except (PydanticSerializationError, ValueError) as error:
            raise LogsteerError(
                f"standard input, line {number}: it cannot be written again: it is nested too "
                f"deeply, or has a lone surrogate ({error})"
            ) from error
        yield number, row


class AnsweredLines:
    """Where the results of lines go: JSON lines, each with its line's own fields; or flat rows.

    `name` is the field that has a result; None for one whose fields stand beside the line's own.
    A bar on stderr counts the lines where they go somewhere else than to the terminal.
    """

    def __init__(self, arguments: argparse.Namespace, name: str | None) -> None:
        form = choose_format(arguments)
        if arguments.output_format in ("table", "json"):
            arguments.refuse(f"- gives a line for a line: no --format {form}; jsonl has all")
        self._nested = form in ("table", "json", "jsonl")
        if self._nested and arguments.per is not None:
            arguments.refuse("--per goes with csv and parquet here: jsonl has the whole result")
        self._name, self._per = name, arguments.per
        arguments.output_format = "jsonl" if self._nested else form
        self._sink = RowSink(arguments)
        wanted = not sys.stdout.isatty() or arguments.output
        self._progress = CountingProgress("", "lines answered", None, 0, wanted)

    def __enter__(self) -> Self:
        self._progress.__enter__()
        self._sink.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)
        self._sink.__exit__(*error)

    def write(self, batch: Sequence[NumberedRow], results: Sequence[BaseModel]) -> None:
        """Write the results of these lines."""
        rows: list[FlatRow] = []
        for (number, row), result in zip(batch, results, strict=True):
            if self._nested:
                own = result.model_dump(mode="json", exclude_unset=True, exclude_none=True)
                rows.append({**row, **(own if self._name is None else {self._name: own})})
            else:
                rows += [{"line": number, **flat} for flat in list_rows(result, self._per)]
        self._sink.write(rows)
        self._progress.advance(len(batch))


def answer_rows(
    rows: Iterable[NumberedRow],
    size: int,
    ask: Callable[[Sequence[Row]], Iterable[BaseModel]],
    answered: AnsweredLines,
    kind: Callable[[NumberedRow], Hashable] = lambda _: None,
) -> None:
    """Write for each row its fields and the result that `ask` yields for it.

    Neighbouring rows of one kind are asked about together, at most `size` of them; where a part of
    them may have been refused, they are asked about again in halves. Raises LogsteerError that
    names the lines it is about, after the lines in front of them.
    """
    with answered:
        for batch in _cut_batches(rows, size, kind):
            _answer_batch(batch, ask, answered)


def _cut_batches(
    rows: Iterable[NumberedRow], size: int, kind: Callable[[NumberedRow], Hashable]
) -> Iterator[list[NumberedRow]]:
    """Yield neighbouring rows of one kind; `size` of them as soon as they are there.

    Raises what `rows` raises, after the rows in front of that.
    """
    batch: list[NumberedRow] = []
    try:
        for numbered in rows:
            if batch and kind(numbered) != kind(batch[0]):
                yield batch
                batch = []
            batch.append(numbered)
            if len(batch) == size:
                yield batch
                batch = []
    except LogsteerError:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def _answer_batch(
    batch: Sequence[NumberedRow],
    ask: Callable[[Sequence[Row]], Iterable[BaseModel]],
    answered: AnsweredLines,
) -> None:
    try:
        results = list(ask([row for _, row in batch]))
    except LogsteerError as error:
        if len(batch) == 1 or not isinstance(error, (*DIVISIBLE, UnusableRowError)):
            last = f" to {batch[-1][0]}" if len(batch) > 1 else ""
            raise LogsteerError(f"line {batch[0][0]}{last}: {error}") from error
    else:
        answered.write(batch, results)
        return
    middle = len(batch) // 2
    _answer_batch(batch[:middle], ask, answered)
    _answer_batch(batch[middle:], ask, answered)


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)

"""How a command gives its answer: tables for a terminal, JSON, or flat rows for other programs."""

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.text import Text

from logsteer.cli.terminal import TerminalConsole
from logsteer.errors import LogsteerError
from logsteer.extras.plots import check_plot_path, plot_answer
from logsteer.extras.rows import FlatRow, list_grains, list_rows

FORMATS = ("table", "json", "jsonl", "csv")
_ROWS = ("jsonl", "csv")
_PLOT = "plot to a .png, .svg or .pdf file"


def add_output_options(
    parser: argparse.ArgumentParser,
    kind: type[BaseModel],
    *,
    grains: Sequence[str] | None = None,
    plot: bool = False,
) -> None:
    """Give a command the options that say where its answer of this class goes, and as what.

    `grains` are what its rows may be one of, the usual one first; None: all that the class has.
    """
    found = list_grains(kind) if grains is None else list(grains)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--format", choices=FORMATS, dest="output_format",
        help=f"table, the whole answer as json, or a row per {found[0]}; default table, or by the "
        "name of --output",
    )  # fmt: skip
    group.add_argument("--output", metavar="FILE", help="write to this file")
    if len(found) > 1:
        group.add_argument(
            "--per",
            choices=found,
            help=f"what a row of jsonl or csv is; default {found[0]}",
        )
    if plot:
        group.add_argument("--plot", metavar="FILE", help=_PLOT)
    parser.set_defaults(refuse=parser.error)


def wants_json(arguments: argparse.Namespace) -> bool:
    """Return whether something else than tables is printed."""
    return choose_format(arguments) != "table"


def choose_format(arguments: argparse.Namespace) -> str:
    """Return the format that was asked for, by a flag or by the name of the file."""
    if getattr(arguments, "json", False):
        return "json"
    if not hasattr(arguments, "output_format"):
        return "table"
    if arguments.output_format is not None:
        return str(arguments.output_format)
    suffix = Path(arguments.output or "").suffix.lstrip(".").lower()
    return suffix if suffix in FORMATS else "table"


def check_output(arguments: argparse.Namespace) -> None:
    """Check the options of `add_output_options` before any request.

    Exits with 2 where they do not go together. Raises LogsteerError where something is missing.
    """
    if not hasattr(arguments, "output_format"):
        return
    form, file = choose_format(arguments), arguments.output
    if getattr(arguments, "json", False) and arguments.output_format not in (None, "json"):
        arguments.refuse(
            f"--json and --format {arguments.output_format} are two formats: leave out one"
        )
    if file is not None and form == "table" and arguments.output_format is None:
        arguments.refuse(f"--output {file}: give --format, or a name that ends in one of {_ROWS}")
    if getattr(arguments, "per", None) is not None and form not in _ROWS:
        arguments.refuse("--per goes with --format jsonl or csv")
    if file is not None and not Path(file).absolute().parent.is_dir():
        raise LogsteerError(f"{file}: there is no directory {Path(file).absolute().parent}")
    if getattr(arguments, "plot", None):
        check_plot_path(arguments.plot)


def show(
    arguments: argparse.Namespace,
    answer: BaseModel,
    *tables: Any,
    rows: Callable[[], Sequence[FlatRow]] | None = None,
    draw: Callable[[str], object] | None = None,
) -> None:
    """Print the tables, or the answer in the format asked for; then draw the plot asked for.

    `rows` gives its rows, and `draw` its plot, in place of the class's own.
    """
    form, plot = choose_format(arguments), getattr(arguments, "plot", None)
    if form == "table":
        _print_tables(arguments, tables)
    elif form == "json":
        with _open_output(arguments) as file:
            file.write(answer.model_dump_json(indent=2) + "\n")
    else:
        per = getattr(arguments, "per", None)
        _write_rows(arguments, list_rows(answer, per) if rows is None else rows())
    if plot:
        (draw or (lambda path: plot_answer(answer, path)))(plot)
        if form == "table" and arguments.output is None:
            _print_tables(arguments, [Text(f"plot: {plot}")])


def _print_tables(arguments: argparse.Namespace, tables: Iterable[Any]) -> None:
    with _open_output(arguments) as file:
        console = TerminalConsole(file=None if file is sys.stdout else file)
        for table in tables:
            console.print(table)


def _open_output(arguments: argparse.Namespace) -> Any:
    path = getattr(arguments, "output", None)
    if path is None or not hasattr(arguments, "output_format"):
        return nullcontext(sys.stdout)  # which does not end with the context
    return Path(path).open("w", encoding="utf-8", newline="")


def _write_rows(arguments: argparse.Namespace, rows: Sequence[FlatRow]) -> None:
    form = choose_format(arguments)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with _open_output(arguments) as file:
        if form == "jsonl":
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            return
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_write_cell(row.get(name)) for name in names] for row in rows)


def _write_cell(value: Any) -> Any:
    """Return a value as CSV has it: as JSON where it is no text or number, empty for null."""
    return json.dumps(value) if isinstance(value, bool | list | dict) else value

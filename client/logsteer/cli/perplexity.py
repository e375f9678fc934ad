"""`logsteer perplexity`: how probable a text of any length is."""

import argparse
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

from logsteer._calls import fits_query
from logsteer._progress import ScoringProgress
from logsteer.cli import tables
from logsteer.cli.options import add_options
from logsteer.cli.output import add_output_options, show
from logsteer.cli.steering_options import add_steering_options, read_changes
from logsteer.cli.terminal import STDIN, add_examples, given
from logsteer.client import Client
from logsteer.errors import LogsteerError
from logsteer.extras.datasets import name_source
from logsteer.extras.json_files import decode_text
from logsteer.extras.plots import plot_windows
from logsteer.extras.rows import FlatRow, list_rows, write_window
from logsteer.extras.texts import JOIN, JoinedRows
from logsteer.schemas import PerplexityAnswer, WindowEvent, WindowScore

EXAMPLES = """
  logsteer perplexity book.txt --protocol rolling --context-length 256
  cat book.txt | logsteer perplexity - --json
  logsteer perplexity book.txt --context-length 128 --output windows.csv
"""

_WINDOWS = {
    "protocol": None, "context_length": "TOKENS", "stride": "TOKENS", "rows": "N", "bos": None,
    "precision": None,
}  # fmt: skip
"""Options of the command that are parameters of its call -> what stands for a value in the help."""


def add_perplexity(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer perplexity`."""
    add_examples(parser, EXAMPLES)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("file", metavar="FILE", nargs="?", help="UTF-8 text; - is standard input")
    text.add_argument(
        "--dataset", metavar="NAME[/CONFIG][@SPLIT]",
        help="a data set of the Hugging Face hub, or a directory laid out like one (split test by "
        "default), or a file of JSON lines",
    )  # fmt: skip
    rows = parser.add_argument_group("data sets")
    rows.add_argument("--column", metavar="NAME", help="the column to read; default text")
    rows.add_argument("--join", metavar="TEXT", help="text between rows; default two newlines")
    add_options(parser, "perplexity_stream", _WINDOWS)
    add_steering_options(parser)
    add_output_options(parser, PerplexityAnswer, grains=("window", "text"), plot=True)
    parser.set_defaults(command=_measure)


def _measure(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = {**given(arguments, *_WINDOWS), **read_changes(arguments)}
    rows = given(arguments, "column", "join")
    windows: list[WindowScore] = []
    if arguments.dataset is not None:
        source = name_source(arguments.dataset)
        joined = JoinedRows(source, rows.get("column", "text"), rows.get("join", JOIN))
        answer = _score_text(client, joined, options, windows)
    elif rows:
        raise LogsteerError(f"--{next(iter(rows))} goes with --dataset; leave it out")
    elif arguments.file == STDIN:
        answer = _score_text(client, sys.stdin.buffer, options, windows)
    else:
        with Path(arguments.file).open("rb") as file:
            answer = _score_text(client, file, options, windows)
    name = arguments.dataset or arguments.file
    title = f"{name} on {answer.model}, perplexity {answer.total.perplexity or float('nan'):.5g}"

    def list_flat() -> list[FlatRow]:
        if arguments.per == "text":
            return list_rows(answer, "text")
        # The text is one, whatever its number.
        return [{k: v for k, v in write_window(one).items() if k != "text"} for one in windows]

    show(
        arguments,
        answer,
        tables.draw_perplexity(answer),
        *tables.draw_changes(answer),
        rows=list_flat,
        draw=lambda path: plot_windows(windows, title, path),
    )


def _score_text(
    client: Client,
    source: BinaryIO | Iterable[bytes],
    options: Mapping[str, Any],
    windows: list[WindowScore],
) -> PerplexityAnswer:
    """Return the answer, and append its windows as they come."""
    with ScoringProgress(source) as progress:
        if fits_query("perplexity_stream", options):
            events = client.perplexity_stream(progress.source, **options)
        else:
            # Vectors by value may be too long for a query; a body takes them beside a whole text.
            text = decode_text(b"".join(progress.source), getattr(source, "name", "the text"))
            events = client.perplexity_events(text, **options)
        with closing(events):
            for event in events:
                if isinstance(event, PerplexityAnswer):
                    return event
                progress.show(event)
                if isinstance(event, WindowEvent):
                    windows.append(event.window)
    raise AssertionError("a stream ends with its result or raises")

"""`logsteer score` and `logsteer perplexity`: how probable targets and texts are."""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, BinaryIO

from logsteer._calls import fits_query
from logsteer._pairs import pair_scores
from logsteer._progress import ScoringProgress
from logsteer.cli import continuations, tables
from logsteer.cli.heat import Sparklines, draw_targets
from logsteer.cli.items import LINES, add_item_arguments, answer_items, read_item_arguments
from logsteer.cli.options import add_options
from logsteer.cli.output import RowSink, add_output_options, choose_format, show
from logsteer.cli.steering_options import add_probe_option, add_steering_options, read_changes
from logsteer.cli.terminal import STDIN, add_examples, given
from logsteer.client import Client
from logsteer.errors import LogsteerError
from logsteer.extras.answer_plots import plot_windows
from logsteer.extras.datasets import name_source
from logsteer.extras.json_files import decode_text
from logsteer.extras.rows import list_rows, write_window
from logsteer.extras.texts import JOIN, JoinedRows
from logsteer.schemas import LogprobAnswer, PerplexityAnswer, WindowEvent, WindowScore

SCORE_EXAMPLES = f"""
  logsteer score "The capital of France is" " Paris" " London"
  logsteer score "2 + 2 =" 4 --space both --top 3 --json
  echo '"I feel"' | logsteer score - " happy" " sad" --format csv
{LINES}"""
PERPLEXITY_EXAMPLES = """
  logsteer perplexity book.txt --protocol rolling --context-length 256
  cat book.txt | logsteer perplexity - --json
  logsteer perplexity book.txt --context-length 128 --output windows.csv
"""

_SCORING = {"boundary": None, "space": None, "top": "N", "precision": None}
_WINDOWS = {
    "protocol": None, "context_length": "TOKENS", "stride": "TOKENS", "rows": "N", "bos": None,
    "precision": None,
}  # fmt: skip
"""Options of a command that are parameters of its call -> what stands for a value in the help."""
_WINDOWS_KEPT = 2048


def add_score(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer score`."""
    add_examples(parser, SCORE_EXAMPLES)
    add_item_arguments(parser)
    add_options(parser, "logprob", _SCORING)
    add_steering_options(parser)
    add_probe_option(parser)
    add_output_options(parser, LogprobAnswer, plot=True)
    parser.set_defaults(command=_score)


def add_perplexity(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer perplexity`."""
    add_examples(parser, PERPLEXITY_EXAMPLES)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("file", metavar="FILE", nargs="?", help="UTF-8 text; - is standard input")
    text.add_argument(
        "--dataset", metavar="NAME[/CONFIG][@SPLIT]",
        help="of the Hugging Face hub, or a directory like one; or a file of JSON lines",
    )  # fmt: skip
    rows = parser.add_argument_group("data sets")
    rows.add_argument("--split", metavar="SPLIT", help="in place of @SPLIT; default test")
    rows.add_argument("--column", metavar="NAME", help="what is read of a row; default text")
    rows.add_argument("--join", metavar="TEXT", help="stands between rows; default two newlines")
    add_options(parser, "perplexity_stream", _WINDOWS)
    add_steering_options(parser)
    add_output_options(parser, PerplexityAnswer, grains=("window", "text"), plot=True)
    parser.set_defaults(command=_measure)


def _score(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = {**given(arguments, *_SCORING, "probes"), **read_changes(arguments)}
    items = read_item_arguments(arguments)
    if items is None:
        answer_items(arguments, lambda items: client.logprob(items, **options))
        return
    answer = client.logprob(items, **options)
    result = pair_scores(answer, 1, len(arguments.targets))[0]
    drawn: list[Any] = [*tables.draw_scores(result), draw_targets(result)]
    if arguments.probes:
        drawn += [
            continuations.draw_token_columns(target.tokens or [], target.logprobs or [], target)
            for target in result.targets
        ]
    show(arguments, answer, *drawn, *tables.draw_changes(answer))


def _measure(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = {**given(arguments, *_WINDOWS), **read_changes(arguments)}
    rows = given(arguments, "split", "column", "join")
    with ExitStack() as stack:
        windows = _Windows(_open_sink(arguments, stack))
        if arguments.dataset is not None:
            source = name_source(arguments.dataset, rows.get("split"))
            joined = JoinedRows(source, rows.get("column", "text"), rows.get("join", JOIN))
            answer = _score_file(client, joined, options, windows)
        elif rows:
            raise LogsteerError(f"--{next(iter(rows))} goes with --dataset; leave it out")
        elif arguments.file == STDIN:
            answer = _score_file(client, sys.stdin.buffer, options, windows)
        else:
            with Path(arguments.file).open("rb") as file:
                answer = _score_file(client, file, options, windows)
    name = arguments.dataset or arguments.file
    title = f"{name} on {answer.model}, perplexity {tables.show_number(answer.total.perplexity)}"
    drawn = [tables.draw_perplexity(answer), windows.draw(), *tables.draw_changes(answer)]

    def draw(path: str) -> None:
        plot_windows(windows.list_kept(), title, path)

    if windows.written:
        if arguments.plot:
            draw(arguments.plot)
        return
    show(arguments, answer, *drawn, rows=lambda: list_rows(answer, "text"), draw=draw)


def _open_sink(arguments: argparse.Namespace, stack: ExitStack) -> RowSink | None:
    """Return where windows are written as they come; None where they are not asked for."""
    if choose_format(arguments) in ("table", "json") or arguments.per == "text":
        return None
    return stack.enter_context(RowSink(arguments))


class _Windows:
    """The windows of a text as they come: written, and kept for a curve.

    Of many, neighbours are kept as one, so that no text has more than `_WINDOWS_KEPT`.
    """

    def __init__(self, sink: RowSink | None) -> None:
        self._sink = sink
        self._merged = 1
        self._open: list[WindowScore] = []
        self._kept: list[WindowScore] = []

    @property
    def written(self) -> bool:
        """Whether windows are what the command prints."""
        return self._sink is not None

    def add(self, window: WindowScore) -> None:
        """Take the next window."""
        if self._sink is not None:
            row = write_window(window)
            del row["text"]
            self._sink.write([row])
        self._open.append(window)
        if len(self._open) < self._merged:
            return
        self._kept.append(_merge(self._open))
        self._open = []
        if len(self._kept) == _WINDOWS_KEPT:
            self._kept = [_merge(self._kept[k : k + 2]) for k in range(0, _WINDOWS_KEPT, 2)]
            self._merged *= 2

    def list_kept(self) -> list[WindowScore]:
        """Return the windows so far, neighbours as one where there are many."""
        return [*self._kept, *([_merge(self._open)] if self._open else [])]

    def draw(self) -> Sparklines:
        """Draw the mean surprisal along the text."""
        means = [write_window(window)["mean_logprob"] for window in self.list_kept()]
        curve = [None if mean is None else -mean for mean in means]
        count = len(self._kept) * self._merged + len(self._open)
        title = f"mean surprisal a token in nats, along {count} windows"
        return Sparklines(title, [("", curve)])


def _merge(windows: Sequence[WindowScore]) -> WindowScore:
    def add(name: str) -> float | None:
        values = [getattr(window, name) for window in windows]
        return None if None in values else sum(values)

    return WindowScore(
        text=0,
        start=windows[0].start,
        end=windows[-1].end,
        num_scored=sum(window.num_scored for window in windows),
        sum_logprob=add("sum_logprob"),
        sum_squared_logprob=add("sum_squared_logprob"),
    )


def _score_file(
    client: Client,
    source: BinaryIO | Iterable[bytes],
    options: Mapping[str, Any],
    windows: _Windows,
) -> PerplexityAnswer:
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
                    windows.add(event.window)
    raise AssertionError("a stream ends with its result or raises")

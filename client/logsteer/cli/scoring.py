"""The commands that read given texts: what a model predicts of them, and what it computes."""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, get_args

from rich import box
from rich.table import Table
from rich.text import Text

from logsteer._calls import fits_query
from logsteer._pairs import pair_scores
from logsteer._progress import ScoringProgress
from logsteer.cli.arguments import (
    POSITIONS,
    STDIN,
    AddCommand,
    add_options,
    given,
    parse_layers,
    parse_positions,
    read_changes,
    read_input,
)
from logsteer.cli.output import (
    describe_windows,
    draw_answer,
    draw_diagnostics,
    draw_scores,
    draw_statistics,
    draw_tokens,
    show,
)
from logsteer.client import Client
from logsteer.errors import LogsteerError
from logsteer.extras.datasets import (
    JOIN,
    JoinedRows,
    decode_text,
    name_source,
    names_kind,
    read_json_lines,
)
from logsteer.extras.files import has_rows
from logsteer.extras.labels import LayerMap, map_lens, map_patch, show_value
from logsteer.extras.plots import plot_windows
from logsteer.extras.rows import FlatRow, list_rows, write_window
from logsteer.schemas import (
    AllPositions,
    Attribution,
    GradientAnswer,
    LensAnswer,
    LogprobAnswer,
    PatchAnswer,
    PerplexityAnswer,
    TokenizeAnswer,
    WindowEvent,
    WindowScore,
)

LINES = """
`logsteer score-file` asks about the rows of a file, each a context and its targets.
"""

_SCORING = {"boundary": None, "space": None, "top": "N", "precision": None}
_DIAGNOSED = {"columns": "NAME", "window": "TOKENS", "precision": None}
_TEXT_OPTIONS = {"boundary": None, "bos": None, "on_overflow": None}
_POLICY = {"temperature": "T", "top_p": "P", "top_k": "K", "min_p": "P"}
_ATTRIBUTION = ("attribution", "steps", "baseline")


def add_tokenize(add: AddCommand) -> None:
    """Add `logsteer tokenize`."""
    parser = add(
        "tokenize", _show_tokens, "cut a text into tokens",
        """
  logsteer tokenize "Hello world"
  logsteer tokenize "Hello world" --format csv
""", answer=TokenizeAnswer,
    )  # fmt: skip
    parser.add_argument("text", metavar="TEXT")


def _show_tokens(client: Client, arguments: argparse.Namespace) -> None:
    answer = client.tokenize(arguments.text)
    show(arguments, answer, draw_answer(answer))


def add_score(add: AddCommand) -> None:
    """Add `logsteer score`."""
    parser = add(
        "score", _score, "log-probability of each target after a context",
        f"""
  logsteer score "The capital of France is" " Paris" " London"
  logsteer score "2 + 2 =" 4 --space both --top 3 --json
  logsteer score "I feel" " happy" " sad" --format csv
{LINES}""", steers=True, probes=True, answer=LogprobAnswer,
    )  # fmt: skip
    _add_item(parser)
    add_options(parser, "logprob", _SCORING)


def add_diagnostics(add: AddCommand) -> None:
    """Add `logsteer diagnostics`."""
    parser = add(
        "diagnostics", _diagnose, "what a sampling policy saw at each token of targets",
        f"""
  logsteer diagnostics "The capital of France is" " Paris" " London"
  logsteer diagnostics "I feel" " happy" --columns entropy --columns rank --temperature 0.7
{LINES}""", steers=True, probes=True, answer=LogprobAnswer,
    )  # fmt: skip
    _add_item(parser)
    add_options(parser, "diagnostics", _DIAGNOSED | _TEXT_OPTIONS)
    add_options(parser.add_argument_group("policy that the columns refer to"), "generate", _POLICY)


def add_gradient(add: AddCommand) -> None:
    """Add `logsteer gradient`."""
    parser = add(
        "gradient", _differentiate, "derivatives of targets' log-probabilities",
        f"""
  logsteer gradient "I feel" " happy" --layers 2 --hook attn_out --at last_prompt
  logsteer gradient "I feel" " happy" " sad" --along gradient
  logsteer gradient "The capital of France is" " Paris" --attribution integrated
{LINES}""", steers=True, answer=GradientAnswer,
    )  # fmt: skip
    _add_item(parser)
    group = parser.add_argument_group("with respect to")
    either = group.add_mutually_exclusive_group(required=True)
    either.add_argument(
        "--layers", type=parse_layers, metavar="N,N-N,…", help="activations at these layers"
    )
    either.add_argument(
        "--along", metavar="NAME", help="eta of theta + eta v, where v is this stored direction"
    )
    either.add_argument(
        "--attribution",
        choices=get_args(Attribution),
        help="what each input token contributes, in place of gradients",
    )
    group.add_argument("--hook", metavar="NAME", help="of the activations; default resid_post")
    group.add_argument(
        "--at", type=parse_positions, metavar="WHICH",
        help=f"the activations' positions: {POSITIONS}; default all",
    )  # fmt: skip
    add_options(parser, "gradient", {**_TEXT_OPTIONS, "steps": "N"})
    parser.add_argument(
        "--baseline", type=int, metavar="ID",
        help="of integrated attributions: the token whose embedding each begins at; default 0",
    )  # fmt: skip


def _add_item(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("context", metavar="CONTEXT", help="what the targets follow")
    parser.add_argument("targets", metavar="TARGET", nargs="+")


def _read_item(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"context": arguments.context, "targets": arguments.targets}]


def _score(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = {**given(arguments, *_SCORING, "probes"), **read_changes(arguments)}
    answer = client.logprob(_read_item(arguments), **options)
    (result,) = pair_scores(answer, 1, len(arguments.targets))
    read = result.targets if arguments.probes else []
    drawn = [*draw_scores(result), *map(draw_tokens, read)]
    show(arguments, answer, *drawn)


def _diagnose(client: Client, arguments: argparse.Namespace) -> None:
    own = given(arguments, *_DIAGNOSED, *_TEXT_OPTIONS, "probes")
    options: Any = {**own, **read_changes(arguments)}
    if policy := given(arguments, *_POLICY):
        options["policy"] = policy
    answer = client.diagnostics(_read_item(arguments), **options)
    drawn = draw_diagnostics(answer.results[0], arguments.columns is not None)
    show(arguments, answer, *drawn)


def _differentiate(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = {**given(arguments, *_TEXT_OPTIONS, *_ATTRIBUTION), **read_changes(arguments)}
    if arguments.layers is None and given(arguments, "hook", "at"):
        arguments.refuse("--hook and --at go with --layers")
    wrt: dict[str, Any] | None = None
    if arguments.along is not None:
        wrt = {"override": arguments.along}
    elif arguments.layers is not None:
        wrt = {"layers": arguments.layers, **given(arguments, "hook")}
        if arguments.at is not None:
            wrt["positions"] = arguments.at
    answer = client.gradient(_read_item(arguments), wrt, **options)
    drawn: list[Any] = [draw_answer(answer, "target")]
    if wrt is None:
        drawn.append(draw_answer(answer, "token"))
    elif answer.along is None:
        drawn.append(draw_answer(answer, "position"))
    else:
        drawn.append(Text(f"along {answer.along.name} ({answer.along.sha256[:12]})"))
    show(arguments, answer, *drawn)


_LENS = {"columns": "NAME", "top": "N", "boundary": None, "bos": None, "on_overflow": None}
_PATCH = {"metric": None, "direction": None, "hook": "NAME", "boundary": None, "bos": None}
_ORANGE, _BLUE = (222, 84, 30), (31, 111, 180)
"""Above and below 0, as on the server's page."""
_STRONGEST = 0.7
_BRIGHT = 0.6
"""Share of the strongest colour from which on black letters are read more easily than white."""


def add_lens(add: AddCommand) -> None:
    """Add `logsteer lens`."""
    parser = add(
        "lens", _read_lens, "what each layer would predict, as a map",
        """
  logsteer lens "The capital of France is" " Paris" --top 1
  logsteer lens "Once upon a time there was a little girl." --layers 0,2,4
""", steers=True, answer=LensAnswer, plots=True,
    )  # fmt: skip
    parser.add_argument(
        "context", metavar="CONTEXT", help="what the targets follow; alone, a text to score whole"
    )
    parser.add_argument("targets", metavar="TARGET", nargs="*")
    parser.add_argument("--layers", type=parse_layers, metavar="N,N-N,…", help="default all")
    add_options(parser, "lens", _LENS)


def add_patch(add: AddCommand) -> None:
    """Add `logsteer patch`."""
    parser = add(
        "patch", _patch, "which activations carry a fact from one text into another",
        """
  logsteer patch "The capital of France is" "The capital of Spain is" " Paris"
  logsteer patch "The capital of France is" "The capital of Spain is" " Paris" --metric kl
""", answer=PatchAnswer, plots=True,
    )  # fmt: skip
    parser.add_argument("clean", metavar="CLEAN", help="a context")
    parser.add_argument("corrupted", metavar="CORRUPTED", help="one with as many tokens")
    parser.add_argument("targets", metavar="TARGET", nargs="+", help="scored after both")
    parser.add_argument(
        "--layers", type=parse_layers, action="append", metavar="N,N-N,…",
        help="a set of layers that are patched together, as in 0-2; repeatable; default each alone",
    )  # fmt: skip
    add_options(parser, "patch", _PATCH)


def _read_lens(client: Client, arguments: argparse.Namespace) -> None:
    item: Any = arguments.context
    if arguments.targets:
        item = {"context": arguments.context, "targets": arguments.targets}
    answer = client.lens([item], **given(arguments, "layers", *_LENS), **read_changes(arguments))
    drawn = [part for one in answer.results[0].targets for part in draw_map(map_lens(one))]
    show(arguments, answer, *drawn)


def _patch(client: Client, arguments: argparse.Namespace) -> None:
    pair = {
        side: {"context": getattr(arguments, side), "targets": arguments.targets}
        for side in ("clean", "corrupted")
    }
    answer = client.patch([pair], **given(arguments, "layers", *_PATCH))
    result = answer.results[0]
    runs = f"clean {show_value(result.clean)}, corrupted {show_value(result.corrupted)}"
    drawn = draw_map(map_patch(answer))
    show(arguments, answer, *drawn, Text(f"{answer.metric}, unpatched: {runs}"))


def draw_map(found: LayerMap) -> Iterator[Text | Table]:
    """Draw layers by tokens, the first layer at the bottom, on colours as strong as the values."""
    yield Text(f"{found.title}: {found.unit}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0))
    table.add_column("layer ", justify="right", no_wrap=True)
    for token in found.tokens:
        table.add_column(Text(repr(token)[1:-1]), justify="center")
    sizes = [abs(value) for row in found.values for value in row if value is not None]
    most = max(sizes, default=0) if found.signed else 1
    for number in reversed(range(len(found.layers))):
        cells = [
            Text(f" {_write_map_cell(found, number, place)} ", style=_colour(value, most or 1))
            for place, value in enumerate(found.values[number])
        ]
        table.add_row(f"{found.layers[number]} ", *cells)
    yield table


def _write_map_cell(found: LayerMap, row: int, place: int) -> str:
    value = found.values[row][place]
    shown = "-" if value is None else f"{value:+.2f}" if found.signed else f"{value:.2f}"
    return shown if found.marks is None else f"{found.marks[row][place]!r} {shown}"


def _colour(value: float | None, most: float) -> str:
    if value is None or not math.isfinite(value):
        return ""
    share = min(abs(value) / most, 1.0)
    strength = _STRONGEST * share
    mixed = [round(255 + (part - 255) * strength) for part in (_ORANGE if value > 0 else _BLUE)]
    return f"{'black' if share < _BRIGHT else 'white'} on rgb({','.join(map(str, mixed))})"


_WINDOWS = {
    "protocol": None, "context_length": "TOKENS", "stride": "TOKENS", "rows": "N", "bos": None,
    "precision": None,
}  # fmt: skip
"""Options of the command that are parameters of its call -> what stands for a value in the help."""


def add_perplexity(add: AddCommand) -> None:
    """Add `logsteer perplexity`."""
    parser = add(
        "perplexity", _measure, "log-likelihood of a text file or data set of any length",
        """
  logsteer perplexity book.txt --protocol rolling --context-length 256
  cat book.txt | logsteer perplexity - --json
  logsteer perplexity book.txt --context-length 128 --output windows.csv
""", steers=True, answer=PerplexityAnswer, grains=("window", "text"), plots=True,
    )  # fmt: skip
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
    made = {"protocol": describe_windows(answer.provenance), "model": answer.model}
    name = arguments.dataset or arguments.file
    title = f"{name} on {answer.model}, perplexity {answer.total.perplexity or float('nan'):.5g}"

    def list_flat() -> list[FlatRow]:
        if arguments.per == "text":
            return list_rows(answer, "text")
        return [write_window(one) for one in windows]

    show(
        arguments,
        answer,
        draw_statistics(answer.total, made),
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
                if not isinstance(event, PerplexityAnswer):
                    progress.show(event)
                if isinstance(event, WindowEvent):
                    windows.append(event.window)
    assert isinstance(event, PerplexityAnswer), "a stream ends with its result"
    return event


_CAPTURE = {
    "read": None, "hook": "NAME", "dtype": None, "max_length": "N",
    "shard_rows": "N", "bos": None, "on_overflow": None, "overwrite": None,
}  # fmt: skip


def add_capture(add: AddCommand) -> None:
    """Add `logsteer capture`."""
    parser = add(
        "capture", _capture, "activations of a data set, computed by the server",
        """
  logsteer capture res2 corpus.jsonl --layers 2 --output shards
  logsteer capture means corpus.jsonl --layers 2,3 --read mean
""", steers=True,
    )  # fmt: skip
    parser.add_argument("name", metavar="NAME", help="what the data set of activations is called")
    parser.add_argument(
        "file", metavar="FILE",
        help="JSON lines (.jsonl, .jsonl.gz), .parquet, hf:NAME (a data set), or store://PATH "
        "(in the server's store); any other file or - for standard input: a text a line, or JSON "
        "lines where the first is an object or string",
    )  # fmt: skip
    parser.add_argument("--layers", type=parse_layers, required=True, metavar="N,N-N,…")
    parser.add_argument(
        "--output",
        dest="path",
        metavar="DIR",
        help="a directory for the shards; without it they stay on the server",
    )
    parser.add_argument(
        "--field", default="text", metavar="NAME", help="what holds a row's text; default text"
    )
    parser.add_argument(
        "--at", type=partial(parse_positions, names=get_args(AllPositions)), metavar="WHICH",
        help="tokens to read: all, or slices as in 0:5,8:10; default all",
    )  # fmt: skip
    add_options(parser, "captures.start", _CAPTURE)


def _capture(client: Client, arguments: argparse.Namespace) -> None:
    source: Any = arguments.file
    if not (has_rows(source) or names_kind(source) or source.startswith("store://")):
        source = _read_texts(source)
    options: Any = {**given(arguments, *_CAPTURE), **read_changes(arguments)}
    if arguments.at is not None:
        options["positions"] = arguments.at
    options["field"] = arguments.field
    index = client.capture(source, arguments.name, arguments.layers, arguments.path, **options)
    lost = f"; {index.problems} with a problem" if index.problems else ""
    show(
        arguments,
        index,
        f"{index.name}: {index.documents} documents{lost}, {index.rows} rows of {index.width} "
        f"numbers; shards: {index.num_shards}",
    )


def _read_texts(name: str) -> list[Any]:
    """Return the rows of a file whose name does not say what it holds: lines as they are, or JSON.

    JSON is meant where the first line is an object or a string of it: a text may begin with a
    quotation mark, too.
    """
    place, data = read_input(name)
    lines = [line for line in decode_text(data, place).split("\n") if line.strip()]
    first = lines[0] if lines else ""
    try:
        is_json = isinstance(json.loads(first), str | dict)
    except (ValueError, RecursionError):
        is_json = first.startswith("{")
    if is_json:
        return [row for _, row in read_json_lines(BytesIO(data), place, '{"text": "…"}')]
    return [line.rstrip("\r") for line in lines]

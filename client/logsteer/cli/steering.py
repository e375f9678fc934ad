"""`logsteer steer` and `logsteer sweep`: what a model says, and how it scores, under steering."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from logsteer.cli import tables, token_tables
from logsteer.cli.continuations import stream_one, stream_side_by_side
from logsteer.cli.items import ITEM_FORM
from logsteer.cli.options import add_options
from logsteer.cli.steering_options import (
    add_probe_option,
    add_steering_options,
    read_parameters,
    read_steering,
)
from logsteer.cli.terminal import (
    given,
    parse_layers,
    parse_scales,
    read_input,
    read_text,
    show,
    wants_json,
)
from logsteer.client import Client
from logsteer.errors import AnswerError, LogsteerError
from logsteer.extras.figures import check_plot_path
from logsteer.extras.json_lines import read_json_lines
from logsteer.extras.labels import label_sweep
from logsteer.extras.plots import plot_sweep

_SAMPLING = {
    "max_tokens": "N", "n": "N", "temperature": "T", "top_p": "P", "top_k": "K", "min_p": "P",
    "seed": "N", "stop": "TEXT", "bos": None, "baseline": None,
}  # fmt: skip
_SWEPT = {"boundary": None, "bos": None}


def add_steer(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer steer`."""
    parser.add_argument("prompt", metavar="PROMPT")
    add_steering_options(parser, required=True)
    add_probe_option(parser)
    group = parser.add_argument_group("sampling")
    add_options(group, "steer", _SAMPLING)
    group.add_argument(
        "--chat", action="store_true", help="PROMPT is a user's message, for the chat template"
    )
    parser.set_defaults(command=_steer)


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer sweep`."""
    add_steering_options(parser, required=True)
    group = parser.add_argument_group("what is scored, and where")
    group.add_argument(
        "--scales",
        type=parse_scales,
        required=True,
        metavar="X,X,…",
        help="factors of the vectors' own scales; write --scales=-4,0,4 with a minus in front",
    )
    group.add_argument(
        "--layers",
        type=_parse_layer_sets,
        metavar="SET;SET;…",
        help="sets of layers in place of the vectors' own, as in '2;3;2,3'",
    )
    group.add_argument(
        "--item",
        nargs="+",
        action="append",
        dest="pairs",
        metavar=("CONTEXT", "TARGET"),
        help="a context and its targets; repeatable",
    )
    group.add_argument(
        "--items", metavar="FILE", help=f"a line an item: {ITEM_FORM}; - is standard input"
    )
    group.add_argument(
        "--text",
        action="append",
        dest="texts",
        metavar="FILE",
        help="a UTF-8 text whose perplexity is told; repeatable",
    )
    add_options(group, "sweep", _SWEPT)
    group.add_argument("--plot", metavar="FILE", help="draw it: a .png, .svg or .pdf")
    parser.set_defaults(command=_sweep)


def _steer(client: Client, arguments: argparse.Namespace) -> None:
    steering = read_steering(arguments)
    assert steering is not None, "the parser requires it"
    options: Any = {**given(arguments, *_SAMPLING, "probes"), **read_parameters(arguments)}
    prompt: str | None = arguments.prompt
    if arguments.chat:
        options = {**options, "messages": [{"role": "user", "content": prompt}]}
        prompt = None
    if wants_json(arguments):
        show(arguments, client.steer(prompt, steering, **options))
        return
    alone = (arguments.n or 1) == 1 and not arguments.baseline
    console = Console(highlight=False)
    with closing(client.steer_events(prompt, steering, **options)) as events:
        if alone:
            answer = stream_one(events, console, prompt or "")
        else:
            answer = stream_side_by_side(events, console, bool(arguments.baseline))
    (result,) = answer.results
    if alone:
        drawn = token_tables.draw_end(result.completions[0])
        show(arguments, answer, *drawn, *tables.draw_changes(answer))
    else:
        table = tables.draw_completions(result)
        show(arguments, answer, table, *tables.draw_changes(answer))


def _sweep(client: Client, arguments: argparse.Namespace) -> None:
    steering = read_steering(arguments)
    assert steering is not None, "the parser requires it"
    items = _read_items(arguments)
    names: list[str] = arguments.texts or []
    if not items and not names:
        arguments.refuse("give --item, --items or --text: something to score at each scale")
    if arguments.plot:
        check_plot_path(arguments.plot)
    options: Any = {**given(arguments, *_SWEPT, "layers"), **read_parameters(arguments)}
    if items:
        options["items"] = items
    if names:
        options["texts"] = [read_text(Path(name)) for name in names]
    answer = client.sweep(steering, arguments.scales, **options)
    texts = [Path(name).name for name in names]
    try:
        labels = label_sweep(answer, items, texts)
    except ValueError as wrong:
        raise AnswerError(f"{wrong}: a fault of the server", request_id=answer.id) from wrong
    notes = list(tables.draw_changes(answer))
    if arguments.plot:
        title = f"{_name_steering(steering)} on {answer.model}"
        plot_sweep(answer, arguments.plot, items=items, texts=texts, title=title)
        notes.append(Text(f"plot: {arguments.plot}"))
    show(arguments, answer, tables.draw_sweep(answer, labels), *notes)


def _read_items(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    refuse: Callable[[str], NoReturn] = arguments.refuse
    items: list[dict[str, Any]] = []
    for context, *targets in arguments.pairs or []:
        if not targets:
            refuse(f"--item {context!r} has no target: give a context and its targets")
        items.append({"context": context, "targets": targets})
    if arguments.items:
        name, data = read_input(arguments.items)
        for number, item in read_json_lines(BytesIO(data), name, ITEM_FORM):
            if not isinstance(item, dict):
                raise LogsteerError(f"{name}, line {number}: no JSON object; write {ITEM_FORM}")
            items.append(item)
    return items


def _name_steering(steering: Mapping[str, Any]) -> str:
    vectors = steering.get("vectors")
    named = vectors if isinstance(vectors, Sequence) else []
    names = [str(vector.get("name") or vector.get("sha256", "vector")[:12]) for vector in named]
    return " + ".join(names)


def _parse_layer_sets(text: str) -> list[list[int]]:
    return [parse_layers(part) for part in text.split(";")]

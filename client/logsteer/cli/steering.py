"""`logsteer steer` and `logsteer sweep`: what a model says, and how it scores, under steering."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

from logsteer._progress import Waiting
from logsteer.cli import tables
from logsteer.cli.continuations import (
    draw_generated,
    draw_grown,
    stream_one,
    stream_side_by_side,
)
from logsteer.cli.options import add_options
from logsteer.cli.output import add_output_options, show, wants_json
from logsteer.cli.steering_options import (
    add_probe_option,
    add_steering_options,
    read_parameters,
    read_steering,
)
from logsteer.cli.terminal import (
    TerminalConsole,
    add_examples,
    given,
    parse_layers,
    parse_scales,
    read_input,
)
from logsteer.client import Client
from logsteer.errors import AnswerError, LogsteerError
from logsteer.extras.json_files import read_json_lines, read_text
from logsteer.extras.labels import SweepLabels, label_sweep
from logsteer.extras.plots import plot_sweep
from logsteer.extras.rows import FlatRow, list_rows
from logsteer.schemas import SteerAnswer, SweepAnswer

STEER_EXAMPLES = """
  logsteer steer "Once upon a time" --vector mood --baseline --seed 1
  logsteer steer "Once upon a time" --vector mood:-2 --probe mood@3 --temperature 0
  logsteer steer "Once upon a time" --vector mood:4@2 -n 3 --per token --output tokens.csv
"""
SWEEP_EXAMPLES = """
  logsteer sweep --vector mood --scales -4,-2,0,2,4 --item "Tom was very" " happy" " sad"
  logsteer sweep --vector mood --layers '1;2;1,2' --scales -2,2 --text book.txt --plot sweep.png
  logsteer sweep --vector mood --scales -4,4 --items items.jsonl --format csv
"""

_SAMPLING = {
    "max_tokens": "N", "n": "N", "temperature": "T", "top_p": "P", "top_k": "K", "min_p": "P",
    "seed": "N", "stop": "TEXT", "bos": None, "baseline": None,
}  # fmt: skip
_SWEPT = {"boundary": None, "bos": None}
_ITEM_FORM = '{"context": "…", "targets": ["…"]}'


def add_steer(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer steer`."""
    add_examples(parser, STEER_EXAMPLES)
    parser.add_argument("prompt", metavar="PROMPT")
    add_steering_options(parser, required=True)
    add_probe_option(parser)
    group = parser.add_argument_group("sampling")
    add_options(group, "steer", _SAMPLING, short={"n": "-n"})
    group.add_argument(
        "--chat", action="store_true", help="PROMPT is a user's message, for the chat template"
    )
    add_output_options(parser, SteerAnswer)
    parser.set_defaults(command=_steer)


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer sweep`."""
    add_examples(parser, SWEEP_EXAMPLES)
    add_steering_options(parser, required=True)
    group = parser.add_argument_group("what is scored, and where")
    group.add_argument(
        "--scales",
        type=parse_scales,
        required=True,
        metavar="X,X,…",
        help="factors of the scales that --vector names; scales themselves where it names none",
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
        "--items", metavar="FILE", help=f"a line an item: {_ITEM_FORM}; - is standard input"
    )
    group.add_argument(
        "--text",
        action="append",
        dest="texts",
        metavar="FILE",
        help="a UTF-8 text whose perplexity is measured; repeatable",
    )
    add_options(group, "sweep", _SWEPT)
    add_output_options(parser, SweepAnswer, plot=True)
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
    console = TerminalConsole()
    with closing(client.steer_events(prompt, steering, **options)) as events:
        if alone:
            answer = stream_one(events, console, prompt or "")
        else:
            answer = stream_side_by_side(events, console, bool(arguments.baseline))
    show(arguments, answer, *(draw_grown(answer) if alone else draw_generated(answer, [])))


def _sweep(client: Client, arguments: argparse.Namespace) -> None:
    steering = read_steering(arguments)
    assert steering is not None, "the parser requires it"
    items = _read_items(arguments)
    names: list[str] = arguments.texts or []
    if not items and not names:
        arguments.refuse("give --item, --items or --text: something to score at each scale")
    options: Any = {**given(arguments, *_SWEPT, "layers"), **read_parameters(arguments)}
    if items:
        options["items"] = items
    if names:
        options["texts"] = [read_text(Path(name)) for name in names]
    with Waiting(f"sweeping over {len(arguments.scales)} scales"):
        answer = client.sweep(steering, arguments.scales, **options)
    texts = [Path(name).name for name in names]
    try:
        labels = label_sweep(answer, items, texts)
    except ValueError as wrong:
        raise AnswerError(f"{wrong}: a fault of the server", request_id=answer.id) from wrong

    def draw(path: str) -> None:
        title = f"{_name_steering(steering)} on {answer.model}"
        plot_sweep(answer, path, items=items, texts=texts, title=title)

    rows = list(_name_rows(list_rows(answer), labels))
    drawn = [*tables.draw_sweep(answer, rows), *tables.draw_changes(answer)]
    show(arguments, answer, *drawn, rows=lambda: rows, draw=draw)


def _name_rows(rows: Iterable[FlatRow], labels: SweepLabels) -> Iterator[FlatRow]:
    """Yield the rows with names in place of the numbers of items, targets and texts."""
    for row in rows:
        item, target, text = row["item"], row["target"], row["text"]
        named = {} if text is None else {"text": labels.texts[text]}
        if item is not None:
            named = {"item": labels.contexts[item], "target": labels.targets[item][target]}
        yield {**row, **named}


def _read_items(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    refuse: Callable[[str], NoReturn] = arguments.refuse
    items: list[dict[str, Any]] = []
    for context, *targets in arguments.pairs or []:
        if not targets:
            refuse(f"--item {context!r} has no target: give a context and its targets")
        items.append({"context": context, "targets": targets})
    if arguments.items:
        name, data = read_input(arguments.items)
        for number, item in read_json_lines(BytesIO(data), name, _ITEM_FORM):
            if not isinstance(item, dict):
                raise LogsteerError(f"{name}, line {number}: no JSON object; write {_ITEM_FORM}")
            items.append(item)
    return items


def _name_steering(steering: Mapping[str, Any]) -> str:
    vectors = steering.get("vectors")
    named = vectors if isinstance(vectors, Sequence) else []
    names = [str(vector.get("name") or vector.get("sha256", "vector")[:12]) for vector in named]
    return " + ".join(names)


def _parse_layer_sets(text: str) -> list[list[int]]:
    return [parse_layers(part) for part in text.split(";")]

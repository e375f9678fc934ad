"""The commands that generate: generate, chat, steer; and sweep, which scores under steering."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

from logsteer._calls import checked
from logsteer._progress import Waiting
from logsteer.cli.arguments import (
    MUST_STEER,
    AddCommand,
    TerminalConsole,
    add_options,
    given,
    parse_layers,
    parse_scales,
    read_changes,
    read_entries,
)
from logsteer.cli.output import (
    draw_generated,
    draw_grown,
    draw_sweep,
    show,
    stream_one,
    wants_json,
)
from logsteer.client import Client
from logsteer.errors import AnswerError, APIError, LogsteerError
from logsteer.extras.datasets import read_text
from logsteer.extras.labels import SweepLabels, label_sweep
from logsteer.extras.plots import plot_sweep
from logsteer.extras.rows import FlatRow, list_rows
from logsteer.schemas import GenerateAnswer, SteerAnswer, Steering, SweepAnswer

_SAMPLING = {
    "max_tokens": "N", "n": "N", "temperature": "T", "top_p": "P", "top_k": "K", "min_p": "P",
    "seed": "N", "stop": "TEXT", "include_stop": None, "ignore_eos": None, "bos": None,
    "on_overflow": None,
}  # fmt: skip
_DIAGNOSTICS = {"diagnostics": None, "columns": "NAME", "window": "TOKENS"}


def add_generate(add: AddCommand) -> None:
    """Add `logsteer generate`."""
    parser = add(
        "generate", _generate, "continue prompts, from arguments or JSON lines",
        """
  logsteer generate "Once upon a time" --max-tokens 40 --seed 1
  logsteer generate "Once upon a time" "Tom" -n 3 --diagnostics --columns log_q --columns rank
  logsteer generate "Once upon a time" "Tom" -n 3 --per token --output tokens.csv
""", steers=True, probes=True, answer=GenerateAnswer,
    )  # fmt: skip
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="+",
        help="a text to continue; score-file --endpoint generate continues a file's",
    )  # fmt: skip
    group = parser.add_argument_group("sampling")
    add_options(group, "generate", _SAMPLING, short={"n": "-n"})
    group.add_argument(
        "--chat", action="store_true", help="PROMPT is a user's message, for the chat template"
    )
    add_options(parser.add_argument_group("diagnostics"), "generate", _DIAGNOSTICS)


def _generate(client: Client, arguments: argparse.Namespace) -> None:
    own = given(arguments, *_SAMPLING, *_DIAGNOSTICS)
    _continue(client, "generate", arguments, arguments.prompts, own)


def _continue(
    client: Client,
    name: str,
    arguments: argparse.Namespace,
    prompts: list[str],
    own: Mapping[str, Any],
) -> None:
    """Show the continuations of prompts; on a terminal a single one as it comes."""
    options: dict[str, Any] = {**own, **given(arguments, "probes"), **read_changes(arguments)}
    options["prompts"] = prompts
    if arguments.chat:
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        options |= {"prompts": None, "messages": turns}
    alone = len(prompts) == 1 and (arguments.n or 1) == 1 and not options.get("baseline")
    if alone and not wants_json(arguments):
        with closing(getattr(client, f"{name}_events")(**options)) as events:
            answer = stream_one(events, TerminalConsole(), "" if arguments.chat else prompts[0])
        show(arguments, answer, *draw_grown(answer))
        return
    with Waiting("generating"):
        answer = getattr(client, name)(**options)
    show(arguments, answer, *draw_generated(answer, prompts))


_CHAT_SAMPLING = {
    "max_tokens": "N", "temperature": "T", "top_p": "P", "top_k": "K", "seed": "N",
    "chat_template_kwargs": "JSON",
}  # fmt: skip


def add_chat(add: AddCommand) -> None:
    """Add `logsteer chat`."""
    parser = add(
        "chat", _chat, "talk to a model, steered if you like",
        """
  echo "What is the capital of France?" | logsteer chat
  echo "Tell me a story." | logsteer chat --vector mood:2 --max-tokens 40
  echo "Tell me a story." | logsteer chat --system "Be brief." --vector mood:2

Each line is a turn, except these:
  /steer mood:4 calm@3   steer from now on; no vector: steer no more
  /new                   begin a new conversation
""", steers=True,
    )  # fmt: skip
    add_options(parser, "generate", _CHAT_SAMPLING)
    parser.add_argument("--system", metavar="TEXT", help="the system message")


def _chat(client: Client, arguments: argparse.Namespace) -> None:
    """Answer each line of standard input; a refusal takes back its turn, and is told."""
    options: Any = {
        "max_tokens": 256,
        **given(arguments, *_CHAT_SAMPLING),
        **read_changes(arguments),
    }
    first = [{"role": "system", "content": arguments.system}] if arguments.system else []
    console, turns = TerminalConsole(), list(first)
    while (line := _read_line(console)) is not None:
        command, *names = line.split() or [""]
        if command == "/new":
            turns[:] = first
        elif command == "/steer":
            options["steering"] = names or None
        elif command:
            turns.append({"role": "user", "content": line})
            try:
                with closing(client.generate_events(messages=turns, **options)) as events:
                    text = stream_one(events, console, "").text
            except APIError as error:
                console.print(f"error: {error}", style="red", markup=False)
                turns.pop()
            else:
                turns.append({"role": "assistant", "content": text})


def _read_line(console: TerminalConsole) -> str | None:
    """Return the next line; None at the end."""
    try:
        return console.input("> " if console.is_terminal else "")
    except EOFError:
        return None


_STEER_SAMPLING = {
    "max_tokens": "N", "n": "N", "temperature": "T", "top_p": "P", "top_k": "K", "min_p": "P",
    "seed": "N", "stop": "TEXT", "bos": None, "baseline": None,
}  # fmt: skip
_SWEPT = {"boundary": None, "bos": None}
_ITEM_FORM = '{"context": "…", "targets": ["…"]}'


def add_steer(add: AddCommand) -> None:
    """Add `logsteer steer`."""
    parser = add(
        "steer", _steer, "continue a prompt under steering, as it is generated",
        """
  logsteer steer "Once upon a time" --vector mood --baseline --seed 1
  logsteer steer "Once upon a time" --vector mood:-2 --probe mood@3 --temperature 0
  logsteer steer "Once upon a time" --vector mood:4@2 -n 3 --per token --output tokens.csv
""", steers=MUST_STEER, probes=True, answer=SteerAnswer,
    )  # fmt: skip
    parser.add_argument("prompt", metavar="PROMPT")
    group = parser.add_argument_group("sampling")
    add_options(group, "steer", _STEER_SAMPLING, short={"n": "-n"})
    group.add_argument(
        "--chat", action="store_true", help="PROMPT is a user's message, for the chat template"
    )


def add_sweep(add: AddCommand) -> None:
    """Add `logsteer sweep`."""
    parser = add(
        "sweep", _sweep, "what steering does to targets and texts, scale by scale",
        """
  logsteer sweep --vector mood --scales -4,-2,0,2,4 --item "Tom was very" " happy" " sad"
  logsteer sweep --vector mood --layers '1;2;1,2' --scales -2,2 --text book.txt --plot sweep.png
  logsteer sweep --vector mood --scales -4,4 --items items.jsonl --format csv
""", steers=MUST_STEER, answer=SweepAnswer, plots=True,
    )  # fmt: skip
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
        type=lambda text: [parse_layers(part) for part in text.split(";")],
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


def _steer(client: Client, arguments: argparse.Namespace) -> None:
    _continue(client, "steer", arguments, [arguments.prompt], given(arguments, *_STEER_SAMPLING))


def _sweep(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = {**given(arguments, *_SWEPT, "layers"), **read_changes(arguments)}
    steering = options.pop("steering")
    items = _read_items(arguments)
    names: list[str] = arguments.texts or []
    if not items and not names:
        arguments.refuse("give --item, --items or --text: something to score at each scale")
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
    show(arguments, answer, *draw_sweep(answer, rows), rows=lambda: rows, draw=draw)


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
        for where, item in read_entries(arguments.items, _ITEM_FORM):
            if not isinstance(item, dict):
                raise LogsteerError(f"{where}: no JSON object; write {_ITEM_FORM}")
            items.append(item)
    return items


def _name_steering(steering: Mapping[str, Any]) -> str:
    vectors = checked(Steering, steering).vectors
    return " + ".join(one.name or one.sae or (one.sha256 or "vector")[:12] for one in vectors)

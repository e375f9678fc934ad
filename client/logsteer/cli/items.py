"""`logsteer diagnostics` and `logsteer gradient`: what lies behind the log-probability of targets.

Both take one context and its targets as arguments, or items as JSON lines.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from logsteer.cli import continuations, tables
from logsteer.cli.lines import (
    AnsweredLines,
    Row,
    UnusableRowError,
    add_batch_option,
    answer_rows,
    read_rows,
)
from logsteer.cli.options import add_options, add_policy_options, read_policy
from logsteer.cli.output import add_output_options, show
from logsteer.cli.steering_options import (
    POSITIONS,
    add_probe_option,
    add_steering_options,
    parse_positions,
    read_changes,
)
from logsteer.cli.terminal import STDIN, add_examples, given, parse_layers
from logsteer.client import Client
from logsteer.errors import AnswerError
from logsteer.schemas import GradientAnswer, ItemGradients, ItemScore, LogprobAnswer, LogprobItem

LINES = """
With -, a line is an item: {"context": "…", "targets": ["…"]}, or with context_ids and target_ids,
or messages and targets; or a line of `logsteer generate -`, whose completions are the targets.
TARGETs beside - are those of lines that have none, which may be texts in quotation marks, too. For
each, a line is printed when its batch is done (--batch-size): the object, with its result; or flat
rows, with --format csv or parquet. A batch that is refused is halved, so that what stands in front
of the line that it is refused for is printed.
"""
DIAGNOSTICS_EXAMPLES = f"""
  logsteer diagnostics "The capital of France is" " Paris" " London"
  logsteer diagnostics "I feel" " happy" --columns entropy --columns rank --temperature 0.7
  logsteer generate - -n 4 < prompts.jsonl | logsteer diagnostics - > looked-at.jsonl
{LINES}"""
GRADIENT_EXAMPLES = f"""
  logsteer gradient "I feel" " happy" " sad" --layers 1,2
  logsteer gradient "I feel" " happy" --layers 2 --hook attn_out --at last_prompt
  logsteer gradient "I feel" " happy" " sad" --along gradient
{LINES}"""

ITEM_FORM = '{"context": "…", "targets": ["…"]}'
_DIAGNOSTICS = {"columns": "NAME", "window": "TOKENS", "precision": None}
_READING = {"boundary": None, "bos": None, "on_overflow": None}

_Answer: TypeAlias = LogprobAnswer | GradientAnswer
_Ask: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], _Answer]


def add_diagnostics(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer diagnostics`."""
    add_examples(parser, DIAGNOSTICS_EXAMPLES)
    add_item_arguments(parser)
    add_options(parser, "diagnostics", _DIAGNOSTICS | _READING)
    add_policy_options(parser)
    add_steering_options(parser)
    add_probe_option(parser)
    add_output_options(parser, LogprobAnswer, plot=True)
    parser.set_defaults(command=_diagnose)


def add_gradient(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer gradient`."""
    add_examples(parser, GRADIENT_EXAMPLES)
    add_item_arguments(parser)
    group = parser.add_argument_group("with respect to")
    either = group.add_mutually_exclusive_group(required=True)
    either.add_argument(
        "--layers", type=parse_layers, metavar="N,N-N,…", help="activations at these layers"
    )
    either.add_argument(
        "--along", metavar="NAME", help="eta of theta + eta v, where v is this stored direction"
    )
    group.add_argument("--hook", metavar="NAME", help="of the activations; default resid_post")
    group.add_argument(
        "--at", type=parse_positions, metavar="WHICH",
        help=f"the activations' positions: {POSITIONS}; default all",
    )  # fmt: skip
    add_options(parser, "gradient", _READING)
    add_steering_options(parser)
    add_output_options(parser, GradientAnswer)
    parser.set_defaults(command=_differentiate)


def add_item_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a command the arguments that `read_item_arguments` and `answer_items` read."""
    parser.add_argument(
        "context", metavar="CONTEXT", help="what the targets follow; - reads JSON lines"
    )
    parser.add_argument(
        "targets", metavar="TARGET", nargs="*", help="with -, those of lines that have none"
    )
    add_batch_option(parser)


def _diagnose(client: Client, arguments: argparse.Namespace) -> None:
    own = given(arguments, *_DIAGNOSTICS, *_READING, "probes")
    options: Any = {**own, **read_changes(arguments)}
    if policy := read_policy(arguments):
        options["policy"] = policy
    items = read_item_arguments(arguments)
    if items is None:
        answer_items(arguments, lambda items: client.diagnostics(items, **options))
        return
    answer = client.diagnostics(items, **options)
    drawn = continuations.draw_diagnostics(answer.results[0], arguments.columns is not None)
    show(arguments, answer, *drawn, *tables.draw_changes(answer))


def _differentiate(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = {**given(arguments, *_READING), **read_changes(arguments)}
    if arguments.along is not None:
        if given(arguments, "hook", "at"):
            arguments.refuse("--hook and --at go with --layers, not with --along")
        wrt: dict[str, Any] = {"override": arguments.along}
    else:
        wrt = {"layers": arguments.layers, **given(arguments, "hook")}
        if arguments.at is not None:
            wrt["positions"] = arguments.at
    items = read_item_arguments(arguments)
    if items is None:
        answer_items(arguments, lambda items: client.gradient(items, wrt, **options))
        return
    answer = client.gradient(items, wrt, **options)
    show(arguments, answer, *continuations.draw_gradients(answer), *tables.draw_changes(answer))


def read_item_arguments(arguments: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Return the item of the arguments; None where - stands for lines. Exits with 2 for none."""
    context, targets = arguments.context, arguments.targets
    if context == STDIN:
        if getattr(arguments, "plot", None):
            arguments.refuse("--plot draws one CONTEXT and its targets, not the lines of -")
        return None
    if not targets:
        arguments.refuse("give at least one TARGET; - reads JSON lines")
    return [{"context": context, "targets": targets}]


def answer_items(arguments: argparse.Namespace, ask: _Ask) -> None:
    """Ask about the items of the lines of standard input, and write each with its result."""

    def answer(rows: Sequence[Row]) -> Sequence[ItemScore | ItemGradients]:
        found = ask([_read_item(row, arguments.targets) for row in rows])
        results: Sequence[ItemScore | ItemGradients] = found.results
        if len(results) != len(rows):
            raise AnswerError(
                f"{len(rows)} items, {len(results)} results: a fault of the server",
                request_id=found.id,
            )
        return results

    field = "context" if arguments.targets else None
    rows = read_rows(ITEM_FORM, field)
    answer_rows(rows, arguments.batch_size, answer, AnsweredLines(arguments, "result"))


def _read_item(row: Row, targets: Sequence[str]) -> dict[str, Any]:
    """Return the item of a line: its own, or that of a line of `logsteer generate`.

    One without targets of its own has these.
    """
    if "completions" in row and "prompt_ids" in row:
        try:
            targets = [completion["token_ids"] for completion in row["completions"]]
        except (KeyError, TypeError) as error:
            raise UnusableRowError("completions without token_ids") from error
        return {"context_ids": row["prompt_ids"], "target_ids": targets}
    item = {name: row[name] for name in LogprobItem.model_fields if row.get(name) is not None}
    if not item:
        raise UnusableRowError(f"no item such as {ITEM_FORM}, only {', '.join(row) or '{}'}")
    if targets and "targets" not in item and "target_ids" not in item:
        item["targets"] = list(targets)
    return item

"""`logsteer score`, `diagnostics` and `gradient`: one context and its targets."""

import argparse
from typing import Any, get_args

from rich.text import Text

from logsteer._pairs import pair_scores
from logsteer.cli import tables
from logsteer.cli.options import add_options, add_policy_options, read_policy
from logsteer.cli.output import add_output_options, show
from logsteer.cli.steering_options import (
    POSITIONS,
    add_probe_option,
    add_steering_options,
    parse_positions,
    read_changes,
)
from logsteer.cli.terminal import add_examples, given, parse_layers
from logsteer.client import Client
from logsteer.schemas import Attribution, GradientAnswer, LogprobAnswer

LINES = """
`logsteer score-file` asks about the rows of a file, each a context and its targets.
"""
SCORE_EXAMPLES = f"""
  logsteer score "The capital of France is" " Paris" " London"
  logsteer score "2 + 2 =" 4 --space both --top 3 --json
  logsteer score "I feel" " happy" " sad" --format csv
{LINES}"""
DIAGNOSTICS_EXAMPLES = f"""
  logsteer diagnostics "The capital of France is" " Paris" " London"
  logsteer diagnostics "I feel" " happy" --columns entropy --columns rank --temperature 0.7
{LINES}"""
GRADIENT_EXAMPLES = f"""
  logsteer gradient "I feel" " happy" --layers 2 --hook attn_out --at last_prompt
  logsteer gradient "I feel" " happy" " sad" --along gradient
  logsteer gradient "The capital of France is" " Paris" --attribution integrated
{LINES}"""

_SCORING = {"boundary": None, "space": None, "top": "N", "precision": None}
_DIAGNOSTICS = {"columns": "NAME", "window": "TOKENS", "precision": None}
_READING = {"boundary": None, "bos": None, "on_overflow": None}
_ATTRIBUTION = ("attribution", "steps", "baseline")


def add_score(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer score`."""
    add_examples(parser, SCORE_EXAMPLES)
    _add_item(parser)
    add_options(parser, "logprob", _SCORING)
    add_steering_options(parser)
    add_probe_option(parser)
    add_output_options(parser, LogprobAnswer)
    parser.set_defaults(command=_score)


def add_diagnostics(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer diagnostics`."""
    add_examples(parser, DIAGNOSTICS_EXAMPLES)
    _add_item(parser)
    add_options(parser, "diagnostics", _DIAGNOSTICS | _READING)
    add_policy_options(parser)
    add_steering_options(parser)
    add_probe_option(parser)
    add_output_options(parser, LogprobAnswer)
    parser.set_defaults(command=_diagnose)


def add_gradient(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer gradient`."""
    add_examples(parser, GRADIENT_EXAMPLES)
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
    add_options(parser, "gradient", {**_READING, "steps": "N"})
    parser.add_argument(
        "--baseline", type=int, metavar="ID",
        help="of integrated attributions: the token whose embedding each begins at; default 0",
    )  # fmt: skip
    add_steering_options(parser)
    add_output_options(parser, GradientAnswer)
    parser.set_defaults(command=_differentiate)


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
    drawn = [*tables.draw_scores(result), *map(tables.draw_tokens, read)]
    show(arguments, answer, *drawn, *tables.draw_changes(answer))


def _diagnose(client: Client, arguments: argparse.Namespace) -> None:
    own = given(arguments, *_DIAGNOSTICS, *_READING, "probes")
    options: Any = {**own, **read_changes(arguments)}
    if policy := read_policy(arguments):
        options["policy"] = policy
    answer = client.diagnostics(_read_item(arguments), **options)
    drawn = tables.draw_diagnostics(answer.results[0], arguments.columns is not None)
    show(arguments, answer, *drawn, *tables.draw_changes(answer))


def _differentiate(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = {**given(arguments, *_READING, *_ATTRIBUTION), **read_changes(arguments)}
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
    drawn: list[Any] = [tables.draw_answer(answer, "target")]
    if wrt is None:
        drawn.append(tables.draw_answer(answer, "token"))
    elif answer.along is None:
        drawn.append(tables.draw_answer(answer, "position"))
    else:
        drawn.append(Text(f"along {answer.along.name} ({answer.along.sha256[:12]})"))
    show(arguments, answer, *drawn, *tables.draw_changes(answer))

"""`logsteer generate`: continuations of prompts."""

import argparse
from contextlib import closing
from typing import Any

from logsteer.cli.continuations import draw_generated, draw_grown, stream_one
from logsteer.cli.options import add_options
from logsteer.cli.output import add_output_options, show, wants_json
from logsteer.cli.steering_options import add_probe_option, add_steering_options, read_changes
from logsteer.cli.terminal import TerminalConsole, add_examples, given
from logsteer.client import Client
from logsteer.schemas import GenerateAnswer

EXAMPLES = """
  logsteer generate "Once upon a time" --max-tokens 40 --seed 1
  logsteer generate "Once upon a time" "Tom" -n 3 --diagnostics --columns log_q --columns rank
  logsteer generate "Once upon a time" "Tom" -n 3 --per token --output tokens.csv
"""

_SAMPLING = {
    "max_tokens": "N", "n": "N", "temperature": "T", "top_p": "P", "top_k": "K", "min_p": "P",
    "seed": "N", "stop": "TEXT", "include_stop": None, "ignore_eos": None, "bos": None,
    "on_overflow": None,
}  # fmt: skip
_DIAGNOSTICS = {"diagnostics": None, "columns": "NAME", "window": "TOKENS"}


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer generate`."""
    add_examples(parser, EXAMPLES)
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
    add_steering_options(parser)
    add_probe_option(parser)
    add_output_options(parser, GenerateAnswer)
    parser.set_defaults(command=_generate)


def _generate(client: Client, arguments: argparse.Namespace) -> None:
    own = given(arguments, *_SAMPLING, *_DIAGNOSTICS, "probes")
    options: Any = {**own, **read_changes(arguments)}
    prompts: list[str] = arguments.prompts
    form: dict[str, Any] = {"prompts": prompts}
    if arguments.chat:
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        form = {"prompts": None, "messages": turns}
    if len(prompts) == 1 and (arguments.n or 1) == 1 and not wants_json(arguments):
        with closing(client.generate_events(**form, **options)) as events:
            answer = stream_one(events, TerminalConsole(), "" if arguments.chat else prompts[0])
        show(arguments, answer, *draw_grown(answer))
        return
    answer = client.generate(**form, **options)
    show(arguments, answer, *draw_generated(answer, prompts))

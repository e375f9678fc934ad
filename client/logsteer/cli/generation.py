"""`logsteer generate`: continuations of prompts, from arguments or from JSON lines."""

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from logsteer.cli import continuations, tables
from logsteer.cli.continuations import stream_one
from logsteer.cli.lines import (
    AnsweredLines,
    NumberedRow,
    Row,
    UnusableRowError,
    add_batch_option,
    answer_rows,
    read_rows,
)
from logsteer.cli.options import add_options
from logsteer.cli.output import add_output_options, show, wants_json
from logsteer.cli.steering_options import add_probe_option, add_steering_options, read_changes
from logsteer.cli.terminal import STDIN, TerminalConsole, add_examples, given
from logsteer.client import Client
from logsteer.schemas import GenerateAnswer, PromptCompletions

EXAMPLES = """
  logsteer generate "Once upon a time" --max-tokens 40 --seed 1
  logsteer generate "Once upon a time" "Tom" -n 3 --diagnostics --columns log_q --columns rank
  logsteer generate - -n 4 < prompts.jsonl | logsteer diagnostics - > looked-at.jsonl

With -, a line is a text in quotation marks (jq -R . makes them of plain lines), or an object with a
prompt, prompt_ids or messages; --field names another field than prompt. For each, a line is printed
when its batch is done (--batch-size): the object, with its prompt_ids and completions. A batch that
is refused is halved, so that what stands in front of the line that it is refused for is printed.
"""

_SAMPLING = {
    "max_tokens": "N", "n": "N", "temperature": "T", "top_p": "P", "top_k": "K", "min_p": "P",
    "seed": "N", "stop": "TEXT", "include_stop": None, "ignore_eos": None, "bos": None,
    "on_overflow": None,
}  # fmt: skip
_DIAGNOSTICS = {"diagnostics": None, "columns": "NAME", "window": "TOKENS"}
_MESSAGES, _IDS = "messages", "prompt_ids"


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer generate`."""
    add_examples(parser, EXAMPLES)
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="+", help="a text to continue; - reads JSON lines"
    )
    parser.add_argument(
        "--field", default="prompt", metavar="NAME",
        help="of a JSON line: what holds its prompt; default prompt",
    )  # fmt: skip
    add_batch_option(parser)
    group = parser.add_argument_group("sampling")
    add_options(group, "generate", _SAMPLING, short={"n": "-n"})
    group.add_argument(
        "--chat", action="store_true", help="PROMPT is a user's message, for the chat template"
    )
    add_options(parser.add_argument_group("diagnostics"), "generate", _DIAGNOSTICS)
    add_steering_options(parser)
    add_probe_option(parser)
    add_output_options(parser, GenerateAnswer, plot=True)
    parser.set_defaults(command=_generate)


def _generate(client: Client, arguments: argparse.Namespace) -> None:
    own = given(arguments, *_SAMPLING, *_DIAGNOSTICS, "probes")
    options: Any = {**own, **read_changes(arguments)}
    prompts: list[str] = arguments.prompts
    if STDIN in prompts:
        if prompts != [STDIN] or arguments.chat:
            arguments.refuse("- stands alone: its lines are the prompts, or have messages")
        if arguments.plot:
            arguments.refuse("--plot draws the PROMPTs of arguments, not the lines of -")
        _generate_lines(client, arguments, options)
        return
    form: dict[str, Any] = {"prompts": prompts}
    if arguments.chat:
        if len(prompts) > 1:
            arguments.refuse("--chat takes one PROMPT: a request has one conversation")
        form = {"prompts": None, "messages": [{"role": "user", "content": prompts[0]}]}
    plain = not given(arguments, *_DIAGNOSTICS)
    if plain and len(prompts) == 1 and (arguments.n or 1) == 1 and not wants_json(arguments):
        console = TerminalConsole()
        with closing(client.generate_events(**form, **options)) as events:
            answer = stream_one(events, console, "" if arguments.chat else prompts[0])
        drawn = continuations.draw_end(answer.results[0].completions[0])
        show(arguments, answer, *drawn, *tables.draw_changes(answer))
        return
    answer = client.generate(**form, **options)
    drawn = continuations.draw_generated(prompts, answer)
    show(arguments, answer, *drawn, *tables.draw_changes(answer))


def _generate_lines(
    client: Client, arguments: argparse.Namespace, options: Mapping[str, Any]
) -> None:
    """Continue the prompts of the lines; those that a seed is given for are all independent."""
    field: str = arguments.field
    count = 0

    def ask(rows: Sequence[Row]) -> Sequence[PromptCompletions]:
        nonlocal count
        own = dict(options)
        if "seed" in own:
            own["seed"] += count * own.get("n", 1)
        answer = client.generate(**_read_form(rows, field), **own)
        count += len(rows)
        return answer.results

    def kind(numbered: NumberedRow) -> int:
        number, row = numbered
        # A request has one conversation.
        return number if _MESSAGES in row else -int(_IDS in row)

    example = json.dumps({field: "Once upon a time"})
    form = f'a text in quotation marks, "Once upon a time", or an object, {example}'
    answered = AnsweredLines(arguments, None)
    answer_rows(read_rows(form, field), arguments.batch_size, ask, answered, kind)


def _read_form(rows: Sequence[Row], field: str) -> dict[str, Any]:
    """Return the prompts of these lines, all of one kind, as arguments of `generate`."""
    if _MESSAGES in rows[0]:
        return {"prompts": None, "messages": rows[0][_MESSAGES]}
    if _IDS in rows[0]:
        return {"prompts": None, "prompt_ids": [row[_IDS] for row in rows]}
    for row in rows:
        if not isinstance(row.get(field), str):
            raise UnusableRowError(
                f"no text under {field!r}, only {', '.join(row) or 'nothing'}; name one by --field"
            )
    return {"prompts": [row[field] for row in rows]}

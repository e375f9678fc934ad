"""`logsteer chat`: a conversation, under steering that changes as one talks."""

import argparse
from contextlib import closing
from typing import Any

from logsteer.cli.continuations import stream_one
from logsteer.cli.options import add_options
from logsteer.cli.steering_options import add_steering_options, read_changes
from logsteer.cli.terminal import TerminalConsole, add_examples, given
from logsteer.client import Client
from logsteer.errors import APIError

EXAMPLES = """
  echo "What is the capital of France?" | logsteer chat
  echo "Tell me a story." | logsteer chat --vector mood:2 --max-tokens 40
  echo "Tell me a story." | logsteer chat --system "Be brief." --vector mood:2

Each line is a turn, except these:
  /steer mood:4 calm@3   steer from now on; no vector: steer no more
  /new                   begin a new conversation
"""
_SAMPLING = {
    "max_tokens": "N", "temperature": "T", "top_p": "P", "top_k": "K", "seed": "N",
    "chat_template_kwargs": "JSON",
}  # fmt: skip


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer chat`."""
    add_examples(parser, EXAMPLES)
    add_options(parser, "generate", _SAMPLING)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_steering_options(parser)
    parser.set_defaults(command=_chat)


def _chat(client: Client, arguments: argparse.Namespace) -> None:
    """Answer each line of standard input; a refusal takes back its turn, and is told."""
    options: Any = {"max_tokens": 256, **given(arguments, *_SAMPLING), **read_changes(arguments)}
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

"""`logsteer selftest`: whether a model keeps what the service promises, as a table."""

import argparse
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from logsteer._endpoints import SelftestEvent
from logsteer.cli import tables
from logsteer.cli.options import add_options
from logsteer.cli.output import add_output_options, show
from logsteer.cli.terminal import add_examples, given
from logsteer.client import Client
from logsteer.errors import LogsteerError
from logsteer.schemas import SelftestAnswer, SelftestCheck

EXAMPLES = """
  logsteer selftest demo
  logsteer selftest demo --format csv
"""
_OPTIONS = {"against": "ID"}


def add_selftest(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer selftest`."""
    add_examples(parser, EXAMPLES)
    parser.add_argument("tested", metavar="MODEL")
    add_options(parser, "selftest", _OPTIONS)
    add_output_options(parser, SelftestAnswer)
    parser.set_defaults(command=_selftest)


def _selftest(client: Client, arguments: argparse.Namespace) -> None:
    """Print the table; raise LogsteerError, which is exit status 1, where a check has failed."""
    options: Mapping[str, Any] = given(arguments, *_OPTIONS)
    with closing(client.selftest_events(arguments.tested, **options)) as events:
        answer = _watch(events)
    model = answer.provenance
    note = (
        f"Differences in nats a token; noise floor {answer.checks[0].noise_floor:.1e}. "
        f"{answer.model}: {model.engine} {model.engine_version} in {model.dtype}, "
        f"{answer.num_texts} texts of {answer.num_tokens} tokens, {answer.seconds:.0f} s."
    )
    show(arguments, answer, tables.draw_checks(answer.checks), Text(note, "dim"))
    failed = [check.name for check in answer.checks if check.verdict == "failed"]
    if answer.verdict == "failed":
        raise LogsteerError(f"{answer.model} failed its self-test: {', '.join(failed)}")


def _watch(events: Generator[SelftestEvent, None, None]) -> SelftestAnswer:
    """Return the answer; on a terminal the table grows on stderr, cleared at the end."""
    checks: list[SelftestCheck] = []
    console = Console(stderr=True)
    with Live(console=console, transient=True, auto_refresh=False) as live:
        for event in events:
            if isinstance(event, SelftestAnswer):
                return event
            if isinstance(event, SelftestCheck) and console.is_terminal:
                checks.append(event)
                live.update(tables.draw_checks(checks), refresh=True)
    raise AssertionError("a stream ends with its result or raises")

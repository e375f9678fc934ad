"""Continuations on a terminal, as they are generated."""

from collections.abc import Generator
from typing import TypeVar

from rich.console import Console
from rich.live import Live

from logsteer.cli import tables
from logsteer.schemas import GenerateAnswer, SteerAnswer, SteerPiece, SteerStart

A = TypeVar("A", SteerAnswer, GenerateAnswer)


def stream_one(
    events: Generator[SteerStart | SteerPiece | A, None, None], console: Console, prompt: str
) -> A:
    """Return the answer; print the prompt and its completion as pieces come."""
    shown = False
    try:
        for event in events:
            if isinstance(event, SteerAnswer | GenerateAnswer):
                return event
            if not shown:
                # The prompt waits for the first event, so that a refusal stands alone.
                console.out(tables.escape_controls(prompt), style="dim", end="", highlight=False)
                shown = True
            if isinstance(event, SteerPiece):
                console.out(tables.escape_controls(event.text), end="", highlight=False)
    finally:
        if shown:
            console.out("", highlight=False)
    raise AssertionError("a stream ends with its result or raises")


def stream_side_by_side(
    events: Generator[SteerStart | SteerPiece | A, None, None], console: Console, baseline: bool
) -> A:
    """Return the answer; on a terminal the completions grow in a table, cleared at the end."""
    texts: dict[tuple[int, bool], str] = {}
    sides = [True, False] if baseline else [True]
    heads = ["steered", "unsteered"][: len(sides)]
    with Live(console=console, transient=True, auto_refresh=False) as live:
        for event in events:
            if isinstance(event, SteerAnswer | GenerateAnswer):
                return event
            if isinstance(event, SteerPiece) and console.is_terminal:
                key = event.completion, event.steered
                texts[key] = texts.get(key, "") + event.text
                count = 1 + max(index for index, _ in texts)
                rows = [[(texts.get((n, side), ""), "") for side in sides] for n in range(count)]
                live.update(tables.draw_side_by_side(heads, rows), refresh=True)
    raise AssertionError("a stream ends with its result or raises")

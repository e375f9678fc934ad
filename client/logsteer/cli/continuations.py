"""Continuations on a terminal, as they are generated."""

import math
from collections.abc import Generator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from logsteer.cli import tables
from logsteer.cli.heat import choose_style, colour_completion, has_colours
from logsteer.schemas import (
    Completion,
    GenerateAnswer,
    PromptCompletions,
    SteerAnswer,
    SteerPiece,
    SteerStart,
)
from logsteer.schemas.common import Float

A = TypeVar("A", SteerAnswer, GenerateAnswer)


def stream_one(
    events: Generator[SteerStart | SteerPiece | A, None, None], console: Console, prompt: str
) -> A:
    """Return the answer; print the prompt and its completion as pieces come.

    A piece has the colour of its tokens' mean surprisal where the console shows colours.
    """
    shown, in_colours = False, has_colours(console)
    try:
        for event in events:
            if isinstance(event, SteerAnswer | GenerateAnswer):
                return event
            if not shown:
                # The prompt waits for the first event, so that a refusal stands alone.
                console.out(tables.escape_controls(prompt), style="dim", end="", highlight=False)
                shown = True
            if isinstance(event, SteerPiece):
                style = choose_style(_average(event.logprobs)) if in_colours else ""
                console.out(
                    tables.escape_controls(event.text), style=style, end="", highlight=False
                )
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
                rows = [
                    [(Text(tables.escape_controls(texts.get((n, side), ""))), "") for side in sides]
                    for n in range(count)
                ]
                live.update(draw_side_by_side(heads, rows), refresh=True)
    raise AssertionError("a stream ends with its result or raises")


def draw_completions(result: PromptCompletions, head: str = "steered") -> Table:
    """Draw a row per completion, beside it the unsteered one with the same seed if asked for."""
    heads = [head] if result.baseline is None else [head, "unsteered"]
    columns = [result.completions, *([] if result.baseline is None else [result.baseline])]
    cells = [[(colour_completion(one), sum_up_completion(one)) for one in c] for c in columns]
    return draw_side_by_side(heads, list(zip(*cells, strict=True)))


def draw_side_by_side(heads: Sequence[str], rows: Sequence[Sequence[tuple[Text, str]]]) -> Table:
    """Draw texts in columns of equal width, a remark under each."""
    table = tables.start_table(*heads)
    table.show_lines = len(rows) > 1
    table.expand = True
    for column in table.columns:
        column.ratio = 1
    for row in rows:
        table.add_row(*(text.append(f"\n{note}", "dim") for text, note in row))
    return table


def sum_up_completion(completion: Completion) -> str:
    """Return one line about a completion."""
    return (
        f"{completion.num_tokens} tokens, {completion.finish_reason}, "
        f"logprob {tables.show_number(completion.logprob)}, seed {completion.seed}"
    )


def _average(logprobs: Sequence[Float]) -> Float:
    """Return the mean; 0, which has no colour, of none, as of the rest of a text."""
    if not logprobs:
        return 0.0
    found = [value for value in logprobs if value is not None]
    return math.fsum(found) / len(found) if len(found) == len(logprobs) else None

"""Continuations on a terminal: as they are generated, side by side, and what was read of them."""

from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from logsteer.cli.tables import draw_aggregates, draw_changes, draw_tokens, escape_controls
from logsteer.extras.labels import show_value
from logsteer.extras.rows import list_completions
from logsteer.schemas import (
    Completion,
    GenerateAnswer,
    PromptCompletions,
    SteerAnswer,
    SteerPiece,
    SteerStart,
)

A = TypeVar("A", SteerAnswer, GenerateAnswer)


def draw_generated(
    answer: SteerAnswer | GenerateAnswer, prompts: Sequence[str]
) -> Iterator[Table | Text]:
    """Draw a row per completion of each prompt, and under them what was read of each."""
    for number, result in enumerate(answer.results):
        if len(prompts) > 1:
            yield Text(repr(prompts[number]), "bold")
        yield _draw_completions(result, isinstance(answer, SteerAnswer))
        for which, completion in list_completions(result):
            if found := list(draw_read(completion)):
                name = {None: "", True: "steered ", False: "unsteered "}[which.get("steered")]
                yield Text(f"{name}completion {which['completion']}", "bold")
                yield from found
    yield from draw_changes(answer)


def draw_grown(answer: SteerAnswer | GenerateAnswer) -> Iterator[Table | Text]:
    """Draw how the one completion that was shown as it came has ended, and what was read of it."""
    (completion,) = answer.results[0].completions
    yield Text(_sum_up(completion), "dim")
    yield from draw_read(completion)
    yield from draw_changes(answer)


def draw_read(completion: Completion) -> Iterator[Table | Text]:
    """Draw a row per token of what was read beside the log-probabilities, and the aggregates."""
    read = (completion.columns, completion.ranks, completion.probes)
    if any(found is not None for found in read):
        yield draw_tokens(completion)
    if completion.aggregates is not None:
        yield draw_aggregates(completion.aggregates)


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
                console.out(escape_controls(prompt), style="dim", end="", highlight=False)
                shown = True
            if isinstance(event, SteerPiece):
                console.out(escape_controls(event.text), end="", highlight=False)
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
                live.update(_draw_side_by_side(heads, rows), refresh=True)
    raise AssertionError("a stream ends with its result or raises")


def _draw_completions(result: PromptCompletions, is_steered: bool) -> Table:
    """Draw a row per completion, beside it the unsteered one with the same seed if asked for."""
    columns = [result.completions, *([] if result.baseline is None else [result.baseline])]
    heads = ["steered" if is_steered else "continuation", "unsteered"][: len(columns)]
    cells = [[(one.text, _sum_up(one)) for one in column] for column in columns]
    return _draw_side_by_side(heads, list(zip(*cells, strict=True)))


def _draw_side_by_side(heads: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]]) -> Table:
    """Draw texts in columns, a remark under each."""
    table = Table(*heads, box=box.SIMPLE_HEAD, show_lines=len(rows) > 1)
    for row in rows:
        cells = ((Text(escape_controls(text)), f"\n{note}") for text, note in row)
        table.add_row(*(text.append(note, "dim") for text, note in cells))
    return table


def _sum_up(completion: Completion) -> str:
    """Return one line about a completion."""
    return (
        f"{completion.num_tokens} tokens, {completion.finish_reason}, "
        f"logprob {show_value(completion.logprob)}, seed {completion.seed}"
    )

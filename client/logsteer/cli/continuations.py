"""Continuations on a terminal as they are generated, and tables of what answers say of tokens."""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from logsteer.cli import tables
from logsteer.cli.heat import choose_style, colour_completion, has_colours
from logsteer.cli.tables import draw_rows, show_number
from logsteer.extras.rows import name_columns
from logsteer.schemas import (
    Completion,
    GenerateAnswer,
    GradientAnswer,
    ItemScore,
    PromptCompletions,
    SteerAnswer,
    SteerPiece,
    SteerStart,
    TargetGradient,
)
from logsteer.schemas.common import Aggregate, Float, RowColumns


def draw_diagnostics(result: ItemScore, with_tokens: bool) -> Iterator[Table | Text]:
    """Draw what was read of each target: a row for each token if wanted, and the aggregates."""
    for target in result.targets:
        yield Text(
            f"{target.target!r}: logprob {show_number(target.logprob)}, perplexity "
            f"{show_number(target.perplexity)}, {target.num_tokens} tokens",
            "bold",
        )
        if with_tokens or target.probes is not None:
            yield draw_token_columns(target.tokens or [], target.logprobs or [], target)
        if target.aggregates is not None:
            yield draw_aggregates(target.aggregates)


def draw_token_columns(
    tokens: Sequence[str], logprobs: Sequence[Float], found: RowColumns
) -> Table:
    """Draw a row per token of a sequence, a column for each that was read."""
    columns = name_columns(logprobs, found, between="\n")
    rows = zip(tokens, *columns.values(), strict=True)
    table = draw_rows(
        ["token", *(f">{name}" for name in columns)],
        ([repr(token), *map(show_number, values)] for token, *values in rows),
    )
    for column in table.columns:
        column.overflow = "fold"  # a name that is cut off may be another's, too
    return table


def draw_end(completion: Completion) -> Iterator[Table | Text]:
    """Draw how a completion that was shown as it came has ended, and what probes have read."""
    yield Text(sum_up_completion(completion), "dim")
    if completion.probes is not None:
        yield draw_token_columns(completion.tokens, completion.logprobs, completion)


def draw_aggregates(aggregates: Mapping[str, Aggregate]) -> Table:
    """Draw a row per column of a sequence."""
    return draw_rows(
        ["over the tokens", ">mean", ">min", ">max", ">early", ">late", ">sum"],
        (
            [name, *map(show_number, [one.mean, one.min, one.max, one.early, one.late, one.sum])]
            for name, one in aggregates.items()
        ),
    )


def draw_gradients(answer: GradientAnswer) -> Iterator[Table | Text]:
    """Draw a row per position of each target, its gradients' norms; or a row per target."""
    targets = [target for item in answer.results for target in item.targets]
    if answer.along is not None:
        yield Text(f"along {answer.along.name} ({answer.along.sha256[:12]})")
        rows = []
        for one in targets:
            numbers = [show_number(one.logprob), show_number(one.directional)]
            rows.append([repr(one.target), *numbers, str(len(one.token_ids))])
        yield draw_rows(["target", ">logprob", ">d logprob / d eta", ">tokens"], rows)
        return
    for target in targets:
        yield Text(f"{target.target!r}: logprob {show_number(target.logprob)}", "bold")
        yield _draw_norms(target)


def _draw_norms(target: TargetGradient) -> Table:
    norms = target.norms or {}
    rows = []
    for position, *values in zip(target.positions or [], *norms.values(), strict=True):
        part = "context" if position < target.num_context else "target"
        rows.append([str(position), part, *map(show_number, values)])
    return draw_rows([">position", "part", *(f">norm at layer {layer}" for layer in norms)], rows)


def draw_generated(prompts: Sequence[str], answer: GenerateAnswer) -> Iterator[Table | Text]:
    """Draw a row per completion of each prompt, and under them what was read of each."""
    for prompt, result in zip(prompts, answer.results, strict=True):
        yield Text(repr(prompt), "bold")
        yield draw_completions(result, "continuation")
        for completion in result.completions:
            if any(
                x is not None for x in (completion.columns, completion.ranks, completion.probes)
            ):
                yield draw_token_columns(completion.tokens, completion.logprobs, completion)
            if completion.aggregates is not None:
                yield draw_aggregates(completion.aggregates)


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

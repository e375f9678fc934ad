"""Answers as notebooks show them: tables, heat maps of tokens, receipts.

A page is bounded: the first tokens, rows and sequences of an answer, and a line that says how many
more there are.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from logsteer.errors import LogsteerError
from logsteer.extras.labels import describe_card, describe_changes, describe_receipt
from logsteer.extras.markup import (
    PARTS_SHOWN,
    TOKENS_SHOWN,
    show_value,
    write_box,
    write_head,
    write_heat,
    write_legend,
    write_note,
    write_rest,
    write_table,
)
from logsteer.extras.rows import list_grains, list_rows, name_columns
from logsteer.extras.strips import Strip, list_strips
from logsteer.schemas import SteeringReceipt, TrainAnswer, VectorCard
from logsteer.schemas.common import Float
from logsteer.schemas.interventions import AppliedParameters

Parts: TypeAlias = Iterator[str]
_PROBES_SHOWN = 2
"""Readings that are drawn along the tokens."""
_COLUMNS_SHOWN = 24
"""Columns and readings in a token's title."""


def write_html(answer: Any) -> str:
    """Return an answer as HTML that stands for itself.

    It has a table for each grain of its rows but tokens, which are drawn as heat maps.
    """
    return write_box([*_draw_tables(answer), *_draw_strips(answer), *_tell(answer)])


def _draw_tables(answer: Any) -> Parts:
    for grain in list_grains(type(answer)):
        if grain == "token":
            continue
        try:
            rows = list_rows(answer, grain)
        except LogsteerError:  # the answer was not asked for them
            continue
        told = {name for row in rows for name, value in row.items() if value not in (None, "")}
        yield write_table([{name: row[name] for name in row if name in told} for row in rows])


def _draw_strips(answer: Any) -> Parts:
    """Yield a heat map of surprisal for each sequence, and one of what its first probes read."""
    strips, room = list_strips(answer), TOKENS_SHOWN
    for strip in strips[:PARTS_SHOWN]:
        if len(strips) > 1 and strip.title:
            yield write_head(show_value(strip.title))
        count = min(room, len(strip.tokens))
        room -= count
        yield from _draw_strip(strip, count)
        yield write_rest(len(strip.tokens) - count, "tokens")
    yield write_rest(len(strips) - PARTS_SHOWN, "sequences")
    if strips:
        yield write_legend()


def _draw_strip(strip: Strip, count: int) -> Parts:
    columns = {**strip.places, **name_columns(None, strip.found)}
    shown = dict(list(columns.items())[:_COLUMNS_SHOWN])
    tokens, logprobs = strip.tokens[:count], strip.logprobs[:count]
    titles = [
        _title(token, logprobs[place], {name: values[place] for name, values in shown.items()})
        for place, token in enumerate(tokens)
    ]
    yield write_heat(tokens, [None if value is None else -value for value in logprobs], titles)
    for probe in (strip.found.probes or [])[:_PROBES_SHOWN]:
        values = (probe.before if probe.after is None else probe.after)[:count]
        sizes = [abs(value) for value in values if value is not None and math.isfinite(value)]
        if signed := max(sizes, default=0.0):
            yield write_legend(signed, f"{probe.name or 'probe'} at layer {probe.layer}")
            yield write_heat(tokens, values, titles, signed=signed)


def _title(token: str, logprob: Float, columns: Mapping[str, Any]) -> str:
    told = {"probability": None if logprob is None else math.exp(min(logprob, 0.0))}
    told |= {"surprisal": None if logprob is None else -logprob, **columns}
    return "\n".join([repr(token), *(f"{name} {show_value(v)}" for name, v in told.items())])


def _tell(answer: Any) -> Parts:
    """Yield what an answer was computed under, and what is known of a vector."""
    lines: list[str] = []
    if isinstance(answer, AppliedParameters):
        lines += describe_changes(answer)
        if receipt := getattr(answer, "steering", None):
            yield write_table(list_rows(receipt))
    elif isinstance(answer, SteeringReceipt):
        lines.append(describe_receipt(answer))
    card = answer.vector if isinstance(answer, TrainAnswer) else answer
    if isinstance(card, VectorCard):
        lines += [line for line, _ in describe_card(card)]
    if isinstance(answer, TrainAnswer):
        near = [
            {"layer": layer, "nearest": one.name, "cosine": one.cosine}
            for layer, found in answer.similar.layers.items()
            for one in found
        ]
        yield write_table(near) if near else ""
    yield from map(write_note, lines)

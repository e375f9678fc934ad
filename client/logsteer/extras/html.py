"""Answers as notebooks show them: tables, heat maps of tokens, receipts.

A page is bounded: the first tokens, rows and sequences of an answer, and a line that says how many
more there are.
"""

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from logsteer.errors import LogsteerError
from logsteer.extras.labels import describe_card, describe_changes, describe_receipt
from logsteer.extras.rows import list_grains, list_rows, name_columns
from logsteer.extras.strips import Strip, list_strips
from logsteer.schemas import SteeringReceipt, TrainAnswer, VectorCard
from logsteer.schemas.common import Float
from logsteer.schemas.interventions import AppliedParameters

TOKENS_SHOWN = 600
"""Tokens of one answer."""
ROWS_SHOWN = 40
PARTS_SHOWN = 12
"""Items, texts or completions of one answer."""
_LETTERS_SHOWN = 120
"""Letters of one token or name."""
_MOST = 10.0
"""Surprisal at which the colour is the strongest, in nats."""
_STRONGEST = 0.6

_BOX = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;max-width:60em"
_DIM = "opacity:.7"
_CELL = "padding:1px 10px 1px 0;text-align:{};white-space:nowrap;font-variant-numeric:tabular-nums"
_EDGE = "border-right:1px solid #8885"
_HEAT = "margin:.2em 0;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7"


def write_box(parts: Iterable[str]) -> str:
    """Return the parts below one another."""
    return f'<div style="{_BOX}">{"".join(parts)}</div>'


def write_text(text: str, style: str = "") -> str:
    """Return a line of text."""
    return f'<div style="{style}">{escape(text)}</div>' if style else f"<div>{escape(text)}</div>"


def write_note(text: str) -> str:
    """Return a line that stands back."""
    return write_text(text, _DIM)


def write_head(text: str) -> str:
    """Return a line that stands over others."""
    return write_text(text, "font-weight:600;margin-top:.5em")


def write_table(rows: Sequence[Mapping[str, Any]], shown: int = ROWS_SHOWN) -> str:
    """Return the rows as a table, numbers on the right; a line says how many are not shown."""
    if not rows:
        return write_note("no rows")
    names = list(dict.fromkeys(name for row in rows[:shown] for name in row))
    right = {name for name in names if any(_is_number(row.get(name)) for row in rows[:shown])}

    def cell(tag: str, name: str, text: str) -> str:
        return f'<{tag} style="{_CELL.format("right" if name in right else "left")}">{text}</{tag}>'

    head = "".join(cell("th", name, escape(name)) for name in names)
    lines = (
        "".join(cell("td", name, escape(show_value(row.get(name)))) for name in names)
        for row in rows[:shown]
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f'<table style="border-collapse:collapse"><tr>{head}</tr>{body}</table>'
    return f'<div style="overflow-x:auto">{table}</div>' + write_rest(len(rows) - shown, "rows")


def write_rest(count: int, noun: str) -> str:
    """Return a line that says how many more there are; nothing where there are none."""
    return write_note(f"… and {count:,} more {noun}; to_pandas() has all") if count > 0 else ""


def write_heat(
    tokens: Sequence[str], values: Sequence[Float], titles: Sequence[str], *, signed: float = 0.0
) -> str:
    """Return the tokens on a background as strong as their value; a title shows under a pointer.

    `signed` 0: values are surprisals in nats. Else it is the largest size of values of both signs,
    blue above 0 and orange below.
    """
    spans = []
    for token, value, title in zip(tokens, values, titles, strict=True):
        style, shown = f"{_EDGE};background:{_colour(value, signed)}", _show_token(token)
        spans.append(f'<span style="{style}" title="{escape(title)}">{shown}</span>')
    return f'<div style="{_HEAT}">{"".join(spans)}</div>'


def write_legend(signed: float = 0.0, name: str = "") -> str:
    """Return what the colours of `write_heat` stand for."""
    low, high = ("0", f"{_MOST:g} nats or more")
    if signed:
        low, high = f"{-signed:.3g}", f"{signed:.3g}"
    stops = [_colour(value, signed) for value in ((-signed, 0.0, signed) if signed else (0, _MOST))]
    ramp = f"background:linear-gradient(to right,{','.join(stops)})"
    bar = f'<span style="display:inline-block;width:9em;height:.8em;margin:0 .5em;{ramp}"></span>'
    label = escape(name or "surprisal")
    return f'<div style="{_DIM}">{label}: {low}{bar}{high}; point at a token for more</div>'


def show_value(value: Any) -> str:
    """Return a number with five digits, another value as text, cut where it is long."""
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    text = str(value)
    return text if len(text) <= _LETTERS_SHOWN else text[:_LETTERS_SHOWN] + "…"


def escape(text: str) -> str:
    """Return the text as HTML shows it, control characters and lone surrogates written out."""
    seen = "".join(
        letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1]
        for letter in text
    )
    return html.escape(seen)


def _show_token(token: str) -> str:
    cut = show_value(token)
    return escape(cut.replace("\n", "↵\n")) if cut else "∅"


def _colour(value: Float, signed: float) -> str:
    if value is None or not math.isfinite(value):
        return "rgba(128,128,128,.35)"
    if not signed:
        return f"rgba(222,84,30,{_STRONGEST * min(max(value, 0.0) / _MOST, 1.0):.3f})"
    colour = "31,111,180" if value > 0 else "222,84,30"
    return f"rgba({colour},{_STRONGEST * min(abs(value) / signed, 1.0):.3f})"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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

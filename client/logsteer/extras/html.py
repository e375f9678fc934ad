"""Answers as notebooks show them: their rows as tables, and rows of tokens as heat maps.

A page is bounded: the first tokens, rows and sequences of an answer, and a line that says how many
more there are.
"""

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from logsteer.extras.labels import (
    describe_card,
    describe_changes,
    describe_receipt,
    is_number,
    pick_told,
    show_value,
)
from logsteer.extras.rows import FlatRow, find_rows, list_grains, list_rows
from logsteer.schemas import SteeringReceipt, TrainAnswer, VectorCard
from logsteer.schemas.interventions import AppliedParameters

TOKENS_SHOWN = 600
"""Tokens of one answer."""
ROWS_SHOWN = 40
PARTS_SHOWN = 12
"""Items, texts or completions of one answer."""
_LETTERS_SHOWN = 120
"""Letters of one token or name."""
_COLUMNS_SHOWN = 24
"""Columns and readings in a token's title."""
_PROBES_SHOWN = 2
"""Readings that are drawn along the tokens."""
_MOST = 10.0
"""Surprisal at which the colour is the strongest, in nats."""
_STRONGEST = 0.6
_FRONT = "⋯"
"""Stands for a token in front, of which an answer has readings alone."""

_BOX = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;max-width:60em"
_DIM = "opacity:.7"
_HEAD = "font-weight:600;margin-top:.5em"
_CELL = "padding:1px 10px 1px 0;text-align:{};white-space:nowrap;font-variant-numeric:tabular-nums"
_EDGE = "border-right:1px solid #8885"
_HEAT = "margin:.2em 0;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7"


def write_html(answer: Any) -> str:
    """Return an answer as HTML that stands for itself.

    It has a table for each grain of its rows but tokens, which are drawn as heat maps.
    """
    parts = [*_draw_tables(answer), *_draw_sequences(answer), *_tell(answer)]
    return f'<div style="{_BOX}">{"".join(parts)}</div>'


def write_text(text: str, style: str = _DIM) -> str:
    """Return a line of text, which stands back."""
    return f'<div style="{style}">{escape(text)}</div>'


def write_table(rows: Sequence[Mapping[str, Any]], shown: int = ROWS_SHOWN) -> str:
    """Return the rows as a table, numbers on the right; a line says how many are not shown."""
    if not rows:
        return write_text("no rows")
    names = list(dict.fromkeys(name for row in rows[:shown] for name in row))
    right = {name for name in names if any(is_number(row.get(name)) for row in rows[:shown])}

    def cell(tag: str, name: str, text: str) -> str:
        return f'<{tag} style="{_CELL.format("right" if name in right else "left")}">{text}</{tag}>'

    head = "".join(cell("th", name, escape(name)) for name in names)
    lines = (
        "".join(cell("td", name, escape(_cut(row.get(name)))) for name in names)
        for row in rows[:shown]
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f'<table style="border-collapse:collapse"><tr>{head}</tr>{body}</table>'
    return f'<div style="overflow-x:auto">{table}</div>' + _write_rest(len(rows) - shown, "rows")


def escape(text: str) -> str:
    """Return the text as HTML shows it, control characters and lone surrogates written out."""
    seen = "".join(
        letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1]
        for letter in text
    )
    return html.escape(seen)


def _write_rest(count: int, noun: str) -> str:
    return write_text(f"… and {count:,} more {noun}; to_pandas() has all") if count > 0 else ""


def _cut(value: Any) -> str:
    text = show_value(value)
    return text if len(text) <= _LETTERS_SHOWN else text[:_LETTERS_SHOWN] + "…"


def _draw_tables(answer: Any) -> Iterator[str]:
    for grain in list_grains(type(answer)):
        if grain != "token" and (rows := find_rows(answer, grain)) is not None:
            yield write_table(pick_told(rows))


def _draw_sequences(answer: Any) -> Iterator[str]:
    """Yield heat maps of each sequence of tokens: surprisal, and what its first probes read."""
    rows = find_rows(answer, "token")
    if rows is None:
        return
    told = next((name for name in ("logprob", "attribution") if any(name in r for r in rows)), None)
    if told is None:
        yield write_table(rows)
        return
    parts = _cut_sequences(rows)
    room = TOKENS_SHOWN
    for title, part in parts[:PARTS_SHOWN]:
        if len(parts) > 1:
            yield write_text(_cut(title), _HEAD)
        shown = part[: max(room, 0)]
        room -= len(part)
        yield from _draw_sequence(shown)
        yield _write_rest(len(part) - len(shown), "tokens")
    yield _write_rest(len(parts) - PARTS_SHOWN, "sequences")
    if told == "logprob":
        yield _write_legend("surprisal", 0.0)


def _cut_sequences(rows: Iterable[FlatRow]) -> list[tuple[str, list[FlatRow]]]:
    """Return the rows of each sequence, and which one it is: what stands in front of a place."""
    parts: list[tuple[str, list[FlatRow]]] = []
    last = 0
    for row in rows:
        names = list(row)
        name = "place" if "place" in row else "position"
        front = names[: names.index(name)]
        title = ", ".join(f"{name} {row[name]!r}" for name in front)
        if not parts or parts[-1][0] != title or row[name] <= last:
            parts.append((title, []))
        parts[-1][1].append(row)
        last = row[name]
    return parts


def _draw_sequence(rows: Sequence[FlatRow]) -> Iterator[str]:
    if rows and "attribution" in rows[0]:
        yield from _draw_values(rows, "attribution", [_list_row(row) for row in rows])
        return
    titles = [_describe_token(row) for row in rows]
    logprobs = [row.get("logprob") for row in rows]
    surprisals = [None if logprob is None else -logprob for logprob in logprobs]
    yield _write_heat(rows, surprisals, titles)
    readings = [name for row in rows[:1] for name in row if "@" in name and ": " in name]
    for name in readings[:_PROBES_SHOWN]:
        yield from _draw_values(rows, name, titles)


def _draw_values(rows: Sequence[FlatRow], name: str, titles: Sequence[str]) -> Iterator[str]:
    """Yield the tokens coloured by values of both signs."""
    values = [row[name] for row in rows]
    if most := max((abs(v) for v in values if v is not None and math.isfinite(v)), default=0):
        yield _write_legend(name, most)
        yield _write_heat(rows, values, titles, most)


def _describe_token(row: FlatRow) -> str:
    logprob = row.get("logprob")
    told = {"probability": None if logprob is None else math.exp(min(logprob, 0.0))}
    told |= {"surprisal": None if logprob is None else -logprob}
    told |= {name: value for name, value in row.items() if name not in ("token", "logprob")}
    return _list_row({"token": row.get("token"), **told})


def _list_row(row: FlatRow) -> str:
    told = [(name, value) for name, value in row.items() if name != "token"]
    lines = [f"{name} {_cut(value)}" for name, value in told[:_COLUMNS_SHOWN]]
    return "\n".join([repr(row.get("token")), *lines])


def _write_heat(
    rows: Sequence[FlatRow],
    values: Sequence[float | None],
    titles: Sequence[str],
    most: float = 0.0,
) -> str:
    """Return the tokens on a background as strong as their value; a title shows under a pointer.

    `most` 0: values are surprisals in nats. Else it is the largest size of values of both signs,
    orange above 0 and blue below, as on the server's page.
    """
    spans = []
    for row, value, title in zip(rows, values, titles, strict=True):
        token = row.get("token", f"{row.get('token_id')} ")
        shown = _FRONT if token is None else escape(_cut(token).replace("\n", "↵\n")) or "∅"
        style = f"{_EDGE};background:{_colour(value, most)}"
        spans.append(f'<span style="{style}" title="{escape(title)}">{shown}</span>')
    return f'<div style="{_HEAT}">{"".join(spans)}</div>'


def _write_legend(name: str, most: float) -> str:
    """Return what the colours of `_write_heat` stand for."""
    low, high = (f"{-most:.3g}", f"{most:.3g}") if most else ("0", f"{_MOST:g} nats or more")
    stops = [_colour(value, most) for value in ((-most, 0.0, most) if most else (0.0, _MOST))]
    ramp = f"background:linear-gradient(to right,{','.join(stops)})"
    bar = f'<span style="display:inline-block;width:9em;height:.8em;margin:0 .5em;{ramp}"></span>'
    return f'<div style="{_DIM}">{escape(name)}: {low}{bar}{high}; point at a token for more</div>'


def _colour(value: float | None, most: float) -> str:
    if value is None or not math.isfinite(value):
        return "rgba(128,128,128,.35)"
    if not most:
        return f"rgba(222,84,30,{_STRONGEST * min(max(value, 0.0) / _MOST, 1.0):.3f})"
    colour = "222,84,30" if value > 0 else "31,111,180"
    return f"rgba({colour},{_STRONGEST * min(abs(value) / most, 1.0):.3f})"


def _tell(answer: Any) -> Iterator[str]:
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
    yield from map(write_text, lines)

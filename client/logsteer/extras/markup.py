"""Pieces of HTML for notebooks: escaped, with inline styles alone, in any theme.

Text keeps the notebook's own colour and backgrounds let what is under them through, so that light
and dark pages both read. No script, no style sheet, nothing from elsewhere; all sizes are bounded.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from logsteer.schemas.common import Float

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

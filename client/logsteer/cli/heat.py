"""Colours and curves for a terminal: tokens by surprisal, sparklines.

They appear on a terminal alone; without colours, as NO_COLOR asks for, tokens are not drawn.
"""

import math
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from logsteer.cli.tables import escape_controls, show_number
from logsteer.extras.labels import SweepLabels, label_layers
from logsteer.schemas import Completion, ItemScore, SweepAnswer, SweepPoint, TargetScore
from logsteer.schemas.common import Float

_STEPS = ((0.5, "#5c4a1c"), (2.0, "#8a5310"), (4.0, "#b5420f"), (7.0, "#d0211c"))
"""From so many nats of surprisal on, white on this colour: readable on light and dark terminals."""
_TOKENS_SHOWN = 400
_CURVES_SHOWN = 16
_WIDEST = 72
_STRETCHED = 20
"""Curves of fewer points are drawn about as wide."""
_BLOCKS = "▁▂▃▄▅▆▇█"


def has_colours(console: Console) -> bool:
    """Return whether the console is a terminal that shows colours."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def choose_style(logprob: Float) -> str:
    """Return the style of a token: the more surprising, the stronger; "" where it is expected."""
    if logprob is None or not math.isfinite(logprob):
        return "#ffffff on #6b6b6b"
    reached = [colour for limit, colour in _STEPS if -logprob >= limit]
    return f"#ffffff on {reached[-1]}" if reached else ""


def colour_tokens(tokens: Sequence[str], logprobs: Sequence[Float]) -> Text:
    """Return the tokens as one text, each in the style of its surprisal."""
    text = Text()
    for token, logprob in zip(tokens, logprobs, strict=True):
        text.append(escape_controls(token), choose_style(logprob))
    return text


def colour_completion(completion: Completion) -> Text:
    """Return a completion's text, in colours where its tokens make it up."""
    if "".join(completion.tokens) != completion.text:
        return Text(escape_controls(completion.text))
    return colour_tokens(completion.tokens, completion.logprobs)


class HeatMap:
    """Tokens in the colours of their surprisal under what they mean; nothing without colours."""

    def __init__(self, sequences: Sequence[tuple[Sequence[str], Sequence[Float]]]) -> None:
        self._sequences = [one for one in sequences if one[0]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the legend, and each sequence on lines of its own."""
        if not self._sequences or not has_colours(console):
            return
        yield _draw_legend()
        for tokens, logprobs in self._sequences:
            seen = [token.replace("\n", "↵\n") for token in tokens[:_TOKENS_SHOWN]]
            text = colour_tokens(seen, logprobs[:_TOKENS_SHOWN])
            if len(tokens) > _TOKENS_SHOWN:
                text.append(f"\n… and {len(tokens) - _TOKENS_SHOWN} more tokens", "dim")
            yield text
        yield Text()


def draw_targets(item: ItemScore) -> HeatMap:
    """Draw the tokens of each target that has more than one."""
    return HeatMap([(one.tokens or [], one.logprobs or []) for one in _list_long(item)])


def _list_long(item: ItemScore) -> Iterator[TargetScore]:
    return (one for one in item.targets if one.num_tokens > 1 and one.tokens and one.logprobs)


def _draw_legend() -> Text:
    text = Text("surprisal in nats: ", "dim")
    for limit, colour in _STEPS:
        text.append(f" {limit:g}+ ", f"#ffffff on {colour}").append(" ")
    return text


class Sparklines:
    """A curve of each series of numbers in one line of blocks, beside its name; for terminals."""

    def __init__(self, title: str, curves: Sequence[tuple[str, Sequence[Float]]]) -> None:
        self._title = title
        self._curves = [one for one in curves if len(one[1]) > 1][:_CURVES_SHOWN]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a row a curve: its name, the curve, and its least and greatest value."""
        if not self._curves or not console.is_terminal:
            return
        yield Text(self._title, "dim")
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(overflow="fold", max_width=max(12, options.max_width // 3))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        longest = min(max(len(name) for name, _ in self._curves), options.max_width // 3)
        room = max(8, min(_WIDEST, options.max_width - longest - 26))
        for name, values in self._curves:
            wide = [value for value in values for _ in range(max(1, _STRETCHED // len(values)))]
            table.add_row(Text(name), Text(draw_blocks(wide, room), "cyan"), _tell_range(values))
        yield table


def _tell_range(values: Sequence[Float]) -> RenderableType:
    found = [value for value in values if value is not None]
    if not found:
        return Text("n/a", "dim")
    return Text(f"{show_number(min(found), 3)} … {show_number(max(found), 3)}", "dim")


def draw_blocks(values: Sequence[Float], room: int = _WIDEST) -> str:
    """Return the values as blocks of their height, means of neighbours where there is no room.

    >>> draw_blocks([0.0, 1.0, None, 2.0])
    '▁▅ █'
    """
    count = min(room, len(values))
    cells = [_mean(values[len(values) * k // count : len(values) * (k + 1) // count])
             for k in range(count)]  # fmt: skip
    found = [cell for cell in cells if cell is not None]
    low, high = min(found, default=0.0), max(found, default=0.0)
    span = (high - low) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(
        " " if cell is None else _BLOCKS[round(top * (cell - low) / span)] for cell in cells
    )


def _mean(values: Sequence[Float]) -> Float:
    found = [value for value in values if value is not None]
    return math.fsum(found) / len(found) if found else None


def draw_sweep_curves(answer: SweepAnswer, labels: SweepLabels) -> Sparklines:
    """Draw each target's change and each text's perplexity over the scales, by sets of layers."""
    groups: dict[tuple[int, ...] | None, list[SweepPoint]] = {}
    for point in sorted(answer.points, key=lambda point: point.scale):
        key = None if point.layers is None else tuple(point.layers)
        groups.setdefault(key, []).append(point)
    curves: list[tuple[str, list[Float]]] = []
    for layers, points in groups.items():
        place = f" at {label_layers(layers)}" if len(groups) > 1 else ""
        for number, targets in enumerate(labels.targets):
            for index, name in enumerate(targets):
                changes = [point.items[number].targets[index].change for point in points]
                curves.append((f"change of {name}{place}", changes))
        for number, name in enumerate(labels.texts):
            values = [point.texts[number].perplexity for point in points]
            curves.append((f"perplexity of {name}{place}", values))
    scales = [point.scale for point in answer.points]
    return Sparklines(f"scales {min(scales):g} to {max(scales):g}", curves)

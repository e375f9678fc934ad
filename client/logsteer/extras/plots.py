"""Plots of answers, with matplotlib: `pip install "logsteer[plot]"`.

matplotlib is loaded at the first plot. No window opens and no backend is chosen: a figure is
written to a file, given back, or drawn into axes that the caller has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias

from logsteer.errors import LogsteerError
from logsteer.extras.dose_response import DosePoint, DoseResponse
from logsteer.extras.labels import ItemLike, SweepLabels, label_layers, label_sweep
from logsteer.schemas import SweepAnswer, SweepPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1f6fb4", "#d9541e", "#2f9e5b", "#8e5bb5", "#c2971a", "#4aa8b8", "#c04d7d", "#6b6b6b")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GREY = "#8a8a8a"
_DPI = 150


def prepare_figure(
    axes: Axes | Sequence[Axes] | None,
    count: int,
    title: str | None,
    *,
    width: float = 4.3,
    rows: int = 1,
) -> tuple[Figure, Sequence[Axes]]:
    """Return the figure, and its axes for the panels: `rows` of them, `width` inches each."""
    if axes is None:
        columns = -(-count // rows)
        size = (1.2 + width * columns, 1.0 + 3.0 * rows)
        figure = load_figure()(figsize=size, layout="constrained")
        # No backend is chosen, which is what would have a notebook show the figure.
        figure._repr_png_ = partial(_draw_png, figure)  # type: ignore[attr-defined]
        places = [one for row in figure.subplots(rows, columns, squeeze=False) for one in row]
        return figure, places
    places = list(axes) if isinstance(axes, Iterable) else [axes]
    if not 0 < len(places) <= count:
        raise ValueError(f"{len(places)} axes for {count} panels")
    found = places[0].get_figure(root=True)
    assert found is not None, "axes belong to a figure"
    if title is not None:
        found.suptitle(escape_formula(title))
    return found, places


def finish_figure(figure: Figure, title: str, path: str | Path | None) -> Figure:
    """Give a figure its title, write it where a path is given, and return it."""
    figure.suptitle(escape_formula(title), fontsize=12, x=0.01, ha="left")
    return save_figure(figure, path)


def save_figure(figure: Figure, path: str | Path | None) -> Figure:
    """Write a figure where a path is given, and return it."""
    if path is not None:
        figure.savefig(path, dpi=_DPI)
    return figure


def dress_axes(axes: Axes, title: str, unit: str, below: str) -> None:
    """Write what axes show over them, the unit beside them, and what runs along them below."""
    axes.set_title(escape_formula(title), fontsize=10.5, loc="left", pad=8)
    axes.set_ylabel(unit)
    axes.set_xlabel(below)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def check_plot_path(path: str | Path) -> None:
    """Check that a plot can be written there; else raise LogsteerError, which says what to do."""
    from_suffix = load_figure()(figsize=(1, 1)).canvas.get_supported_filetypes()
    if Path(path).suffix.lstrip(".").lower() not in from_suffix:
        raise LogsteerError(f"{path}: give a name that ends in .png, .svg or .pdf")
    if not Path(path).absolute().parent.is_dir():
        raise LogsteerError(f"{path}: there is no directory {Path(path).absolute().parent}")


def escape_formula(text: str) -> str:
    """Return the text as matplotlib shows it: a dollar sign would begin a formula."""
    return text.replace("$", r"\$")


def load_figure() -> type[Figure]:
    """Return matplotlib's class; LogsteerError that says what to install where it is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LogsteerError(
            'plots need matplotlib, which is not installed: pip install "logsteer[plot]"'
        ) from error
    return Figure


def _draw_png(figure: Figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png", dpi=96)
    return file.getvalue()


LayerSet: TypeAlias = tuple[int, ...] | None
Read: TypeAlias = Callable[[SweepPoint], float | None]

_DOSE = "scale, as a multiple of the vectors' own"
_DASHES = ("-", "--", ":", "-.")
_RING: dict[str, Any] = {
    "marker": "o", "mfc": "white", "mec": "#333333", "ms": 7, "mew": 1.3, "ls": "", "zorder": 4,
}  # fmt: skip
_MAX_SERIES = 8
"""More lines of a kind than this cannot be told apart; targets then go by their place."""
_MAX_TICKS = 9
_LOG_RATIO = 8
"""Perplexities this far apart are drawn on a logarithmic axis."""


def plot_sweep(
    answer: SweepAnswer,
    path: str | Path | None = None,
    *,
    axes: Axes | Sequence[Axes] | None = None,
    items: Sequence[ItemLike] | None = None,
    texts: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a sweep: the dose on the x axis, a panel for each kind of response.

    Panels: the change of each target's log-probability; KL(unsteered || steered) of the token after
    each context; the perplexity of each text. The first two are there where the sweep has items,
    the third where it has texts. A line is a target, or a text; colours tell sets of layers apart
    where there are several. Where items share a target, the line is the mean over them, and thin
    lines are the items. A ring at 0 is the unsteered model.

    Written to `path` where given; drawn into `axes` where given, one for each panel from the left,
    panels without axes left out. `items` are those of the request, and name the targets, of which
    the answer has only numbers; `texts` are names of its texts.

    Raises LogsteerError without matplotlib, and for a path that is no kind of picture; ValueError
    for `items` or `texts` that are not the answer's, and for more axes than panels.
    """
    if path is not None:
        check_plot_path(path)
    labels = label_sweep(answer, items, texts)
    sweep = _Sweep(answer, labels)
    panels = [sweep.draw_changes, sweep.draw_kl] if labels.targets else []
    panels += [sweep.draw_perplexities] if labels.texts else []
    figure, places = prepare_figure(axes, len(panels), title)
    for draw, place in zip(panels, places, strict=False):
        draw(place)
    if axes is None:
        return finish_figure(figure, title or f"Sweep on {answer.model}", path)
    return save_figure(figure, path)


def plot_doses(response: DoseResponse, path: str | Path | None = None) -> Figure:
    """Draw what a vector does to contrasting texts, scale by scale.

    Panels: how much more probable the positive texts are than the negative ones, with the change of
    each side, and KL(unsteered || steered) of the token at which they part. Written to `path` where
    given. Raises LogsteerError without matplotlib, and for a path that is no kind of picture.
    """
    if path is not None:
        check_plot_path(path)
    figure, (left, right) = prepare_figure(None, 2, None)
    scales = [point.scale for point in response.points]
    lines: list[tuple[Axes, str, Callable[[DosePoint], float | None]]] = [
        (left, "preference", lambda point: point.preference_change),
        (left, "positive texts", lambda point: point.positive_change),
        (left, "negative texts", lambda point: point.negative_change),
        (right, "KL", lambda point: point.kl),
    ]
    for index, (axes, label, read) in enumerate(lines):
        found = [read(point) for point in response.points]
        values = [math.nan if value is None else value for value in found]
        marker, dashes = MARKERS[index], _DASHES[index]
        colour = COLOURS[index]
        axes.plot(scales, values, dashes, marker=marker, color=colour, label=label, markersize=4)
    left.axhline(0, color=GREY, linewidth=0.8, zorder=1)
    left.legend(fontsize=8, frameon=False)
    dress_axes(left, "Change of log-probability", "nats, mean over the pairs", _DOSE)
    dress_axes(right, "Divergence where the texts part", "KL(unsteered || steered), nats", _DOSE)
    right.set_ylim(bottom=0)
    places = "own layers" if response.layers is None else f"layers {label_layers(response.layers)}"
    title = f"{response.name} at {places} on {response.num_pairs} pairs, {response.model}"
    return finish_figure(figure, title, path)


@dataclass(frozen=True)
class _Series:
    """One line: its label, and a reader of its value for each of those that it is the mean of."""

    label: str
    reads: list[Read]

    def values(self, point: SweepPoint) -> list[float]:
        """Return what each reader finds at a point; NaN, which is drawn as a gap, for null."""
        found = [read(point) for read in self.reads]
        return [math.nan if value is None else value for value in found]


class _Sweep:
    """The points of a sweep by their set of layers, and how its panels are drawn."""

    def __init__(self, answer: SweepAnswer, labels: SweepLabels) -> None:
        self._labels = labels
        self._unsteered = answer.unsteered
        self._lines: dict[LayerSet, list[SweepPoint]] = {}
        for point in answer.points:
            key = None if point.layers is None else tuple(point.layers)
            self._lines.setdefault(key, []).append(point)
        for points in self._lines.values():
            points.sort(key=lambda point: point.scale)

    def draw_changes(self, axes: Axes) -> None:
        """Draw the change of each target's log-probability."""
        axes.axhline(0, color=GREY, linewidth=0.8, zorder=1)
        self._draw(axes, _group_targets(self._labels))
        dress_axes(axes, "Change of log-probability", "nats, against unsteered", _DOSE)

    def draw_kl(self, axes: Axes) -> None:
        """Draw how far the next token's distribution is from unsteered."""
        count = len(self._labels.contexts)
        reads = [_read_kl(index) for index in range(count)]
        label = self._labels.contexts[0] if count == 1 else f"mean of {count} items"
        self._draw(axes, [_Series(label, reads)])
        dress_axes(axes, "Divergence of the next token", "KL(unsteered || steered), nats", _DOSE)
        axes.set_ylim(bottom=0)

    def draw_perplexities(self, axes: Axes) -> None:
        """Draw the perplexity of each text."""
        names = self._labels.texts
        series = [_Series(f"text {name}", [_read_text(i)]) for i, name in enumerate(names)]
        if len(series) > _MAX_SERIES:
            reads = [read for one in series for read in one.reads]
            series = [_Series(f"mean of {len(names)} texts", reads)]
        self._draw(axes, series)
        dress_axes(axes, "Perplexity", "", _DOSE)
        values = [text.perplexity for point in self._points() for text in point.texts]
        finite = [value for value in values if value]
        if finite and max(finite) > _LOG_RATIO * min(finite):
            axes.set_yscale("log")
            axes.set_yticks(*_choose_log_ticks(finite))
            axes.minorticks_off()
            axes.set_ylabel("logarithmic scale")

    def _points(self) -> Iterable[SweepPoint]:
        yield self._unsteered
        for points in self._lines.values():
            yield from points

    def _draw(self, axes: Axes, series: Sequence[_Series]) -> None:
        """Draw a line for each series and set of layers, and a ring for each unsteered value."""
        scales = sorted({point.scale for points in self._lines.values() for point in points})
        if len(scales) <= _MAX_TICKS:
            axes.set_xticks(scales, [f"{scale:g}" for scale in scales])
        axes.axvline(0, color=GREY, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
        several = len(self._lines) > 1
        colours = _pick_colours(len(self._lines) if several else len(series))
        looks = [_make_look(place, colours, several) for place in range(len(series))]
        for row, (layers, points) in enumerate(self._lines.items()):
            for one, look in zip(series, looks, strict=True):
                names = [one.label] if len(series) > 1 or not several else []
                if several:
                    look = {**look, "color": colours[row]}
                    names.append(f"layers {label_layers(layers)}")
                _draw_line(axes, one, points, ", ".join(names), look, thin=not several)
        rings = {fmean(one.values(self._unsteered)) for one in series}
        axes.plot([0] * len(rings), list(rings), label="unsteered", **_RING, clip_on=False)
        keys = [(f"layers {label_layers(one)}", {"color": colours[row]})
                for row, one in enumerate(self._lines)] if several else []  # fmt: skip
        if not several or len(series) > 1:
            keys += [(one.label, look) for one, look in zip(series, looks, strict=True)]
        _add_legend(axes, [*keys, ("unsteered", _RING)])


def _make_look(place: int, colours: Sequence[Any], several: bool) -> dict[str, Any]:
    """Return how lines of a series look; where colours are sets of layers, dashes tell it apart."""
    look: dict[str, Any] = {"marker": MARKERS[place % len(MARKERS)], "markersize": 4.5}
    if several:
        return look | {"color": "#444444", "linestyle": _DASHES[place % len(_DASHES)]}
    return look | {"color": colours[place]}


def _draw_line(
    axes: Axes,
    series: _Series,
    points: Sequence[SweepPoint],
    label: str,
    look: dict[str, Any],
    *,
    thin: bool,
) -> None:
    """Draw the mean of a series as a line, and what it is the mean of as thin ones."""
    scales = [point.scale for point in points]
    values = [series.values(point) for point in points]
    if thin and len(series.reads) > 1:
        for own in zip(*values, strict=True):
            axes.plot(scales, own, color=look["color"], linewidth=0.7, alpha=0.4, zorder=2)
    means = [fmean(found) for found in values]
    axes.plot(scales, means, **look, linewidth=1.8, label=escape_formula(label), zorder=3)


def _add_legend(axes: Axes, keys: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Put the legend under the panel, where it hides no line."""
    from matplotlib.lines import Line2D
    from matplotlib.transforms import ScaledTranslation

    # A fixed distance under the axes: under the axis' own label, however high the panel is.
    below = axes.transAxes + ScaledTranslation(0, -0.52, axes.figure.dpi_scale_trans)
    longest = max(len(label) for label, _ in keys)
    handles = [Line2D([], [], label=escape_formula(label), **look) for label, look in keys]
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(-0.02, 0),
        bbox_transform=below,
        ncols=1 if longest > 28 else 2 if longest > 14 else 3,
        fontsize=8.5,
        frameon=False,
        borderaxespad=0,
        columnspacing=1.4,
    )


def _group_targets(labels: SweepLabels) -> list[_Series]:
    """Return a series for each distinct target, or for each place where these are too many."""
    groups: dict[str, list[Read]] = {}
    numbers = [[f"target {place + 1}" for place in range(len(one))] for one in labels.targets]
    for names in (labels.targets, numbers):
        groups = {}
        for index, own in enumerate(names):
            for place, name in enumerate(own):
                groups.setdefault(name, []).append(_read_change(index, place))
        if len(groups) <= _MAX_SERIES:
            break
    return [
        _Series(name if len(reads) == 1 else f"{name}, mean of {len(reads)} items", reads)
        for name, reads in groups.items()
    ]


def _read_change(item: int, target: int) -> Read:
    return lambda point: point.items[item].targets[target].change


def _read_kl(item: int) -> Read:
    return lambda point: point.items[item].kl


def _read_text(text: int) -> Read:
    return lambda point: point.texts[text].perplexity


def _pick_colours(count: int) -> Sequence[Any]:
    """Return `count` colours: named ones, or steps of one scale where those are too few."""
    if count <= len(COLOURS):
        return COLOURS
    import matplotlib as mpl

    scale = mpl.colormaps["viridis"]
    return [scale(0.92 * place / (count - 1)) for place in range(count)]


def _choose_log_ticks(values: Sequence[float]) -> tuple[list[float], list[str]]:
    """Return ticks at 1, 2 and 5 of each power of ten between the values, and their labels."""
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    steps = (1, 2, 5) if len(powers) < 4 else (1,)
    ticks = [step * 10.0**power for power in powers for step in steps]
    inside = [tick for tick in ticks if min(values) * 0.7 <= tick <= max(values) * 1.4]
    return inside, [f"{tick:g}" for tick in inside]

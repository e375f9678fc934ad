"""Plots of answers, with matplotlib: `pip install "logsteer[plot]"`.

matplotlib is loaded at the first plot. No window opens and no backend is chosen: a figure is
written to a file and given back. Answers without a plot here have their rows, which pandas plots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from logsteer.errors import LogsteerError
from logsteer.extras import import_package
from logsteer.extras.dose_response import DosePoint, DoseResponse
from logsteer.extras.labels import (
    ItemLike,
    LayerMap,
    SweepLabels,
    label_layers,
    label_sweep,
    map_lens,
    map_lens_answer,
    map_patch,
)
from logsteer.schemas import (
    LensAnswer,
    LensTarget,
    PatchAnswer,
    PerplexityAnswer,
    SweepAnswer,
    SweepPoint,
    TextResult,
    TrainAnswer,
    VectorCard,
    WindowScore,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GREY = "#8a8a8a"
_ORANGE, _BLUE = "#de541e", "#1f6fb4"
"""Above and below 0, as on the server's page."""
_DPI = 150
_DOSE = "scale, as a multiple of the vectors' own"
_QUALITY = ("accuracy", "auc", "pair_accuracy")
_MAX_MARKED = 60
"""Windows that are marked one by one."""
_MAX_SERIES = 8
"""More lines of a kind than this cannot be told apart: their mean is drawn."""
_MAX_CELLS = 400
"""Cells of a map that have room for a word each."""
_LOG_RATIO = 8
"""Perplexities this far apart are drawn on a logarithmic axis."""

Read: TypeAlias = "Callable[[SweepPoint], Mapping[str, Sequence[float | None]]]"
"""What reads the values of each series at a point."""


def plot_answer(answer: Any, path: str | Path | None = None, **options: Any) -> Figure:
    """Draw an answer, write it to `path` where given, and return the figure.

    `options` are those of `plot_sweep` for a sweep. Raises LogsteerError without matplotlib, for a
    path that is not a picture's, and for an answer that has nothing to draw.
    """
    figure: Figure = _PLOTS[type(answer)](answer, path, **options)
    return figure


def plot_sweep(
    answer: SweepAnswer,
    path: str | Path | None = None,
    *,
    items: Sequence[ItemLike] | None = None,
    texts: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a sweep: the dose on the x axis, a panel for each kind of response.

    Panels: the change of each target's log-probability; KL(unsteered || steered) of the token after
    each context; the perplexity of each text. The first two are there where the sweep has items,
    the third where it has texts. A line is a target, or a text, at a set of layers; where items
    share a target, it is the mean over them. A ring at 0 is the unsteered model.

    `items` are those of the request, and name the targets, of which the answer has only numbers;
    `texts` are names of its texts.

    Raises LogsteerError without matplotlib, and for a path that is not a picture's; ValueError
    for `items` or `texts` that are not the answer's.
    """
    labels = label_sweep(answer, items, texts)
    figure, places = _prepare(path, 2 * bool(labels.targets) + bool(labels.texts))
    if labels.targets:
        _draw_points(places[0], answer, _choose_changes(labels))
        places[0].axhline(0, color=_GREY, linewidth=0.8, zorder=1)
        _dress(places[0], "Change of log-probability", "nats, against unsteered", _DOSE)
        name = labels.contexts[0] if len(labels.contexts) == 1 else "all items"
        _draw_points(places[1], answer, lambda point: {name: [item.kl for item in point.items]})
        _dress(places[1], "Divergence of the next token", "KL(unsteered || steered), nats", _DOSE)
    if labels.texts:
        axes, few = places[-1], len(labels.texts) <= _MAX_SERIES
        names = [f"text {name}" if few else "all texts" for name in labels.texts]
        _draw_points(
            axes, answer, lambda point: _group(names, [text.perplexity for text in point.texts])
        )
        _dress(axes, "Perplexity", "", _DOSE)
        found = [text.perplexity for point in answer.points for text in point.texts]
        known = [value for value in found if value]
        if known and max(known) > _LOG_RATIO * min(known):
            axes.set_yscale("log")
    return _finish(figure, title or f"Sweep on {answer.model}", path)


def plot_doses(response: DoseResponse, path: str | Path | None = None) -> Figure:
    """Draw what a vector does to contrasting texts, scale by scale.

    Panels: how much more probable the positive texts are than the negative ones, with the change of
    each side, and KL(unsteered || steered) of the token at which they part. Raises LogsteerError
    without matplotlib, and for a path that is not a picture's.
    """
    figure, (left, right) = _prepare(path, 2)
    scales = [point.scale for point in response.points]
    lines: list[tuple[Axes, str, Callable[[DosePoint], float | None]]] = [
        (left, "preference", lambda point: point.preference_change),
        (left, "positive texts", lambda point: point.positive_change),
        (left, "negative texts", lambda point: point.negative_change),
        (right, "KL", lambda point: point.kl),
    ]
    for axes, label, read in lines:
        axes.plot(scales, [_gap(read(point)) for point in response.points], "o-", label=label)
    left.axhline(0, color=_GREY, linewidth=0.8, zorder=1)
    _dress(left, "Change of log-probability", "nats, mean over the pairs", _DOSE)
    _dress(right, "Divergence where the texts part", "KL(unsteered || steered), nats", _DOSE)
    places = "own layers" if response.layers is None else f"layers {label_layers(response.layers)}"
    title = f"{response.name} at {places} on {response.num_pairs} pairs, {response.model}"
    return _finish(figure, title, path)


def plot_windows(
    windows: Sequence[WindowScore], title: str, path: str | Path | None = None
) -> Figure:
    """Draw the mean surprisal of each window at the place of its scored tokens, and that so far."""
    if not windows:
        raise LogsteerError(
            "there is no window to draw: ask with windows=True; a text may be too short for its "
            "protocol"
        )
    figure, (axes,) = _prepare(path, 1, width=8.0)
    places, means, so_far, total, count = [], [], [], 0.0, 0
    for window in windows:
        surprisal = -_gap(window.sum_logprob)
        total, count = total + surprisal, count + window.num_scored
        places.append(window.end - window.num_scored / 2)
        means.append(surprisal / window.num_scored if window.num_scored else math.nan)
        so_far.append(total / count if count else math.nan)
    axes.plot(places, means, "o-" if len(windows) <= _MAX_MARKED else "-", label="window")
    axes.plot(places, so_far, label="text so far")
    _dress(axes, "Mean surprisal of each window", "nats a token", "position in the text, tokens")
    return _finish(figure, title, path)


def check_plot_path(path: str | Path) -> None:
    """Check that a plot can be written there; else raise LogsteerError, which says what to do."""
    from_suffix = _load_figure()(figsize=(1, 1)).canvas.get_supported_filetypes()
    if Path(path).suffix.lstrip(".").lower() not in from_suffix:
        raise LogsteerError(f"{path}: give a name that ends in .png, .svg or .pdf")
    if not Path(path).absolute().parent.is_dir():
        raise LogsteerError(f"{path}: there is no directory {Path(path).absolute().parent}")


def _load_figure() -> type[Figure]:
    missing = 'plots need matplotlib, which is not installed: pip install "logsteer[plot]"'
    figure: type[Figure] = import_package("matplotlib.figure", LogsteerError(missing)).Figure
    return figure


def _prepare(
    path: str | Path | None, count: int, width: float = 4.3
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure and its panels, each so many inches wide, once it can be written."""
    if path is not None:
        check_plot_path(path)
    figure = _load_figure()(figsize=(1.2 + width * count, 4.0), layout="constrained")
    # No backend is chosen, which is what would have a notebook show the figure.
    figure._repr_png_ = partial(_draw_png, figure)  # type: ignore[attr-defined]
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _draw_png(figure: Figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png", dpi=96)
    return file.getvalue()


def _dress(axes: Axes, title: str, unit: str, below: str) -> None:
    """Write what axes show over them, the unit beside them, and what runs along them below."""
    axes.set_title(_escape(title), fontsize=10.5, loc="left", pad=8)
    axes.set_ylabel(unit)
    axes.set_xlabel(below)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)


def _finish(figure: Figure, title: str, path: str | Path | None) -> Figure:
    figure.suptitle(_escape(title), fontsize=12, x=0.01, ha="left")
    if path is not None:
        figure.savefig(path, dpi=_DPI)
    return figure


def _escape(text: str) -> str:
    """Return the text as matplotlib shows it: a dollar sign would begin a formula."""
    return text.replace("$", r"\$")


def _gap(value: float | None) -> float:
    return math.nan if value is None else value


def _draw_points(axes: Axes, answer: SweepAnswer, read: Read) -> None:
    """Draw a line for the mean of each series at each set of layers, and a ring of unsteered."""
    lines: dict[tuple[int, ...] | None, list[SweepPoint]] = {}
    for point in sorted(answer.points, key=lambda point: point.scale):
        lines.setdefault(None if point.layers is None else tuple(point.layers), []).append(point)
    for layers, points in lines.items():
        place = f", layers {label_layers(layers)}" if len(lines) > 1 else ""
        found = [read(point) for point in points]
        for name, values in found[0].items():
            mean = f", mean of {len(values)}" if len(values) > 1 else ""
            means = [_average(one[name]) for one in found]
            scales = [point.scale for point in points]
            axes.plot(scales, means, "o-", markersize=4.5, label=_escape(name + mean + place))
    rings = {_average(values) for values in read(answer.unsteered).values()}
    axes.plot([0] * len(rings), list(rings), "o", mfc="white", mec="#333333", label="unsteered")


def _average(values: Sequence[float | None]) -> float:
    return math.fsum(map(_gap, values)) / len(values)


def _choose_changes(labels: SweepLabels) -> Read:
    """Return what reads the changes of each target, or of each place where these are too many."""
    names = [name for targets in labels.targets for name in targets]
    if len(set(names)) > _MAX_SERIES:
        names = [f"target {n}" for own in labels.targets for n in range(1, len(own) + 1)]
    return lambda point: _group(
        names, [target.change for item in point.items for target in item.targets]
    )


def _group(names: Sequence[str], values: Sequence[float | None]) -> dict[str, list[float | None]]:
    groups: dict[str, list[float | None]] = {}
    for name, value in zip(names, values, strict=True):
        groups.setdefault(name, []).append(value)
    return groups


def _plot_texts(texts: Sequence[TextResult], path: str | Path | None, name: str = "Text") -> Figure:
    if len(texts) != 1:
        raise LogsteerError(f"plot one of the {len(texts)} texts: answer.results[0].plot()")
    title = f"{name}, perplexity {_gap(texts[0].perplexity):.5g}"
    return plot_windows(texts[0].windows or [], title, path)


def _plot_card(card: VectorCard, path: str | Path | None) -> Figure:
    """Draw how well each layer tells held-out texts apart, where that is known, and its norm."""
    quality: Mapping[str, Any] = card.about.quality or {}
    figure, places = _prepare(path, 2 if quality else 1)
    layers = [int(layer) for layer in card.norms]
    places[-1].bar(layers, list(card.norms.values()), color=_GREY, width=0.6, label="norm")
    _dress(places[-1], "Norm of the vector", "", "layer")
    if quality:
        for name in _QUALITY:
            known = {int(layer): getattr(one, name) for layer, one in quality.items()}
            values = [_gap(known.get(layer)) for layer in layers]
            places[0].plot(layers, values, "o-", label=name.replace("_", " "))
        places[0].axhline(0.5, color=_GREY, linewidth=0.8, linestyle="--")
        places[0].set_ylim(0, 1.04)
        _dress(places[0], "Held-out texts told apart", "share; 0.5 is chance", "layer")
    return _finish(figure, f"{card.name} ({card.sha256[:12]})", path)


def plot_map(found: LayerMap, path: str | Path | None = None) -> Figure:
    """Draw layers by tokens as a heat map, the first layer at the bottom.

    Changes are orange above 0 and blue below. Cells are marked where these are few.
    """
    from matplotlib.colors import LinearSegmentedColormap

    width, height = len(found.tokens), len(found.layers)
    figure, (axes,) = _prepare(path, 1, max(4.3, 0.55 * width))
    figure.set_figheight(max(3.2, 1.6 + 0.3 * height))
    values = [[_gap(value) for value in row] for row in found.values]
    most = max((abs(value) for row in values for value in row if math.isfinite(value)), default=1)
    colours = LinearSegmentedColormap.from_list("signed", [_BLUE, "#ffffff", _ORANGE])
    limits = (-most or -1, most or 1) if found.signed else (0, 1)
    drawn = axes.imshow(
        values, aspect="auto", origin="lower", vmin=limits[0], vmax=limits[1],
        cmap=colours if found.signed else LinearSegmentedColormap.from_list(
            "share", ["#ffffff", _ORANGE]
        ),
    )  # fmt: skip
    tokens = [_escape(repr(token)[1:-1]) for token in found.tokens]
    axes.set_xticks(range(width), tokens, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(height), found.layers, fontsize=8)
    axes.set_ylabel("layer")
    for row, marks in enumerate((found.marks or ()) if width * height <= _MAX_CELLS else ()):
        for place, mark in enumerate(marks):
            axes.text(place, row, _escape(mark.strip()), ha="center", va="center", fontsize=7)
    figure.colorbar(drawn, ax=axes).set_label(found.unit)
    return _finish(figure, found.title, path)


_PLOTS: Mapping[type, Callable[..., Figure]] = {
    SweepAnswer: plot_sweep,
    DoseResponse: plot_doses,
    TextResult: lambda text, path: _plot_texts([text], path),
    PerplexityAnswer: lambda all_of, path: _plot_texts(
        all_of.results, path, f"Text on {all_of.model}"
    ),
    VectorCard: _plot_card,
    LensTarget: lambda target, path: plot_map(map_lens(target), path),
    LensAnswer: lambda answer, path: plot_map(map_lens_answer(answer), path),
    PatchAnswer: lambda answer, path, pair=0: plot_map(map_patch(answer, pair), path),
    TrainAnswer: lambda answer, path: _plot_card(answer.vector, path),
}

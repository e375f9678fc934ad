"""What all plots share: a figure with panels, how axes are dressed, and where a picture goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from logsteer.errors import LogsteerError

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

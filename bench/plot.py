"""Draws how scoring grows with what is asked: `plot.py [RESULTS.json]`, beside that file.

From bench/results.json comes bench/growth.png; from another file NAME-growth.png.
"""

import json
import re
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

BENCH = Path(__file__).resolve().parent
PANELS = {
    r"context of (\d+) tokens, 4 targets": "tokens in the context\n(8 contexts, 4 targets of 6)",
    r"(\d+) targets, context of 400 tokens": "targets of a context\n(8 contexts of 400)",
    r"(\d+) callers, 4 contexts of 100 tokens each": "callers at once\n(4 contexts of 100 each)",
    r"vocabulary of (\d+) tokens, 8 contexts of 100, 4 targets": (
        "tokens in the vocabulary\n(8 contexts of 100, 4 targets)"
    ),
}
Points = list[tuple[int, tuple[float, float, float]]]


def find_points(ways: dict[str, dict[str, list[float]]], pattern: str) -> Points:
    """Return the amounts that a pattern finds in names, each with the spread of its rate."""
    points = []
    for name, values in ways.items():
        if found := re.fullmatch(pattern, name):
            low, median, high = values["pairs_per_s"]
            points.append((int(found[1]), (low, median, high)))
    return sorted(points)


def draw_panel(axis: Axes, points: Points, label: str) -> None:
    """Draw the medians, with the spread of the runs as a band."""
    x = [amount for amount, _ in points]
    low, median, high = zip(*(rates for _, rates in points), strict=True)
    axis.fill_between(x, low, high, alpha=0.2, linewidth=0)
    axis.plot(x, median, marker="o")
    axis.set_xscale("log", base=2)
    axis.set_xticks(x, [f"{amount:,}" for amount in x])
    axis.minorticks_off()
    axis.set_ylim(0, 1.1 * max(high))
    axis.set_xlabel(label)
    axis.grid(alpha=0.3)


def main() -> None:
    """Draw a panel for each kind of growth that was measured."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else BENCH / "results.json"
    ways = json.loads(path.read_text())["growth"]["ways"]
    panels = [(find_points(ways, pattern), label) for pattern, label in PANELS.items()]
    drawn = [(points, label) for points, label in panels if len(points) > 1]
    figure, axes = plt.subplots(
        1, len(drawn), figsize=(4 * len(drawn), 3.4), constrained_layout=True, squeeze=False
    )
    for axis, (points, label) in zip(axes[0], drawn, strict=True):
        draw_panel(axis, points, label)
    axes[0, 0].set_ylabel("pairs scored per second")
    name = "growth.png" if path.stem == "results" else f"{path.stem}-growth.png"
    figure.savefig(path.with_name(name), dpi=110)


if __name__ == "__main__":
    main()

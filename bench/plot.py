"""Draws bench/growth.png from bench/results.json: how scoring grows with what is asked."""

import json
import re
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

BENCH = Path(__file__).resolve().parent
PANELS = {
    r"context of (\d+) tokens, 4 targets": "tokens in the context (4 targets of 6)",
    r"(\d+) targets, context of 400 tokens": "targets of a context of 400 tokens",
    r"(\d+) callers, 4 contexts of 100 tokens each": "callers at once (4 contexts of 100)",
}


def main() -> None:
    """Draw a panel for each kind of growth, with the spread of the runs as a band."""
    ways = json.loads((BENCH / "results.json").read_text())["growth"]["ways"]
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3.4), constrained_layout=True)
    for axis, (pattern, label) in zip(axes, PANELS.items(), strict=True):
        points = sorted(
            (int(found[1]), values["pairs_per_s"])
            for name, values in ways.items()
            if (found := re.fullmatch(pattern, name))
        )
        x = [amount for amount, _ in points]
        low, median, high = zip(*(rates for _, rates in points), strict=True)
        axis.fill_between(x, low, high, alpha=0.2, linewidth=0)
        axis.plot(x, median, marker="o")
        axis.set_xscale("log", base=2)
        axis.set_xticks(x, [str(amount) for amount in x])
        axis.set_ylim(bottom=0)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("pairs scored per second")
    figure.savefig(BENCH / "growth.png", dpi=110)


if __name__ == "__main__":
    main()

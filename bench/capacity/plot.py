"""Draws docs/images/capacity.png: latency against utilisation, for fleets of three sizes.

.venv/bin/python -m bench.capacity.plot
"""

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from bench.capacity.page import PAGE
from bench.capacity.plan import make_shape
from bench.capacity.scenarios import Scenario, at_load, make_rates, make_workload

SIZES = (1, 6, 48)
LOADS = (0.3, 0.5, 0.65, 0.8, 0.9, 1.0)
"""Of the load were no prefix found: those that are take about half of it away."""
SECONDS = 1440.0
"""For one replica; others less, so that all have as many requests."""
COLOURS = ("#8da0cb", "#377eb8", "#1b3a5c")


def main() -> None:
    """Simulate, draw, and write the picture."""
    load, rates = make_workload(), make_rates("18 M")
    figure, axes = plt.subplots(figsize=(7, 4), dpi=150)
    for size, colour in zip(SIZES, COLOURS, strict=True):
        shape = make_shape(load, rates, size)
        found = []
        for part in LOADS:
            mix = at_load(load.make_mix(), shape, 1.75 * part)
            found.append(Scenario(shape, mix, SECONDS / size).run())
        found = [own for own in found if own["utilisation"] < 0.97]
        busy = [own["utilisation"] for own in found]
        label = f"{size} replica{'s' * (size > 1)}"
        axes.plot(busy, [own["latency_p95_s"] for own in found], "o-", color=colour, label=label)
        axes.plot(busy, [own["latency_p50_s"] for own in found], "o:", color=colour)
    axes.set_yscale("log")
    axes.set_yticks([0.2, 0.5, 1, 2, 5, 10, 20], ["0.2", "0.5", "1", "2", "5", "10", "20"])
    axes.yaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("time that replicas are at work")
    axes.set_ylabel("seconds for a request of 16 texts")
    axes.set_title("95th percentile (lines) and median (dots), simulated, 18 M model", fontsize=10)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(PAGE.parent / "images" / "capacity.png")


if __name__ == "__main__":
    main()

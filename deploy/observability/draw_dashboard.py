"""Draw the dashboard's panels without Grafana, from what a Prometheus has scraped.

    python deploy/observability/draw_dashboard.py http://127.0.0.1:9090 dashboard.png --minutes 5

Queries, units, bounds, texts and places are those of dashboards/logsteer.json; the picture shows
what Prometheus answers, not what Grafana would look like. Needs logsteer[plot].
"""

import argparse
import json
import math
import re
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import matplotlib.pyplot as plt

DASHBOARD = Path(__file__).parent / "dashboards" / "logsteer.json"
GRID = 24
"""The width of Grafana's grid."""
WIDTH, HEIGHT = 18.4 / GRID, 0.4
"""Inches of a step of the grid."""
LEFT, RIGHT, BELOW, ABOVE = 0.6, 0.2, 1.15, 0.5
"""Inches of a panel around its graph."""
SCALES = {
    "bytes": [(2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes")],
    "percentunit": [(0.01, "%")],
    "s": [(1.0, "s"), (1e-3, "ms")],
    "reqps": [(1.0, "requests/s")],
    "short": [(1.0, "")],
}
"""Grafana's units -> what they are read in, the largest first: a divisor and a name."""
MAX_SERIES = 8
"""Those with the largest values are drawn, and the others counted."""
MUTED = "0.4"


@dataclass(frozen=True, slots=True)
class Line:
    """One series: its name, times in minutes before the end, and values in Grafana's unit."""

    name: str
    at: list[float]
    values: list[float]

    @property
    def largest(self) -> float:
        """The largest value, at least one of which is a number."""
        return max(value for value in self.values if math.isfinite(value))


@dataclass(frozen=True, slots=True)
class Span:
    """What time is drawn: its end in seconds since 1970, its length, seconds between two points."""

    end: float
    minutes: float
    step: float


def query_lines(url: str, target: dict[str, Any], span: Span) -> list[Line]:
    """Return the series of a query that have a value."""
    filled = target["expr"].replace("$__rate_interval", "30s").replace("$model", ".*")
    answer = httpx.get(
        f"{url}/api/v1/query_range",
        params={
            "query": filled,
            "start": span.end - 60 * span.minutes,
            "end": span.end,
            "step": span.step,
        },
    )
    answer.raise_for_status()
    lines = [
        Line(
            name_series(target["legendFormat"], series["metric"]),
            [(float(at) - span.end) / 60 for at, _ in series["values"]],
            [float(value) for _, value in series["values"]],
        )
        for series in answer.json()["data"]["result"]
    ]
    return [line for line in lines if any(map(math.isfinite, line.values))]


def name_series(legend: str, labels: dict[str, str]) -> str:
    """Return a series' name: the legend with its labels put in."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend).strip()


def choose_scale(unit: str, largest: float) -> tuple[float, str]:
    """Return what to divide values of a unit by, and what they are then."""
    if unit.startswith("count:"):
        return 1.0, unit.removeprefix("count:")
    return next((each for each in SCALES[unit] if largest >= each[0]), SCALES[unit][-1])


def draw(url: str, span: Span) -> Any:
    """Return a figure with every panel of the dashboard, and the titles of its rows."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [panel["gridPos"] for panel in panels]
    width = WIDTH * GRID
    height = HEIGHT * max(place["y"] + place["h"] for place in places)
    figure = plt.figure(figsize=(width, height))
    for panel, place in zip(panels, places, strict=True):
        left, bottom = WIDTH * place["x"], height - HEIGHT * (place["y"] + place["h"])
        if panel["type"] == "row":
            figure.text(0.01, bottom / height, panel["title"], fontsize=14, fontweight="bold")
            continue
        graph = figure.add_axes((
            (left + LEFT) / width,
            (bottom + BELOW) / height,
            (WIDTH * place["w"] - LEFT - RIGHT) / width,
            (HEIGHT * place["h"] - BELOW - ABOVE) / height,
        ))  # fmt: skip
        draw_panel(graph, panel, url, span)
    return figure


def draw_panel(place: Any, panel: dict[str, Any], url: str, span: Span) -> None:
    """Draw one panel: title, text and lines, and what they are called below them."""
    shown = panel["fieldConfig"]["defaults"]
    lines = [line for target in panel["targets"] for line in query_lines(url, target, span)]
    place.set_title(panel["title"], fontsize=10.5, loc="left", pad=16)
    text = textwrap.shorten(panel["description"], 75, placeholder=" …")
    place.annotate(text, (0, 1), (0, 4), "axes fraction", "offset points", fontsize=7, color=MUTED)
    if not lines:
        place.set(xticks=[], yticks=[])
        place.spines[:].set_color("0.85")
        told = textwrap.fill(shown["noValue"], 38)
        place.text(0.5, 0.5, told, ha="center", va="center", transform=place.transAxes, color=MUTED)
        return
    factor, unit = choose_scale(shown["unit"], max(line.largest for line in lines))
    kept = set(sorted(range(len(lines)), key=lambda n: -lines[n].largest)[:MAX_SERIES])
    for line in (lines[n] for n in sorted(kept)):
        values = [value / factor for value in line.values]
        place.plot(line.at, values, linewidth=1.3, label=textwrap.shorten(line.name, 40))
    place.set_ylabel(unit, fontsize=8)
    place.set_xlabel("minutes", fontsize=7, labelpad=1)
    place.set_xlim(-span.minutes, 0)
    place.set_ylim(bottom=0, top=shown["max"] / factor if "max" in shown else None)
    if place.get_ylim()[1] < 0.1:  # nothing but zeros
        place.set_ylim(top=1)
    place.tick_params(labelsize=7.5)
    place.grid(alpha=0.25)
    left = len(lines) - len(kept)
    place.legend(
        fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.19), ncols=2, frameon=False,
        title=f"and {left} smaller" if left else None, title_fontsize=7, handlelength=1.2,
        columnspacing=1.2, labelspacing=0.25,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Draw the picture; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="where Prometheus answers")
    parser.add_argument("picture", type=Path, help="file to write")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--end", type=float, help="seconds since 1970; now, unless given")
    parser.add_argument("--step", type=float, default=2.0, help="seconds between two points")
    arguments = parser.parse_args(argv)
    plt.switch_backend("agg")
    span = Span(arguments.end or time.time(), arguments.minutes, arguments.step)
    draw(arguments.url, span).savefig(arguments.picture, dpi=80)
    return 0


if __name__ == "__main__":
    sys.exit(main())

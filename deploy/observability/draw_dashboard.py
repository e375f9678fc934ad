"""Draw the dashboard's panels without Grafana, from what a Prometheus has scraped.

    python deploy/observability/draw_dashboard.py http://127.0.0.1:9090 dashboard.png --minutes 5

The queries are those of dashboards/logsteer.json; the picture shows what they return, not what
Grafana would look like. Needs logsteer[plot].
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib.pyplot as plt

DASHBOARD = Path(__file__).parent / "dashboards" / "logsteer.json"
COLUMNS = 6
SCALES = {"bytes": (2**-20, "MiB"), "percentunit": (100.0, "%"), "s": (1e3, "ms")}
"""Grafana's units -> a factor and a unit that read well here."""
MAX_LEGEND = 5


def query_range(url: str, expression: str, minutes: float, step: float) -> list[dict[str, Any]]:
    """Return the series of a query, each with its labels and values."""
    now = time.time()
    filled = expression.replace("$__rate_interval", "30s").replace("$model", ".*")
    answer = httpx.get(
        f"{url}/api/v1/query_range",
        params={"query": filled, "start": now - 60 * minutes, "end": now, "step": step},
    )
    answer.raise_for_status()
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


def name_series(legend: str, labels: dict[str, str]) -> str:
    """Return a series' name: the legend with its labels put in."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend)


def draw(url: str, minutes: float, step: float) -> Any:
    """Return a figure with every panel of the dashboard, row by row."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows: list[tuple[str, list[Any]]] = []
    for panel in panels:
        if panel["type"] == "row":
            rows.append((panel["title"], []))
        else:
            rows[-1][1].append(panel)
    figure, grid = plt.subplots(
        len(rows), COLUMNS, figsize=(4.2 * COLUMNS, 2.9 * len(rows)), layout="constrained"
    )
    for axes, (title, shown) in zip(grid, rows, strict=True):
        for place, panel in zip(axes, [*shown, *[None] * COLUMNS], strict=False):
            if panel is None:
                place.axis("off")
            else:
                draw_panel(place, panel, url, minutes, step)
        axes[0].set_ylabel(title, fontsize=13, fontweight="bold")
    figure.supxlabel("minutes", fontsize=10)
    return figure


def draw_panel(place: Any, panel: dict[str, Any], url: str, minutes: float, step: float) -> None:
    """Draw one panel."""
    factor, unit = SCALES.get(panel["fieldConfig"]["defaults"]["unit"], (1.0, ""))
    lines = 0
    for target in panel["targets"]:
        for series in query_range(url, target["expr"], minutes, step):
            at = [(float(t) - time.time()) / 60 for t, _ in series["values"]]
            values = [factor * float(value) for _, value in series["values"]]
            label = name_series(target["legendFormat"], series["metric"])
            place.plot(at, values, linewidth=1.3, label=label if lines < MAX_LEGEND else None)
            lines += 1
    place.set_title(panel["title"] + (f", {unit}" if unit else ""), fontsize=10)
    place.tick_params(labelsize=7)
    place.margins(y=0.45)  # room for the legend
    place.set_ylim(bottom=0)
    place.grid(alpha=0.25)
    if not lines:
        place.text(0.5, 0.5, "no data", ha="center", transform=place.transAxes, color="gray")
    else:
        more = f"and {lines - MAX_LEGEND} more" if lines > MAX_LEGEND else None
        place.legend(fontsize=6, loc="upper left", title=more, title_fontsize=6)


def main(argv: list[str] | None = None) -> int:
    """Draw the picture; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="where Prometheus answers")
    parser.add_argument("picture", type=Path, help="file to write")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--step", type=float, default=2.0, help="seconds between two points")
    arguments = parser.parse_args(argv)
    plt.switch_backend("agg")
    draw(arguments.url, arguments.minutes, arguments.step).savefig(arguments.picture, dpi=75)
    return 0


if __name__ == "__main__":
    sys.exit(main())

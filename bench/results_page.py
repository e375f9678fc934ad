"""The results of `bench/run.py` for reading: what is asked of them, then every row's figures."""

from collections.abc import Iterable, Mapping
from typing import Any

from bars import write_table


def write_page(results: Mapping[str, Any]) -> str:
    """Return the page in Markdown; spreads are [smallest, median, largest]."""
    blocks = [
        "# Results",
        "Written by `bench/run.py`; a figure is a median, with the smallest and the largest run.",
        write_table(results),
    ]
    for name, result in results.items():
        blocks += [f"## `{name}`", _describe(result)]
        if ways := list(_list_ways(result.get("ways", {}))):
            blocks.append(_tabulate(("way", "measure", "median", "spread"), ways))
        figures = result.get("ratios", {}) | result.get("figures", {})
        if figures:
            rows = [(figure, *_write_spread(value)) for figure, value in figures.items()]
            blocks.append(_tabulate(("ratio or figure", "median", "spread"), rows))
        blocks += [f"{note}." for note in result.get("notes", [])]
    return "\n\n".join(blocks) + "\n"


def _describe(result: Mapping[str, Any]) -> str:
    """The line below a row's head: command, machine, model, runs."""
    parts = [f"`{result['command']}`", result["machine"]]
    parts += [str(result[key]) for key in ("model", "dtype", "device") if key in result]
    if runs := result.get("runs"):
        parts.append(f"{runs} runs of each")
    return ", ".join([*parts, f"{result['seconds_taken']} s in all"])


def _list_ways(ways: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[str, ...]]:
    for way, values in ways.items():
        for measure, value in values.items():
            if measure != "first_is_faster_by":  # the ratios say so
                yield way, measure.replace("_", " "), *_write_spread(value)


def _write_spread(value: Any) -> tuple[str, str]:
    if not isinstance(value, list):
        return _write_number(value), ""
    low, median, high = value
    return _write_number(median), f"{_write_number(low)} to {_write_number(high)}"


def _write_number(value: Any) -> str:
    if not isinstance(value, float | int):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _tabulate(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

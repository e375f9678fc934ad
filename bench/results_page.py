"""The results of `bench/run.py` for reading: what is asked of them, then every row's figures."""

from collections.abc import Iterator, Mapping
from typing import Any

from bench.bars import tabulate, write_cell, write_table


def write_page(results: Mapping[str, Any]) -> str:
    """Return the page in Markdown; spreads are [smallest, median, largest]."""
    blocks = [
        "# Results",
        "Written by `bench/run.py`; a figure is a median, with the smallest and the largest run.",
        write_table(results),
    ]
    for name, result in results.items():
        parts = [f"`{result['command']}`", result["machine"]]
        parts += [str(result[key]) for key in ("model", "dtype", "device") if key in result]
        parts += [f"{result['runs']} runs of each"] if "runs" in result else []
        blocks += [f"## `{name}`", ", ".join([*parts, f"{result['seconds_taken']} s in all"])]
        if ways := list(_list_ways(result.get("ways", {}))):
            blocks.append(tabulate(("way", "measure", "median", "spread"), ways))
        figures = result.get("ratios", {}) | result.get("figures", {})
        if figures:
            rows = [(figure, *_split(value)) for figure, value in figures.items()]
            blocks.append(tabulate(("ratio or figure", "median", "spread"), rows))
        blocks += [f"{note}." for note in result.get("notes", [])]
    return "\n\n".join(blocks) + "\n"


def _list_ways(ways: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for way, values in ways.items():
        for measure, value in values.items():
            if measure != "first_is_faster_by":  # the ratios say so
                yield way, measure.replace("_", " "), *_split(value)


def _split(value: Any) -> tuple[Any, str]:
    if not isinstance(value, list):
        return value, ""
    low, median, high = value
    return median, f"{write_cell(low)} to {write_cell(high)}"

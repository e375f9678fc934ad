"""`plot_sweep`: the panels, the lines, and what a file holds."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from logsteer import LogsteerError, plot_sweep
from logsteer.schemas import LogprobItem, SweepAnswer

from .documents import SWEEP

ITEMS: list[Any] = [{"context": "I am", "targets": [" glad", " $ad$"]}]


def sweep(items: int = 1, texts: int = 1, layers: Any = (2, 3), scales: Any = (-1, 0, 1)) -> Any:
    """A sweep with the answer's numbers told over for items, texts and layer sets."""

    def point(own: Any, scale: float) -> dict[str, Any]:
        one = next(p for p in SWEEP["points"] if p["scale"] == scale)
        layers = own if own is None else [own]
        return {
            **one,
            "layers": layers,
            "items": one["items"] * items,
            "texts": one["texts"] * texts,
        }

    points = [point(own, scale) for own in layers for scale in scales]
    document = {**SWEEP, "unsteered": point(None, 0), "points": points}
    return SweepAnswer.model_validate(document)


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def keys(figure: Figure, panel: int = 0) -> list[str]:
    legend = figure.axes[panel].get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


ALL = ["Change of log-probability", "Divergence of the next token", "Perplexity"]


@pytest.mark.parametrize(
    ("items", "texts", "panels"), [(1, 1, ALL), (2, 0, ALL[:2]), (0, 2, ALL[2:])]
)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_file_with_a_panel_for_each_kind_of_response(
    tmp_path: Path, items: int, texts: int, panels: list[str], suffix: str
) -> None:
    path = tmp_path / f"sweep.{suffix}"
    figure = plot_sweep(sweep(items, texts), path)
    assert titles(figure) == panels
    start = path.read_bytes()[:60]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in start


def test_lines_are_targets_and_sets_of_layers() -> None:
    figure = plot_sweep(sweep(), items=ITEMS, texts=["story"], title="mood")
    assert figure.get_suptitle() == "mood"
    lines = {str(line.get_label()): line for line in figure.axes[0].lines}
    glad = lines["' glad', layers 3"]
    assert glad.get_xydata().tolist() == [[-1, -1.5], [0, 0], [1, 0.5]]  # type: ignore[union-attr]
    # A dollar sign is no formula.
    names = ["' glad'", r"' \$ad\$'"]
    own = [f"{name}, layers {layer}" for layer in (2, 3) for name in names]
    assert keys(figure) == [*own, "unsteered"]
    ring = lines["unsteered"].get_xydata()
    assert ring is not None and ring.tolist() == [[0, 0]]
    (perplexity,) = [line for line in figure.axes[2].lines if line.get_label() == "unsteered"]
    assert list(perplexity.get_ydata()) == [2]  # type: ignore[arg-type]


def test_a_null_is_a_gap_and_scales_are_in_order() -> None:
    figure = plot_sweep(sweep(layers=[None], scales=(1, -1)))
    lines = {str(line.get_label()): line for line in figure.axes[0].lines}
    assert list(lines["target 1"].get_xdata()) == [-1, 1]  # type: ignore[arg-type]
    first, last = lines["target 2"].get_ydata()  # type: ignore[misc]
    assert first != first and last == -2.0


def test_shared_targets_are_a_mean_and_many_targets_go_by_place() -> None:
    shared = [{"context": f"{n}", "targets": [" a", " b"]} for n in range(3)]
    figure = plot_sweep(sweep(3, layers=[None]), items=shared)
    assert keys(figure)[0] == "' a', mean of 3"
    apart = [LogprobItem(context="c", targets=[f"{n}", f"{-n - 1}"]) for n in range(5)]
    figure = plot_sweep(sweep(5, layers=[None]), items=apart)
    assert keys(figure) == ["target 1, mean of 5", "target 2, mean of 5", "unsteered"]
    assert keys(figure, 1) == ["all items, mean of 5", "unsteered"]


def test_perplexities_far_apart_are_on_a_logarithmic_axis() -> None:
    answer = sweep(0, 1)
    assert plot_sweep(answer).axes[0].get_yscale() == "linear"
    answer.points[0].texts[0].perplexity = 900.0
    assert plot_sweep(answer).axes[0].get_yscale() == "log"


def test_what_is_not_of_the_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"items with \[2\] targets"):
        plot_sweep(sweep(), items=[{"context": "a", "targets": ["b"]}])
    with pytest.raises(ValueError, match="2 texts"):
        plot_sweep(sweep(), texts=["a", "b"])
    with pytest.raises(LogsteerError, match=r"\.png, \.svg or \.pdf"):
        plot_sweep(sweep(), tmp_path / "sweep")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LogsteerError, match=r'pip install "logsteer\[plot\]"'):
        plot_sweep(sweep())


def test_a_plot_chooses_no_backend_and_leaves_pyplot_alone(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(sweep().model_dump_json())
    script = (
        "import sys, pathlib, logsteer.schemas as s, logsteer\n"
        f"answer = s.SweepAnswer.model_validate_json(pathlib.Path({str(path)!r}).read_text())\n"
        f"logsteer.plot_sweep(answer, {str(tmp_path / 'x.png')!r})\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"

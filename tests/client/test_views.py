"""What answers are to people: HTML in a notebook, rows and tables, plots.

Of `plot_sweep`, the panels, the lines, and what a file holds.
"""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from logsteer import LogsteerError, plot_sweep
from logsteer._pairs import pair_records
from logsteer.extras.html import PARTS_SHOWN, ROWS_SHOWN, TOKENS_SHOWN
from logsteer.extras.rows import list_grains, list_rows
from logsteer.schemas import (
    Completion,
    GenerateAnswer,
    GradientAnswer,
    LogprobAnswer,
    LogprobItem,
    ModelList,
    PerplexityAnswer,
    SelftestAnswer,
    SteerAnswer,
    SweepAnswer,
    TokenizeAnswer,
    VectorCard,
)

from .documents import (
    ATTRIBUTED,
    MODELS,
    PERPLEXITY,
    SCORE,
    SELFTEST,
    SWEEP,
    TOKENS,
    completion,
    logprob_answer,
    steer_answer,
    steering_receipt,
    target,
)

NASTY = "<script>alert('&')</script>\x1b[1m\u202e"
PROBE = {"name": "mood", "sha256": "ab" * 32, "layer": 2, "hook": "resid_post",
         "read": "projection", "before": [1.5, -3.0], "after": [2.5, -1.0]}  # fmt: skip


def scored(text: str, **more: Any) -> dict[str, Any]:
    """A target of two tokens with all that is read of them."""
    own = {
        "tokens": [f"{text}\n", NASTY], "token_ids": [3, 4], "logprobs": [-0.5, None],
        "ranks": [1, 7], "columns": {"entropy": [0.25, 0.5]}, "probes": [PROBE],
    }  # fmt: skip
    return target(text, -1.5, **own, **more)


LOGPROB = LogprobAnswer.model_validate(
    {**logprob_answer([scored(" glad"), scored(NASTY, boundary="merged")]),
     "steering": steering_receipt()}
)  # fmt: skip
WINDOWS = [
    {"text": 0, "start": 2 * k, "end": 2 * k + 2, "num_scored": 2, "sum_logprob": -1.0 - k,
     "sum_squared_logprob": 1.0} for k in range(3)
]  # fmt: skip
TEXT_TOKENS = {"positions": [1, 2], "token_ids": [5, 6], "tokens": ["a", "b"],
               "logprobs": [-1.0, -9.0]}  # fmt: skip


def perplexity(**more: Any) -> PerplexityAnswer:
    return PerplexityAnswer.model_validate({**PERPLEXITY, "results": [{**SCORE, **more}]})


def steered(**more: Any) -> SteerAnswer:
    answer = steer_answer(2, baseline=True)
    answer["results"][0]["completions"][0] |= more
    return SteerAnswer.model_validate(answer)


QUALITY = {"accuracy": 1.0, "auc": None, "pair_accuracy": 0.5}
CARD = VectorCard.model_validate(
    {
        "name": "mood", "sha256": "ab" * 32, "hook": "resid_post", "layers": [2, 3], "width": 4,
        "norms": {"2": 1.5, "3": 2.0}, "bytes": 9, "created": "now",
        "about": {
            "source": "training", "method": "pca", "quality": {"2": QUALITY, "3": QUALITY},
            "validation": {"folds": 4, "caution": "few pairs"},
            "recommendation": {"layer": 3, "scale": 2.0, "relative_norm": 0.2,
                               "recommended_by": "effect", "reason": "it is <best>"},
        },
    }
)  # fmt: skip
ANSWERS: dict[str, Any] = {
    "logprob": LOGPROB,
    "item": LOGPROB.results[0],
    "target": LOGPROB.results[0].targets[0],
    "perplexity": perplexity(windows=WINDOWS, tokens=TEXT_TOKENS),
    "text": perplexity(windows=WINDOWS).results[0],
    "steer": steered(probes=[PROBE]),
    "generate": GenerateAnswer.model_validate(steer_answer()),
    "prompt": steered().results[0],
    "completion": Completion.model_validate(completion("glad")),
    "sweep": SweepAnswer.model_validate(SWEEP),
    "receipt": steered().steering,
    "card": CARD,
    "log_prob": pair_records(["I am"], [" glad", " sad"], LOGPROB),
    "models": ModelList.model_validate(MODELS),
    "tokens": TokenizeAnswer.model_validate(TOKENS),
    "selftest": SelftestAnswer.model_validate(SELFTEST),
}


class Reader(HTMLParser):
    """Checks that tags close in order, and gathers tags, titles and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.titles: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not {name for name, _ in attributes} & {"href", "src", "onclick", "class"}
        self.titles += [value or "" for name, value in attributes if name == "title"]
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", ANSWERS)
def test_a_page_stands_for_itself(name: str) -> None:
    page = ANSWERS[name]._repr_html_()
    found = Reader(page)
    assert not {"script", "style", "link", "img", "iframe"} & found.tags
    assert "http" not in page and "url(" not in page
    assert "\x1b" not in page and "\u202e" not in page
    # The page's own colours show through: nothing sets the colour of text, or an opaque background.
    assert not re.findall(r"(?<![-\w])color:", page)
    assert not re.findall(r"background:#", page)


def test_a_heat_map_has_titles_and_a_legend() -> None:
    found = Reader(LOGPROB._repr_html_())
    first = next(title for title in found.titles if title.startswith("' glad\\n'"))
    lines = first.splitlines()
    assert {"surprisal 0.5", "probability 0.60653", "token_id 3", "rank 1", "entropy 0.25"} <= set(
        lines
    )
    assert "mood@2: projection 1.5" in lines and "mood@2: projection after 2.5" in lines
    assert "surprisal: 0" in found.text and "mood@2: projection: -3" in found.text
    assert "<script>alert('&')</script>\\x1b[1m\\u202e" in found.text
    assert "steered 5 tokens by mood x 2 (abababababab)" in found.text
    assert "choice_prob" in found.text and "merged" in found.text


def test_an_attribution_is_coloured_text() -> None:
    page = GradientAnswer.model_validate(ATTRIBUTED)._repr_html_()
    assert "attribution: -0.5" in page and "surprisal" not in page
    # Orange for what the target gains by a token, blue for what it loses, half as strong.
    assert 'background:rgba(222,84,30,0.600)" title="&#x27;I&#x27;' in page
    assert 'background:rgba(31,111,180,0.300)" title="&#x27; &lt;am&gt;&#x27;' in page


def test_a_page_is_bounded_and_says_what_is_left_out() -> None:
    count = 5_000
    long = {"tokens": ["x" * 1000] * count, "token_ids": [1] * count, "logprobs": [-1.0] * count,
            "columns": {f"column {n}": [0.5] * count for n in range(30)}}  # fmt: skip
    answer = logprob_answer([target("t", -1.0, **long)] * 30, *[[target("t", -1.0)] * 30] * 39)
    page = LogprobAnswer.model_validate(answer)._repr_html_()
    assert len(page) < 2_000_000
    assert page.count("surprisal 1\n") == TOKENS_SHOWN
    text = Reader(page).text
    assert f"and {count - TOKENS_SHOWN:,} more tokens" in text
    assert f"and {30 - PARTS_SHOWN} more sequences" in text
    assert f"and {30 + 39 * 30 - ROWS_SHOWN:,} more rows" in text


def test_windows_and_what_is_known_of_a_vector_are_told() -> None:
    assert "mean_logprob" in perplexity(windows=WINDOWS)._repr_html_()
    page = Reader(CARD._repr_html_()).text
    for words in (
        "4 folds",
        "mood is mood:2@3",
        "it is <best>",
        "nothing is recommended: few pairs",
    ):
        assert words in page


# ------------------------------------------------------------------ rows and tables


def test_rows_of_targets_and_tokens() -> None:
    first = list_rows(LOGPROB)[0]
    assert first.items() >= {
        "item": 0, "target": " glad", "choice_prob": 0.5, "best": True, "logprob": -1.5,
        "boundary": "exact", "flags": "",
    }.items()  # fmt: skip
    rows = list_rows(LOGPROB, "token")
    assert len(rows) == 4
    assert rows[0] == {
        "item": 0, "target": " glad", "place": 0, "token": " glad\n", "token_id": 3,
        "logprob": -0.5, "rank": 1, "entropy": 0.25, "mood@2: projection": 1.5,
        "mood@2: projection after": 2.5,
    }  # fmt: skip


def test_a_reading_belongs_to_the_token_that_was_read() -> None:
    name = "mood@2: projection"
    rows = list_rows(LOGPROB.results[0].targets[0])
    assert [(row["place"], row["token"], row[name]) for row in rows] == [
        (0, " glad\n", 1.5), (1, NASTY, -3.0),
    ]  # fmt: skip
    whole = PROBE | {"context_before": [7.0, 8.0], "context_after": [0.0, 9.0]}
    rows = list_rows(Completion.model_validate(completion("glad") | {"probes": [whole, PROBE]}))
    assert [row["place"] for row in rows] == [-2, -1, 0, 1]
    assert [row[name] for row in rows] == [7.0, 8.0, 1.5, -3.0]
    assert [row[f"{name} after"] for row in rows] == [0.0, 9.0, 2.5, -1.0]
    assert [row[f"{name} (2)"] for row in rows] == [None, None, 1.5, -3.0]
    # Of a text the places are positions.
    text = perplexity(tokens=TEXT_TOKENS | {"positions": [1, 4], "probes": [PROBE]})
    rows = list_rows(text, "token")
    assert [(row["position"], row["token"], row[name]) for row in rows] == [
        (1, "a", 1.5), (4, "b", -3.0),
    ]  # fmt: skip
    frame = text.to_pandas("token")
    assert frame[name].tolist()[0] == 1.5
    page = Reader(LOGPROB.results[0].targets[0]._repr_html_())
    titles = [title.splitlines() for title in page.titles]
    assert [title[0] for title in titles if f"{name} 1.5" in title] == [repr(" glad\n")] * 3
    assert len([title for title in titles if f"{name} -3" in title]) == 3


def test_the_usual_rows_are_the_finest_that_a_text_has() -> None:
    both = perplexity(windows=WINDOWS, tokens=TEXT_TOKENS)
    assert [row["position"] for row in list_rows(both)] == [1, 2]
    windows = list_rows(perplexity(windows=WINDOWS))
    assert [(row["text"], row["start"], row["mean_logprob"]) for row in windows] == [
        (0, 0, -0.5), (0, 2, -1.0), (0, 4, -1.5),
    ]  # fmt: skip
    assert list_rows(perplexity())[0]["perplexity"] == SCORE["perplexity"]
    with pytest.raises(LogsteerError, match="no windows: ask with windows=True"):
        list_rows(perplexity(), "window")
    with pytest.raises(LogsteerError, match="one per token or window or text"):
        list_rows(perplexity(), "target")


def test_rows_of_completions_sweeps_vectors() -> None:
    rows = list_rows(steered())
    assert [(row["completion"], row["steered"], row["text"]) for row in rows] == [
        (0, True, "glad 0"), (0, False, "sad 0"), (1, True, "glad 1"), (1, False, "sad 1"),
    ]  # fmt: skip
    assert len(list_rows(steered(), "token")) == 8
    sweep = list_rows(ANSWERS["sweep"])
    assert len(sweep) == 6 * 3
    assert sweep[0].items() >= {"layers": "2", "scale": -1, "target": 0, "change": -1.5}.items()
    assert sweep[2].items() >= {"text": 0, "perplexity": 3.0, "target": None}.items()
    assert [row["accuracy"] for row in list_rows(CARD)] == [1.0, 1.0]
    (card,) = list_rows(CARD, "vector")
    assert card["layers"] == "2-3" and card["method"] == "pca"


@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_is_a_table(name: str) -> None:
    answer = ANSWERS[name]
    frame = answer.to_pandas()
    assert len(frame) == len(list_rows(answer)) > 0
    for per in list_grains(type(answer)):
        if per not in ("token", "window") or name not in ("perplexity", "text"):
            assert list_rows(answer, per)


def test_without_pandas_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for answer in (LOGPROB, ANSWERS["log_prob"]):
        with pytest.raises(ImportError, match=r'pip install "logsteer\[tables\]"'):
            answer.to_pandas()


def test_numbers_of_items_stay_integers() -> None:
    frame = ANSWERS["sweep"].to_pandas()
    assert list(frame["target"].dropna().unique()) == [0, 1] and frame["target"].dtype == "Int64"
    assert frame["change"].dtype == "float64"


# ------------------------------------------------------------------ plots


def test_a_plot_shows_the_numbers_of_the_answer() -> None:
    window, so_far = ANSWERS["text"].plot().axes[0].lines
    assert list(window.get_xdata()) == [1.0, 3.0, 5.0]
    assert list(window.get_ydata()) == [0.5, 1.0, 1.5]
    assert list(so_far.get_ydata()) == [0.5, 0.75, 1.0]
    with pytest.raises(LogsteerError, match="windows=True"):
        perplexity().plot()


# ------------------------------------------------------------------ plots of sweeps


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

"""Plots of any answer: surprisal and readings along tokens, windows of a text, layers of a vector.

`Answer.plot()` comes here; sweeps and doses have plots of their own, in `plots`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logsteer._pairs import LogProbs
from logsteer.errors import LogsteerError
from logsteer.extras.dose_response import DoseResponse
from logsteer.extras.labels import shorten
from logsteer.extras.plots import (
    COLOURS,
    GREY,
    MARKERS,
    check_plot_path,
    dress_axes,
    escape_formula,
    finish_figure,
    plot_doses,
    plot_sweep,
    prepare_figure,
)
from logsteer.extras.strips import Strip, list_strips
from logsteer.schemas import (
    Completion,
    GenerateAnswer,
    ItemScore,
    LogprobAnswer,
    PerplexityAnswer,
    PromptCompletions,
    SteerAnswer,
    SweepAnswer,
    TargetScore,
    TextResult,
    TrainAnswer,
    VectorCard,
    WindowScore,
)
from logsteer.schemas.common import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_PANELS = 6
"""Sequences of tokens that one figure has room for."""
_MAX_NAMED = 60
"""Tokens that are written under their bars; more would not be read."""
_MAX_BARS = 40
_FEW_TOKENS = 3
"""Targets that are no longer than this are told by their sums."""
_WIDE = 8.0
_QUALITY = ("accuracy", "auc", "pair_accuracy")


def plot_answer(answer: Any, path: str | Path | None = None, **options: Any) -> Figure:
    """Draw an answer, write it to `path` where given, and return the figure.

    `options` are those of `plot_sweep` for a sweep. Raises LogsteerError without matplotlib, for a
    path that is no kind of picture, and for an answer that has nothing to draw.
    """
    if path is not None:
        check_plot_path(path)
    for kind in type(answer).__mro__:
        if kind in _PLOTS:
            return _PLOTS[kind](answer, path, **options)
    raise LogsteerError(f"{type(answer).__name__} has no plot")


def plot_windows(
    windows: Sequence[WindowScore], title: str, path: str | Path | None = None
) -> Figure:
    """Draw the mean surprisal of each window at the place of its scored tokens, and that so far."""
    if not windows:
        raise LogsteerError("there is no window to draw: the text is too short for its protocol")
    figure, (axes,) = prepare_figure(None, 1, None, width=_WIDE)
    places = [window.end - window.num_scored / 2 for window in windows]
    means = [_mean_surprisal([window]) for window in windows]
    marker = "o" if len(windows) <= _MAX_NAMED else ""
    axes.plot(places, means, marker=marker, markersize=3.5, color=COLOURS[0], label="window")
    axes.plot(places, _accumulate(windows), color=COLOURS[1], label="text so far", linewidth=1.6)
    axes.legend(fontsize=8, frameon=False)
    dress_axes(
        axes, "Mean surprisal of each window", "nats a token", "position in the text, tokens"
    )
    return finish_figure(figure, title, path)


def _accumulate(windows: Sequence[WindowScore]) -> list[float]:
    total, count, means = 0.0, 0, []
    for window in windows:
        total += math.nan if window.sum_logprob is None else -window.sum_logprob
        count += window.num_scored
        means.append(total / count if count else math.nan)
    return means


def _mean_surprisal(windows: Sequence[WindowScore]) -> float:
    sums = [window.sum_logprob for window in windows]
    count = sum(window.num_scored for window in windows)
    known = [one for one in sums if one is not None]
    return -math.fsum(known) / count if count and len(known) == len(sums) else math.nan


def _plot_strips(strips: Sequence[Strip], title: str, path: str | Path | None) -> Figure:
    """Draw a panel for each sequence: a bar a token, and lines of what probes have read."""
    shown = [strip for strip in strips if strip.tokens and strip.logprobs][:_MAX_PANELS]
    if not shown:
        raise LogsteerError("there are no tokens to draw: ask for them (per_token, tokens)")
    width = min(14.0, max(4.0, 0.24 * max(len(strip.tokens) for strip in shown)))
    figure, places = prepare_figure(None, len(shown), None, width=width, rows=len(shown))
    for axes, strip in zip(places, shown, strict=True):
        _draw_strip(axes, strip)
    left_out = len(strips) - len(shown)
    return finish_figure(figure, title + (f", {left_out} more" if left_out else ""), path)


def _draw_strip(axes: Axes, strip: Strip) -> None:
    tokens, probes = strip.tokens, strip.found.probes
    surprisals = [math.nan if value is None else -value for value in strip.logprobs]
    ticks = range(len(tokens))
    axes.bar(ticks, surprisals, color=COLOURS[0], alpha=0.75, width=0.85, label="surprisal")
    below = "token"
    if len(tokens) <= _MAX_NAMED:
        names = [escape_formula(repr(token)[1:-1].replace(" ", "·")) for token in tokens]
        axes.set_xticks(ticks, names, rotation=60, ha="right", fontsize=8)
        below = ""
    dress_axes(axes, shorten(strip.title), "surprisal, nats", below)
    if not probes:
        return
    right = axes.twinx()
    for place, probe in enumerate(probes[: len(COLOURS) - 1]):
        values = probe.before if probe.after is None else probe.after
        label = f"{probe.name or 'probe'} at layer {probe.layer}, {probe.read}"
        numbers = [math.nan if value is None else value for value in values]
        look: dict[str, Any] = {
            "color": COLOURS[place + 1],
            "marker": MARKERS[place],
            "markersize": 3,
        }
        right.plot(ticks, numbers, linewidth=1.2, label=escape_formula(label), **look)
    right.spines[["top"]].set_visible(False)
    right.set_ylabel("reading at the token in front")
    right.legend(fontsize=8, frameon=False)


def _plot_choices(
    names: Sequence[str], logprobs: Sequence[Float], path: str | Path | None
) -> Figure:
    """Draw a bar for each target's log-probability, the first on top."""
    count = min(len(names), _MAX_BARS)
    figure, (axes,) = prepare_figure(None, 1, None, width=6.0)
    figure.set_figheight(1.4 + 0.28 * count)
    values = [math.nan if value is None else value for value in logprobs[:count]]
    axes.barh(range(count), values, color=COLOURS[0], alpha=0.8)
    axes.set_yticks(range(count), [escape_formula(shorten(name)) for name in names[:count]])
    axes.invert_yaxis()
    dress_axes(axes, "", "", "log-probability, nats")
    rest = f", the first {count} of {len(names)}" if len(names) > count else ""
    return finish_figure(figure, f"Log-probabilities{rest}", path)


def _plot_records(records: LogProbs, path: str | Path | None) -> Figure:
    names = [f"{shorten(record.prompt)!r} {record.sequence!r}" for record in records]
    return _plot_choices(names, [record.log_prob for record in records], path)


def _plot_item(item: ItemScore, path: str | Path | None) -> Figure:
    """Draw the targets' tokens; where all are short, or have no tokens, a bar for each target."""
    longest = max(len(target.tokens or ()) for target in item.targets)
    probed = any(target.probes for target in item.targets)
    if longest <= (0 if probed or len(item.targets) == 1 else _FEW_TOKENS):
        names = [repr(target.target) for target in item.targets]
        return _plot_choices(names, [target.logprob for target in item.targets], path)
    return _plot_strips(list_strips(item), "Targets", path)


def _plot_logprob(answer: LogprobAnswer, path: str | Path | None) -> Figure:
    if len(answer.results) == 1:
        return _plot_item(answer.results[0], path)
    return _plot_strips(list_strips(answer), f"Targets on {answer.model}", path)


def _plot_text(text: TextResult, path: str | Path | None, name: str = "Text") -> Figure:
    title = f"{name}, perplexity {text.perplexity or math.nan:.5g}"
    if text.windows is not None:
        return plot_windows(text.windows, title, path)
    if text.tokens is None:
        raise LogsteerError("there is nothing to draw: ask with windows=True or tokens=True")
    return _plot_strips(list_strips(text), title, path)


def _plot_perplexity(answer: PerplexityAnswer, path: str | Path | None) -> Figure:
    if len(answer.results) == 1:
        return _plot_text(answer.results[0], path, f"Text on {answer.model}")
    if any(text.tokens is not None for text in answer.results):
        return _plot_strips(list_strips(answer), f"Texts on {answer.model}", path)
    names = [f"text {number}" for number in range(len(answer.results))]
    means = [
        None if text.sum_logprob is None or not text.num_scored
        else text.sum_logprob / text.num_scored
        for text in answer.results
    ]  # fmt: skip
    return _plot_choices(names, means, path)


def _title_completions(made: Any) -> str:
    model = getattr(made, "model", None)
    return "Completions" + (f" on {model}" if model else "")


def _plot_card(card: VectorCard, path: str | Path | None) -> Figure:
    """Draw how well each layer tells held-out texts apart, where that is known, and its norm."""
    quality = card.about.quality or {}
    figure, places = prepare_figure(None, 2 if quality else 1, None)
    layers = [int(layer) for layer in card.norms]
    places[-1].bar(layers, list(card.norms.values()), color=GREY, width=0.6)
    places[-1].set_xticks(layers)
    dress_axes(places[-1], "Norm of the vector", "", "layer")
    if quality:
        for place, name in enumerate(_QUALITY):
            known = {int(layer): getattr(one, name) for layer, one in quality.items()}
            values = [math.nan if known.get(one) is None else known[one] for one in layers]
            label = name.replace("_", " ")
            places[0].plot(layers, values, marker=MARKERS[place], color=COLOURS[place], label=label)
        places[0].axhline(0.5, color=GREY, linewidth=0.8, linestyle="--")
        places[0].set_xticks(layers)
        places[0].set_ylim(0, 1.04)
        places[0].legend(fontsize=8, frameon=False)
        dress_axes(places[0], "Held-out texts told apart", "share; 0.5 is chance", "layer")
    return finish_figure(figure, f"{card.name} ({card.sha256[:12]})", path)


_PLOTS: Mapping[type, Callable[..., Figure]] = {
    SweepAnswer: plot_sweep,
    DoseResponse: plot_doses,
    LogProbs: _plot_records,
    TargetScore: lambda one, path: _plot_strips(list_strips(one), "Target", path),
    ItemScore: _plot_item,
    LogprobAnswer: _plot_logprob,
    TextResult: _plot_text,
    PerplexityAnswer: _plot_perplexity,
    **dict.fromkeys(
        (Completion, PromptCompletions, SteerAnswer, GenerateAnswer),
        lambda one, path: _plot_strips(list_strips(one), _title_completions(one), path),
    ),
    VectorCard: _plot_card,
    TrainAnswer: lambda answer, path: _plot_card(answer.vector, path),
}

"""What is known of a vector, drawn for a terminal: quality by layer, readouts, what it is like."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from logsteer.cli.tables import draw_rows, show_number
from logsteer.extras.dose_response import DoseResponse
from logsteer.extras.labels import describe_card, label_layers
from logsteer.schemas import LayerQuality, TrainAnswer, VectorCard

_MAX_COMPARED = 16
"""Layers of a table of cosines that a terminal has room for."""


def draw_card(card: VectorCard) -> Iterator[Table | Text]:
    """Draw a row per layer of a vector, and what is known of it where it was trained."""
    quality = card.about.quality or {}
    heads = [">layer", ">norm"]
    if quality:
        heads += [">auc", ">effect", ">accuracy", ">pairs right", ">variance", ">scale to match"]
        heads += [">changes by"]
    rows = []
    for layer, norm in card.norms.items():
        cells = [layer, _show(norm)]
        if found := quality.get(layer):
            cells += _describe(found, norm)
        rows.append(cells)
    yield draw_rows(heads, rows)
    for line, style in describe_card(card):
        yield Text(line, style)
    if lines := describe_readouts(card):
        yield Text("\n".join(lines))


def _describe(quality: LayerQuality, norm: float) -> list[str]:
    numbers = [quality.auc, quality.effect_size, quality.accuracy]
    numbers += [quality.pair_accuracy, quality.explained_variance, quality.matching_scale]
    change = None
    if quality.matching_scale is not None and quality.activation_norm:
        change = abs(quality.matching_scale) * norm / quality.activation_norm
    return [*map(_show, numbers), "n/a" if change is None else f"{change:.1%}"]


def draw_likeness(answer: TrainAnswer) -> Iterator[Table | Text]:
    """Draw the cosines between the layers of a new vector, and to those stored."""
    layers = [str(layer) for layer in answer.vector.layers]
    if 1 < len(layers) <= _MAX_COMPARED:
        rows = [
            [layer, *map(_show_cosine, cosines)]
            for layer, cosines in zip(layers, answer.layer_cosines, strict=True)
        ]
        yield Text("cosine between layers")
        yield draw_rows([">layer", *(f">{layer}" for layer in layers)], rows)
    elif len(layers) > _MAX_COMPARED:
        yield Text(f"cosines between {len(layers)} layers: --json has them", "dim")
    similar = answer.similar
    rows = [
        [layer, ", ".join(f"{one.name} {_show_cosine(one.cosine)}" for one in found)]
        for layer, found in similar.layers.items()
        if found
    ]
    if rows:
        yield Text(f"cosine to the nearest of {similar.compared} stored vectors")
        yield draw_rows([">layer", "nearest"], rows)
    if similar.left_out:
        yield Text(f"{similar.left_out} stored vectors were not compared", "dim")


def draw_doses(response: DoseResponse) -> Iterator[Table | Text]:
    """Draw a row per scale of a vector's dose-response."""
    heads = [">scale", ">|change| /\n|activation|", ">preference\nnats", ">\nchange"]
    heads += [">positive\nchange", ">negative\nchange", ">positive\npreferred", ">\nKL"]
    rows = [
        [
            f"{point.scale:.4g}" if point.scale else "unsteered",
            "" if point.relative_norm is None else f"{point.relative_norm:.1%}",
            _fix(point.preference),
            *map(_fix, [point.preference_change, point.positive_change, point.negative_change]),
            f"{point.preferred:.0%}",
            _show(point.kl),
        ]
        for point in response.points
    ]
    places = "its own layers" if response.layers is None else label_layers(response.layers)
    yield Text(f"{response.name} at {places}, means over {response.num_pairs} pairs", "bold")
    yield draw_rows(heads, rows)


def _fix(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.3f}"


def describe_readouts(card: VectorCard) -> list[str]:
    """Return a line per layer about what a projection on the vector means, where that is known."""
    lines = []
    for layer, one in (card.readouts or {}).items():
        z = f"z = {_show(one.slope)} c {'-' if one.bias < 0 else '+'} {_show(abs(one.bias))}"
        if one.kind == "logistic":
            means = f"probability 1 / (1 + exp(-z)), {z}"
        else:
            means = f"activation z where z > {_show(one.threshold)}, else 0; {z}"
        lines.append(f"{card.name} at layer {layer}, projection c: {means}")
    return lines


def _show(value: float | None) -> str:
    return show_number(value, 4)


def _show_cosine(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"

"""How parts of answers are named, written and laid out, in terminals, notebooks and plots alike."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from logsteer.errors import LogsteerError
from logsteer.schemas import (
    AppliedParameters,
    LensAnswer,
    LensTarget,
    LogprobItem,
    PatchAnswer,
    SteeringReceipt,
    SweepAnswer,
    VectorCard,
)
from logsteer.schemas.common import Float

_LONGEST = 48
ItemLike = LogprobItem | Mapping[str, Any]


@dataclass(frozen=True)
class SweepLabels:
    """Names of each item's context, of each item's targets, and of each text."""

    contexts: list[str]
    targets: list[list[str]]
    texts: list[str]


def label_sweep(
    answer: SweepAnswer,
    items: Sequence[ItemLike] | None = None,
    texts: Sequence[str] | None = None,
) -> SweepLabels:
    """Return the labels: of `items` and `texts` where they are given, else numbers.

    Raises ValueError where the answer is not one to these items and texts.
    """
    found = answer.unsteered
    counts = [len(item.targets) for item in found.items]
    contexts = [f"item {n}" for n in range(1, len(counts) + 1)]
    targets = [[f"target {n}" for n in range(1, count + 1)] for count in counts]
    if items is not None:
        documents = [_document(item) for item in items]
        contexts = [_name_context(document) for document in documents]
        targets = [_name_targets(document) for document in documents]
    names = [f"text {n}" for n in range(1, len(found.texts) + 1)] if texts is None else list(texts)
    if [len(one) for one in targets] != counts or len(names) != len(found.texts):
        raise ValueError(
            f"the sweep has items with {counts} targets and {len(found.texts)} texts; these are "
            f"items with {[len(one) for one in targets]} targets and {len(names)} texts"
        )
    return SweepLabels(contexts, targets, [shorten(name) for name in names])


def label_layers(layers: Sequence[int] | None) -> str:
    """Write layers as in 1-3, 7, in ascending order; "own" for the vectors' own."""
    if layers is None:
        return "own"
    # Neighbours have the same difference from their place.
    places = enumerate(sorted(layers))
    runs = [[n for _, n in run] for _, run in groupby(places, lambda place: place[1] - place[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def describe_changes(answer: AppliedParameters) -> list[str]:
    """Return what an answer was computed under, where that is not the model as it is."""
    lines = []
    if (used := answer.adapter) is not None:
        lines.append(f"under adapter {used.name} ({used.sha256[:12]})")
    if (moved := answer.override) is not None:
        cast = f" in {moved.cast}" if moved.cast else ""
        lines.append(f"under override {moved.name} x {moved.eta:g}{cast} ({moved.sha256[:12]})")
    if (receipt := getattr(answer, "steering", None)) is not None:
        lines.append(describe_receipt(receipt))
    return lines


def describe_receipt(receipt: SteeringReceipt) -> str:
    """Return which vectors were applied, and to how many tokens."""
    used = ", ".join(
        f"{vector.name or 'a vector'} x {vector.scale:g} ({vector.sha256[:12]})"
        + ("" if vector.passed is None else f" where its condition held, at {vector.passed} tokens")
        for vector in receipt.vectors
    )
    return f"steered {receipt.tokens_steered} tokens by {used}"


def describe_card(card: VectorCard) -> Iterator[tuple[str, str]]:
    """Yield how a trained vector was measured, where to begin with it, and what projections on it
    mean, each line with the style that a terminal gives it.
    """
    if validation := card.about.validation:
        held = f"measured on pairs held out, {validation.folds} folds"
        yield held if validation.folds else f"nothing was held out: {validation.reason}", "dim"
        if validation.caution:
            yield f"nothing is recommended: {validation.caution}", "yellow"
    if advice := card.about.recommendation:
        yield f"{card.name} is {card.name}:{advice.scale:.3g}@{advice.layer}", "bold"
        yield advice.reason, ""
    for layer, one in (card.readouts or {}).items():
        sign = "-" if one.bias < 0 else "+"
        z = f"z = {one.slope:.4g} c {sign} {abs(one.bias):.4g}"
        means = f"probability 1 / (1 + exp(-z)), {z}"
        if one.kind == "relu":
            means = f"activation z where z > {one.threshold:.4g}, else 0; {z}"
        yield f"{card.name} at layer {layer}, projection c: {means}", ""


def show_value(value: Any) -> str:
    """Write a value of a row: a number with five digits, n/a for null."""
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def is_number(value: Any) -> bool:
    """Return whether a value of a row stands on the right of its column."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def pick_told(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without the columns that say nothing in any of them."""
    told = {name for row in rows for name, value in row.items() if value not in (None, "")}
    return [{name: value for name, value in row.items() if name in told} for row in rows]


def shorten(text: str) -> str:
    """Return the text, or its end where it is long: what is next to a target says most."""
    return text if len(text) <= _LONGEST else "…" + text[-_LONGEST + 1 :]


def _document(item: ItemLike) -> Mapping[str, Any]:
    return item.model_dump(exclude_unset=True) if isinstance(item, LogprobItem) else item


def _name_context(item: Mapping[str, Any]) -> str:
    if item.get("context") is not None:
        return shorten(repr(item["context"]))
    if item.get("messages"):
        last = item["messages"][-1]
        return shorten(repr(last["content"] if isinstance(last, Mapping) else last.content))
    return shorten(f"tokens {list(item.get('context_ids') or [])}")


def _name_targets(item: Mapping[str, Any]) -> list[str]:
    if item.get("targets") is not None:
        return [shorten(repr(target)) for target in item["targets"]]
    return [shorten(str(list(ids))) for ids in item.get("target_ids") or []]


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Values [layers][tokens], and what to call them.

    `marks` say more of each cell than its value. `signed` values are changes from 0;
    others run from 0 to 1.
    """

    title: str
    unit: str
    layers: list[str]
    tokens: list[str]
    values: list[list[Float]]
    marks: list[list[str]] | None = None
    signed: bool = False


def map_lens(target: LensTarget) -> LayerMap:
    """Return the probability of each of a target's tokens at each layer.

    Where alternatives were asked for, a cell is marked with the most probable token.
    """
    rows = target.layers.values()
    tops = [one.top.tokens for one in rows if one.top and one.top.tokens]
    marks = [[names[0] for names in tokens] for tokens in tops] or None
    return LayerMap(
        f"Lens on {target.target!r}",
        "probability of the token" + (", and the most probable one" if marks else ""),
        list(target.layers),
        target.tokens,
        [[None if value is None else math.exp(value) for value in one.logprobs] for one in rows],
        marks,
    )


def map_lens_answer(answer: LensAnswer) -> LayerMap:
    """Return the map of an answer's only target; LogsteerError where it has several or none."""
    targets = [target for item in answer.results for target in item.targets]
    if len(targets) != 1:
        raise LogsteerError(
            f"draw one of the {len(targets)} targets: answer.results[0].targets[0].plot()"
        )
    return map_lens(targets[0])


def map_patch(answer: PatchAnswer, pair: int = 0) -> LayerMap:
    """Return how each patch of a pair changes the metric, from that of the run patched into."""
    result = answer.results[pair]
    base = result.corrupted if answer.direction == "denoise" else result.clean
    changes: list[list[Float]] = [
        [None if value is None or base is None else value - base for value in row]
        for row in result.matrix
    ]
    into, other = ("corrupted", "clean")[:: 1 if answer.direction == "denoise" else -1]
    return LayerMap(
        f"{answer.hook} of the {other} run put into the {into} one",
        {"kl": "change of KL, nats"}.get(answer.metric, f"change of {answer.metric}, nats"),
        [label_layers(layers) for layers in result.layers],
        result.tokens,
        changes,
        signed=True,
    )

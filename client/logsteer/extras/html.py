"""Answers as notebooks show them: heat maps of tokens, bars of choices, receipts, tables.

A page is bounded: the first tokens, rows and parts of an answer, and a line that says how many
more there are.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from logsteer.extras.labels import label_layers
from logsteer.extras.markup import (
    PARTS_SHOWN,
    TOKENS_SHOWN,
    show_value,
    write_bars,
    write_beside,
    write_box,
    write_curve,
    write_head,
    write_heat,
    write_legend,
    write_note,
    write_rest,
    write_table,
    write_text,
)
from logsteer.extras.rows import list_rows, name_columns
from logsteer.schemas import (
    Completion,
    GenerateAnswer,
    ItemScore,
    LogprobAnswer,
    PerplexityAnswer,
    PromptCompletions,
    SteerAnswer,
    SteeringReceipt,
    SweepAnswer,
    TargetScore,
    TextResult,
    TrainAnswer,
    VectorCard,
)
from logsteer.schemas.common import Float, RowColumns
from logsteer.schemas.interventions import AppliedParameters

Parts: TypeAlias = Iterator[str]
_PROBES_SHOWN = 2
"""Readings that are drawn along the tokens."""
_COLUMNS_SHOWN = 24
"""Columns and readings in a token's title."""


class _Room:
    """Counts how many tokens of an answer may still be shown."""

    def __init__(self) -> None:
        self._left = TOKENS_SHOWN

    def take(self, count: int) -> int:
        """Return how many of so many tokens there is room for, and count them."""
        taken = min(self._left, count)
        self._left -= taken
        return taken


def write_html(answer: Any) -> str:
    """Return an answer as HTML that stands for itself; one without a drawing as a table."""
    for kind in type(answer).__mro__:
        if kind in _DRAWN:
            return write_box(_DRAWN[kind](answer))
    return write_box([write_table(list_rows(answer))])


def write_receipt(answer: AppliedParameters) -> Parts:
    """Yield what an answer was computed under, where that is not the model as it is."""
    if answer.adapter is not None:
        yield write_note(f"under adapter {answer.adapter.name} ({answer.adapter.sha256[:12]})")
    if (used := answer.override) is not None:
        yield write_note(f"under override {used.name} x {used.eta:g} ({used.sha256[:12]})")
    receipt: SteeringReceipt | None = getattr(answer, "steering", None)
    if receipt is not None:
        yield from _draw_receipt(receipt)


def _draw_receipt(receipt: SteeringReceipt) -> Parts:
    used = ", ".join(
        f"{vector.name or 'a vector'} x {vector.scale:g} ({vector.sha256[:12]})"
        + ("" if vector.passed is None else f", whose condition held at {vector.passed} tokens")
        for vector in receipt.vectors
    )
    yield write_text(f"steered {receipt.tokens_steered} tokens by {used}", "margin-top:.5em")
    rows = [
        {"layer": layer, "tokens": site.tokens, "|change| / |activation|": site.relative_norm}
        for layer, site in receipt.layers.items()
    ]
    yield write_table(rows)


def _draw_each(parts: Sequence[Any], noun: str, draw: Callable[[Any, _Room], Parts]) -> Parts:
    """Yield the first parts of an answer, each under its number where there are several."""
    room = _Room()
    for number, part in enumerate(parts[:PARTS_SHOWN]):
        if len(parts) > 1:
            yield write_head(f"{noun} {number}")
        yield from draw(part, room)
    yield write_rest(len(parts) - PARTS_SHOWN, f"{noun}s")


# ------------------------------------------------------------------ tokens


def _draw_tokens(
    tokens: Sequence[str],
    logprobs: Sequence[Float],
    found: RowColumns,
    room: _Room,
    places: Mapping[str, Sequence[int]],
) -> Parts:
    """Yield a heat map of surprisal, and one of what each of the first probes has read."""
    count = room.take(len(tokens))
    columns = dict([*places.items(), *name_columns(None, found).items()][:_COLUMNS_SHOWN])
    titles = [
        _title(tokens[place], logprobs[place], {name: v[place] for name, v in columns.items()})
        for place in range(count)
    ]
    surprisals = [None if value is None else -value for value in logprobs[:count]]
    yield write_heat(tokens[:count], surprisals, titles)
    for probe in (found.probes or [])[:_PROBES_SHOWN]:
        values = (probe.before if probe.after is None else probe.after)[:count]
        sizes = [abs(value) for value in values if value is not None and math.isfinite(value)]
        signed = max(sizes, default=0.0)
        if signed:
            yield write_legend(signed, f"{probe.name or 'probe'} at layer {probe.layer}")
            yield write_heat(tokens[:count], values, titles, signed=signed)
    yield write_rest(len(tokens) - count, "tokens")


def _title(token: str, logprob: Float, columns: Mapping[str, Any]) -> str:
    told = {"probability": None if logprob is None else math.exp(min(logprob, 0.0))}
    told |= {"surprisal": None if logprob is None else -logprob, **columns}
    return "\n".join([repr(token), *(f"{name} {show_value(v)}" for name, v in told.items())])


def _draw_target(target: TargetScore, room: _Room) -> Parts:
    logprob, count = show_value(target.logprob), target.num_tokens
    yield write_text(
        f"{show_value(repr(target.target))}: {logprob} nats, perplexity "
        f"{show_value(target.perplexity)}, {count} token{'s' if count != 1 else ''}"
    )
    if target.tokens is not None and target.logprobs is not None:
        ids = {"id": target.token_ids or [0] * len(target.tokens)}
        yield from _draw_tokens(target.tokens, target.logprobs, target, room, ids)
    remarks = list(target.flags)
    if target.boundary == "merged":
        remarks.append("joins tokens with the context's end")
    if target.truncated_tokens:
        remarks.append(f"{target.truncated_tokens} context tokens were dropped")
    if remarks:
        yield write_note("; ".join(remarks))


def _draw_item(item: ItemScore, room: _Room) -> Parts:
    names = [repr(target.target) for target in item.targets]
    notes = [f"{show_value(target.logprob)} nats" for target in item.targets]
    if len(names) > 1 and len(item.choice_probs) == len(names):
        yield write_bars(names, item.choice_probs, notes)
    for target in item.targets[:PARTS_SHOWN]:
        yield from _draw_target(target, room)
    yield write_rest(len(item.targets) - PARTS_SHOWN, "targets")


def _has_tokens(targets: Sequence[TargetScore]) -> bool:
    return any(target.tokens and target.logprobs for target in targets)


def _draw_scored_item(item: ItemScore) -> Parts:
    yield from _draw_item(item, _Room())
    if _has_tokens(item.targets):
        yield write_legend()


def _draw_scored_target(target: TargetScore) -> Parts:
    yield from _draw_target(target, _Room())
    if _has_tokens([target]):
        yield write_legend()


def _draw_logprob(answer: LogprobAnswer) -> Parts:
    yield from _draw_each(answer.results, "item", _draw_item)
    if any(_has_tokens(item.targets) for item in answer.results[:PARTS_SHOWN]):
        yield write_legend()
    yield from write_receipt(answer)


# ------------------------------------------------------------------ texts


def _draw_text(text: TextResult, room: _Room) -> Parts:
    total = f"perplexity {show_value(text.perplexity)}"
    if text.stderr is not None:
        total += f" ± {show_value(text.stderr)}"
    yield write_text(
        f"{total}, {show_value(text.bits_per_byte)} bits per byte, "
        f"{text.num_scored} of {text.num_tokens} tokens scored"
    )
    if text.flags:
        yield write_note("; ".join(text.flags))
    if text.windows is not None:
        rows = list_rows(text, "window")
        means = [row["mean_logprob"] for row in rows]
        surprisals = [None if mean is None else -mean for mean in means]
        yield write_curve(surprisals, f"mean surprisal of {len(rows)} windows")
    if (found := text.tokens) is not None:
        names = found.tokens or [f"{number} " for number in found.token_ids]
        places = {"position": found.positions, "id": found.token_ids}
        yield from _draw_tokens(names, found.logprobs, found, room, places)


def _draw_perplexity(answer: PerplexityAnswer) -> Parts:
    yield from _draw_each(answer.results, "text", _draw_text)
    if any(text.tokens is not None for text in answer.results[:PARTS_SHOWN]):
        yield write_legend()
    if len(answer.results) > 1:
        yield write_text(f"in total perplexity {show_value(answer.total.perplexity)}")
    if (apart := answer.divergence) is not None:
        yield write_text(
            f"KL from {apart.reference}: mean {show_value(apart.kl_mean)} nats a token, same most "
            f"probable token at {apart.top1_agreement:.1%}"
            if apart.top1_agreement is not None
            else f"compared with {apart.reference}"
        )
    yield from write_receipt(answer)


def _draw_one_text(text: TextResult) -> Parts:
    yield from _draw_text(text, _Room())
    if text.tokens is not None:
        yield write_legend()


# ------------------------------------------------------------------ continuations


def _draw_made(completion: Completion, room: _Room) -> Parts:
    ids = {"id": completion.token_ids}
    yield from _draw_tokens(completion.tokens, completion.logprobs, completion, room, ids)
    yield write_note(
        f"{completion.num_tokens} tokens, {completion.finish_reason}, "
        f"{show_value(completion.logprob)} nats, seed {completion.seed}"
    )


def _draw_completion(completion: Completion) -> Parts:
    yield from _draw_made(completion, _Room())
    yield write_legend()


def _draw_prompt(result: PromptCompletions, room: _Room) -> Parts:
    for number, completion in enumerate(result.completions[:PARTS_SHOWN]):
        steered = list(_draw_made(completion, room))
        if result.baseline is None:
            yield from steered
            continue
        plain = list(_draw_made(result.baseline[number], room))
        yield write_beside([[write_head("steered"), *steered], [write_head("unsteered"), *plain]])
    yield write_rest(len(result.completions) - PARTS_SHOWN, "completions")


def _draw_one_prompt(result: PromptCompletions) -> Parts:
    yield from _draw_prompt(result, _Room())
    yield write_legend()


def _draw_generated(answer: SteerAnswer | GenerateAnswer) -> Parts:
    yield from _draw_each(answer.results, "prompt", _draw_prompt)
    yield write_legend()
    yield from write_receipt(answer)


# ------------------------------------------------------------------ sweeps and vectors


def _draw_sweep(answer: SweepAnswer) -> Parts:
    groups: dict[str, list[Any]] = {}
    for point in answer.points:
        groups.setdefault(label_layers(point.layers), []).append(point)
    curves = []
    for layers, points in groups.items():
        ordered = sorted(points, key=lambda point: point.scale)
        scales = f"scales {ordered[0].scale:g} to {ordered[-1].scale:g}, layers {layers}"
        for number, item in enumerate(ordered[0].items):
            for place in range(len(item.targets)):
                values = [point.items[number].targets[place].change for point in ordered]
                curves.append((values, f"change of item {number}, target {place}, {scales}"))
        for number in range(len(ordered[0].texts)):
            values = [point.texts[number].perplexity for point in ordered]
            curves.append((values, f"perplexity of text {number}, {scales}"))
    for values, title in curves[:PARTS_SHOWN]:
        yield write_curve(values, title)
    yield write_rest(len(curves) - PARTS_SHOWN, "curves")
    rows = list_rows(answer)
    told = {name for row in rows for name, value in row.items() if value is not None}
    yield write_table([{name: row[name] for name in row if name in told} for row in rows])
    yield from write_receipt(answer)


def _draw_card(card: VectorCard) -> Parts:
    yield write_head(f"{card.name} ({card.sha256[:12]})")
    told = [card.about.source, card.about.method or "", card.about.read or ""]
    yield write_note(f"{card.hook}, width {card.width}; {' '.join(filter(None, told))}")
    rows = list_rows(card, "layer")
    told_columns = {name for row in rows for name, value in row.items() if value is not None}
    wanted = told_columns - {"name", "hook"}
    yield write_table([{name: row[name] for name in row if name in wanted} for row in rows])
    if (validation := card.about.validation) is not None:
        folds = validation.folds
        yield write_note(
            f"measured on pairs held out, {folds} folds"
            if folds
            else f"nothing was held out: {validation.reason}"
        )
    if (advice := card.about.recommendation) is not None:
        first, last = advice.scales
        place = f"scale {first:.3g} to {last:.3g} at layer {advice.layer}"
        yield write_text(f"try {place}: {advice.reason}")
        if advice.caution:
            yield write_text(f"caution: {advice.caution}")


def _draw_training(answer: TrainAnswer) -> Parts:
    yield from _draw_card(answer.vector)
    rows = [
        {"layer": layer, "nearest": one.name, "cosine": one.cosine}
        for layer, found in answer.similar.layers.items()
        for one in found
    ]
    if rows:
        yield write_note(f"nearest of {answer.similar.compared} stored vectors")
        yield write_table(rows)


_DRAWN: Mapping[type, Callable[[Any], Parts]] = {
    TargetScore: _draw_scored_target,
    ItemScore: _draw_scored_item,
    LogprobAnswer: _draw_logprob,
    TextResult: _draw_one_text,
    PerplexityAnswer: _draw_perplexity,
    Completion: _draw_completion,
    PromptCompletions: _draw_one_prompt,
    SteerAnswer: _draw_generated,
    GenerateAnswer: _draw_generated,
    SweepAnswer: _draw_sweep,
    SteeringReceipt: _draw_receipt,
    VectorCard: _draw_card,
    TrainAnswer: _draw_training,
}

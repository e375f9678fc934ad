"""Answers drawn as tables for a terminal."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from logsteer.schemas import (
    ItemScore,
    ModelList,
    PerplexityAnswer,
    TargetScore,
    TopAlternatives,
    VectorCard,
)
from logsteer.schemas.logprob import ScoredTarget
from logsteer.schemas.tokens import Encoded


def draw_models(answer: ModelList) -> Table:
    """A row per model."""
    table = _table("model", "engine", "state", ">context", ">vocabulary", "detail")
    for card in answer.models:
        sizes = [_plain(card.context_length), _plain(card.vocab_size)]
        table.add_row(*map(Text, [card.id, card.engine, card.state, *sizes, card.detail]))
    return table


def draw_scores(result: ItemScore) -> Iterator[Table | Text]:
    """A row per target, the best marked; then what is unusual, and alternatives where asked for."""
    spaces = any(target.variants for target in result.targets)
    heads = [">logprob", ">prob", ">perplexity", ">tokens", ">share"]
    table = _table("", "target", *heads, *([">any space"] if spaces else []))
    for index, target in enumerate(result.targets):
        best = index == result.best
        share = result.choice_probs[index] if index < len(result.choice_probs) else None
        cells = ["*" if best else "", repr(target.target), *_score_cells(target), _number(share)]
        if spaces:
            cells.append(_number(target.logprob_any_space))
        table.add_row(*map(Text, cells), style="bold" if best else None)
    yield table
    for target in result.targets:
        yield from map(Text, _remarks(target))
        if target.top is not None:
            yield _draw_alternatives(target, target.top)


def draw_perplexity(answer: PerplexityAnswer) -> Table:
    """A row per statistic of the whole."""
    total = answer.total
    table = _table("statistic", ">value")
    interval = "" if total.stderr is None else f" ± {_number(total.stderr)}"
    rows = {
        "perplexity": f"{_number(total.perplexity)}{interval}",
        "word perplexity": _number(total.word_perplexity),
        "byte perplexity": _number(total.byte_perplexity),
        "bits per byte": _number(total.bits_per_byte),
        "sum of logprobs": _number(total.sum_logprob),
        "tokens scored": f"{total.num_scored} of {total.num_tokens}",
        "words, bytes": f"{total.num_words}, {total.num_bytes}",
        "protocol": answer.provenance.protocol or "",
        "model": answer.model,
    }
    if total.flags:
        rows["flags"] = ", ".join(total.flags)
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def draw_tokens(encoded: Encoded) -> Table:
    """A row per token."""
    table = _table(">id", "token", ">start", ">end")
    for token_id, token, span in zip(
        encoded.token_ids, encoded.tokens, encoded.offsets, strict=True
    ):
        start, end = ("", "") if span is None else map(str, span)
        table.add_row(*map(Text, [str(token_id), repr(token), start, end]))
    return table


def draw_vectors(cards: Sequence[VectorCard]) -> Table:
    """A row per vector."""
    table = _table("name", "hook", "layers", ">width", "created", "from", "sha256")
    for card in cards:
        source = " ".join(filter(None, [card.about.source, card.about.method, card.about.format]))
        layers = _join_ranges(card.layers)
        cells = [card.name, card.hook, layers, str(card.width), card.created, source, card.sha256]
        table.add_row(*map(Text, cells))
    return table


def draw_layers(card: VectorCard) -> Table:
    """A row per layer of a vector, with its quality where it was trained."""
    quality = card.about.quality or {}
    heads = [">accuracy", ">auc", ">pairs right", ">variance"] if quality else []
    table = _table(">layer", ">norm", *heads)
    for layer, norm in card.norms.items():
        cells = [layer, _number(norm)]
        if found := quality.get(layer):
            numbers = [found.accuracy, found.auc, found.pair_accuracy, found.explained_variance]
            cells += map(_number, numbers)
        table.add_row(*map(Text, cells))
    return table


def _join_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers such as 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _draw_alternatives(target: ScoredTarget, top: TopAlternatives) -> Table:
    count = max(map(len, top.tokens), default=0)
    table = _table("token", *(f"#{rank}" for rank in range(1, count + 1)))
    table.title = Text(f"most probable at each token of {target.target!r}")
    for index, (tokens, logprobs) in enumerate(zip(top.tokens, top.logprobs, strict=True)):
        token = repr(target.tokens[index]) if target.tokens else str(index)
        cells = [
            f"{alternative!r} {_number(logprob)}"
            for alternative, logprob in zip(tokens, logprobs, strict=True)
        ]
        table.add_row(*map(Text, [token, *cells]))
    return table


def _remarks(target: ScoredTarget) -> Iterator[str]:
    name = repr(target.target)
    if target.boundary == "merged":
        yield f"{name}: joins tokens with the context's end; --boundary separate keeps them apart"
    if target.truncated_tokens:
        yield f"{name}: {target.truncated_tokens} context tokens were dropped"
    if target.flags:
        yield f"{name}: {', '.join(target.flags)}"
    if target.variants:
        with_space, without = target.variants.with_space, target.variants.without_space
        yield (
            f"{name}: logprob {_number(with_space.logprob)} with a leading space, "
            f"{_number(without.logprob)} without"
        )


def _score_cells(target: TargetScore) -> list[str]:
    numbers = [target.logprob, target.prob, target.perplexity]
    return [*map(_number, numbers), str(target.num_tokens)]


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    for head in heads:
        table.add_column(head.removeprefix(">"), justify="right" if head[:1] == ">" else "left")
    return table


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.5g}"


def _plain(value: int | None) -> str:
    return "" if value is None else str(value)

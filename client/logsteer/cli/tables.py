"""Answers drawn as tables for a terminal."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from logsteer.extras.labels import SweepLabels, describe_changes, label_layers
from logsteer.schemas import (
    AdapterCard,
    AppliedInterventions,
    AppliedParameters,
    ItemScore,
    ModelList,
    OverrideCard,
    PerplexityAnswer,
    Provenance,
    SelftestCheck,
    SweepAnswer,
    SweepPoint,
    TargetScore,
    TopAlternatives,
    VectorCard,
)
from logsteer.schemas.logprob import ScoredTarget
from logsteer.schemas.tokens import Encoded

_UNLIMITED = 10_000
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def draw_models(answer: ModelList) -> Table:
    """Draw a row per model."""
    table = start_table("model", "engine", "state", ">context", ">vocabulary", "detail")
    for card in answer.models:
        sizes = [_plain(card.context_length), _plain(card.vocab_size)]
        ready = sum(replica.state == "ready" for replica in card.replicas)
        state = (
            f"{card.state} {ready}/{len(card.replicas)}" if len(card.replicas) > 1 else card.state
        )
        table.add_row(*map(Text, [card.id, card.engine, state, *sizes, card.detail]))
    return table


def draw_scores(result: ItemScore) -> Iterator[Table | Text]:
    """Draw a row per target, the best marked; then what is unusual, and the alternatives."""
    spaces = any(target.variants for target in result.targets)
    heads = [">logprob", ">prob", ">perplexity", ">tokens", ">share"]
    table = start_table("", "target", *heads, *([">any space"] if spaces else []))
    for index, target in enumerate(result.targets):
        best = index == result.best
        share = result.choice_probs[index] if index < len(result.choice_probs) else None
        cells = [
            "*" if best else "",
            repr(target.target),
            *_score_cells(target),
            show_number(share),
        ]
        if spaces:
            cells.append(show_number(target.logprob_any_space))
        table.add_row(*map(Text, cells), style="bold" if best else None)
    yield table
    for target in result.targets:
        yield from map(Text, _remarks(target))
        if target.top is not None:
            yield _draw_alternatives(target, target.top)


def draw_perplexity(answer: PerplexityAnswer) -> Table:
    """Draw a row per statistic of the whole."""
    total = answer.total
    interval = "" if total.stderr is None else f" ± {show_number(total.stderr)}"
    rows = {
        "perplexity": f"{show_number(total.perplexity)}{interval}",
        "word perplexity": show_number(total.word_perplexity),
        "byte perplexity": show_number(total.byte_perplexity),
        "bits per byte": show_number(total.bits_per_byte),
        "sum of logprobs": show_number(total.sum_logprob),
        "tokens scored": f"{total.num_scored} of {total.num_tokens}",
        "words, bytes": f"{total.num_words}, {total.num_bytes}",
        "protocol": _describe_windows(answer.provenance),
        "model": answer.model,
    }
    if total.flags:
        rows["flags"] = ", ".join(total.flags)
    return draw_rows(["statistic", ">value"], rows.items())


def _describe_windows(made: Provenance) -> str:
    """Write how a text was cut: `exl3, windows of 2048 tokens, stride 2048, at most 100`."""
    if made.protocol is None:
        return ""
    rows = "" if made.rows is None else f", at most {made.rows}"
    if made.context_length is None:  # a server that does not say it
        return made.protocol
    return f"{made.protocol}, windows of {made.context_length} tokens, stride {made.stride}{rows}"


def draw_tokens(encoded: Encoded) -> Table:
    """Draw a row per token."""
    spans = [span or ("", "") for span in encoded.offsets]
    return draw_rows(
        [">id", "token", ">start", ">end"],
        (
            [str(number), repr(token), *map(str, span)]
            for number, token, span in zip(encoded.token_ids, encoded.tokens, spans, strict=True)
        ),
    )


def draw_rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Draw rows of cells; a column whose head begins with > stands on the right."""
    table = start_table(*heads)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def draw_vectors(cards: Sequence[VectorCard]) -> Table:
    """Draw a row per vector."""
    return draw_rows(
        ["name", "hook", "layers", ">width", "created", "from", "sha256"],
        (
            [
                card.name, card.hook, label_layers(card.layers), str(card.width),
                _show_time(card.created),
                " ".join(filter(None, [card.about.source, card.about.method, card.about.format])),
                card.sha256[:12],
            ]
            for card in cards
        ),
    )  # fmt: skip


def draw_adapters(cards: Sequence[AdapterCard]) -> Table:
    """Draw a row per adapter."""
    return draw_rows(
        ["name", "model", ">rank", ">alpha", "modules", "created", "sha256"],
        (
            [
                card.name, card.model, str(card.rank), show_number(card.alpha),
                ", ".join(card.modules), _show_time(card.created), card.sha256[:12],
            ]
            for card in cards
        ),
    )  # fmt: skip


def draw_overrides(cards: Sequence[OverrideCard]) -> Table:
    """Draw a row per direction of the parameters."""
    return draw_rows(
        ["name", "model", ">tensors", ">moved", ">norm", "created", "sha256"],
        (
            [
                card.name, card.model, str(card.tensors), f"{card.moved} of {card.total}",
                show_number(card.norm), _show_time(card.created), card.sha256[:12],
            ]
            for card in cards
        ),
    )  # fmt: skip


_WHOLE = ("name", "created", "sha256", ">scale")
"""Columns that are not broken while others can be."""
_VERDICT_STYLES = {"passed": "green", "failed": "bold red", "not_run": "yellow"}


def draw_checks(checks: Sequence[SelftestCheck]) -> Table:
    """Draw a row per check of a self-test: its promise, and under it what was measured."""
    table = start_table("check", ">values", ">largest", ">limit", "verdict")
    for column in table.columns[1:]:
        column.no_wrap = True
    for check in checks:
        promise = Text.assemble((check.name, "bold"), f" {check.promise}")
        largest = check.largest_difference
        verdict = check.verdict.replace("_", " ")
        table.add_row(
            promise.append(f"\n{check.reason}", "dim"),
            str(check.num_compared or ""),
            "" if largest is None else f"{largest:.1e}" if largest else "0",
            f"{check.tolerance:.1e}",
            Text(verdict, _VERDICT_STYLES[check.verdict]),
        )
    return table


def draw_changes(answer: AppliedParameters) -> Iterator[Table | Text]:
    """Draw what an answer was computed under, and what steering did at each layer."""
    yield from map(Text, describe_changes(answer))
    if isinstance(answer, AppliedInterventions) and answer.steering is not None:
        yield draw_rows(
            ["layer", ">tokens", ">|change| / |activation|"],
            (
                [layer, str(site.tokens), show_number(site.relative_norm)]
                for layer, site in answer.steering.layers.items()
            ),
        )


def draw_sweep(answer: SweepAnswer, labels: SweepLabels) -> RenderableType:
    """Draw a row per set of layers and scale: one table where it fits, else one for each item."""
    whole = _Columns("", [f"perplexity\n{name}" for name in labels.texts], _text_cells)
    whole.heads.append("|change| /\n|activation|")
    items = [
        _Columns(context, _item_heads(targets), partial(_item_cells, index))
        for index, (context, targets) in enumerate(
            zip(labels.contexts, labels.targets, strict=True)
        )
    ]
    tables = [_draw_points(answer, one.title, [one]) for one in [*items, whole]]
    if len(items) != 1:
        return Group(*tables)
    return _Fitting(_draw_points(answer, items[0].title, [*items, whole]), Group(*tables))


@dataclass
class _Fitting:
    """The wide one of two, where the terminal is wide enough; else the narrow one."""

    wide: Table
    narrow: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(width=_UNLIMITED)
        fits = Measurement.get(console, unlimited, self.wide).maximum <= options.max_width
        yield self.wide if fits else self.narrow


def _draw_points(answer: SweepAnswer, title: str, columns: Sequence["_Columns"]) -> Table:
    with_layers = any(point.layers is not None for point in answer.points)
    heads = [">scale", *(f">{head}" for one in columns for head in one.heads)]
    table = start_table(*(["layers"] if with_layers else []), *heads)
    table.title = Text(title) if title else None
    for column in table.columns:
        column.overflow = "fold"
    # Scale 0 is unsteered: it is told once.
    plain = [answer.unsteered] if all(point.scale for point in answer.points) else []
    for point in [*plain, *answer.points]:
        layers = [Text("-" if point.layers is None else label_layers(point.layers))]
        cells = [Text(f"{point.scale:g}" if point.scale else "unsteered")]
        cells += [cell for one in columns for cell in one.write(point)]
        style = None if point.scale else "bold"
        table.add_row(*(layers if with_layers else []), *cells, style=style)
    return table


@dataclass
class _Columns:
    """Columns of a sweep's table, and what they show of a point."""

    title: str
    heads: list[str]
    write: Callable[[SweepPoint], list[Text]]


def _item_heads(targets: Sequence[str]) -> list[str]:
    return [head for name in targets for head in (f"{name}\nlogprob", "\nchange")] + ["\nKL"]


def _item_cells(index: int, point: SweepPoint) -> list[Text]:
    item = point.items[index]
    cells = []
    for target in item.targets:
        change = "n/a" if target.change is None else f"{target.change:+.3f}"
        style = "green" if (target.change or 0) > 0 else "red" if target.change else ""
        cells += [Text(_fix(target.logprob)), Text(change if point.scale else "", style)]
    return [*cells, Text("n/a" if item.kl is None else f"{item.kl:.3g}")]


def _text_cells(point: SweepPoint) -> list[Text]:
    return [
        *(Text(show_number(text.perplexity)) for text in point.texts),
        Text(_fix(point.relative_norm)),
    ]


def _fix(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _show_time(created: str) -> str:
    """Write a time of RFC 3339 to the minute, in UTC as it comes."""
    return created[:16].replace("T", " ")


def show_number(value: float | None, digits: int = 5) -> str:
    """Write a number with so many significant digits."""
    return "n/a" if value is None else f"{value:.{digits}g}"


def escape_controls(text: str) -> str:
    """Write control characters out: a model's output must not steer a terminal."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def _draw_alternatives(target: ScoredTarget, top: TopAlternatives) -> Table:
    count = max(map(len, top.tokens), default=0)
    table = start_table("token", *(f"#{rank}" for rank in range(1, count + 1)))
    table.title = Text(f"most probable at each token of {target.target!r}")
    for index, (tokens, logprobs) in enumerate(zip(top.tokens, top.logprobs, strict=True)):
        token = repr(target.tokens[index]) if target.tokens else str(index)
        cells = [
            f"{alternative!r} {show_number(logprob)}"
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
            f"{name}: logprob {show_number(with_space.logprob)} with a leading space, "
            f"{show_number(without.logprob)} without"
        )


def _score_cells(target: TargetScore) -> list[str]:
    numbers = [target.logprob, target.prob, target.perplexity]
    return [*map(show_number, numbers), str(target.num_tokens)]


def start_table(*heads: str) -> Table:
    """Return a table without rows; a column whose head begins with > stands on the right."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    for head in heads:
        # As Text, because what looks like rich's markup is data.
        name = Text(head.removeprefix(">"))
        right = head[:1] == ">"
        table.add_column(name, justify="right" if right else "left", no_wrap=head in _WHOLE)
    return table


def _plain(value: int | None) -> str:
    return "" if value is None else str(value)

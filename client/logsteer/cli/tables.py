"""Answers drawn as tables for a terminal, most of them from their rows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from rich import box
from rich.table import Table
from rich.text import Text

from logsteer.extras.labels import describe_card, describe_changes, is_number, pick_told, show_value
from logsteer.extras.rows import FlatRow, list_rows
from logsteer.schemas import (
    AdapterCard,
    AdapterList,
    AppliedInterventions,
    AppliedParameters,
    ItemScore,
    ModelList,
    OverrideCard,
    OverrideList,
    PerplexityAnswer,
    Provenance,
    SaeCard,
    SaeList,
    SelftestCheck,
    SweepAnswer,
    TokenizeAnswer,
    TrainAnswer,
    VectorCard,
    VectorList,
)
from logsteer.schemas.common import Aggregate

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_QUOTED = ("token", "target")
"""Columns whose white space says something."""
_WHOLE = ("name", "sha256", "scale")
"""Columns that are not broken while others can be."""
_DIGITS_OF_DIGEST = 12
_LONG = 9
_VERDICT_STYLES = {"passed": "green", "failed": "bold red", "not_run": "yellow"}
_STORED = ("created", "sha256")
_SCORED = ("target", "logprob", "prob", "perplexity", "num_tokens", "choice_prob", "best")
_SPACES = ("logprob_with_space", "logprob_without_space", "logprob_any_space")
_LAYER = ("layer", "norm", "auc", "effect_size", "accuracy", "pair_accuracy", "matching_scale")
_COLUMNS: Mapping[type, tuple[str, ...]] = {
    ModelList: ("id", "engine", "state", "replicas", "context_length", "vocab_size", "detail"),
    VectorList: ("name", "hook", "layers", "source", "method", *_STORED),
    **dict.fromkeys(
        (AdapterList, AdapterCard), ("name", "model", "rank", "alpha", "modules", *_STORED)
    ),
    **dict.fromkeys(
        (OverrideList, OverrideCard),
        ("name", "model", "tensors", "moved", "total", "norm", *_STORED),
    ),
    **dict.fromkeys(
        (SaeList, SaeCard), ("name", "architecture", "hook", "layer", "features", "k", *_STORED)
    ),
    TokenizeAnswer: ("token_id", "token", "start", "end"),
}
"""Answer -> the columns of its rows that a terminal has room for; all of any other."""


def draw_answer(answer: Any, per: str | None = None) -> Table:
    """Draw the rows of an answer, of the grain `per`; of its usual one for None."""
    return draw_rows(list_rows(answer, per), *_COLUMNS.get(type(answer), ()))


def draw_rows(rows: Sequence[FlatRow], *names: str) -> Table:
    """Draw rows, numbers on the right: these columns, or all, but for empty ones."""
    kept = pick_told([{name: row.get(name) for name in names or row} for row in rows])
    heads = list(dict.fromkeys(name for row in kept for name in row))
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    for name in heads:
        cells = [_write_cell(name, row.get(name)) for row in kept]
        is_right = any(is_number(row.get(name)) for row in kept)
        table.add_column(
            # As Text, because what looks like rich's markup is data; in words, which are wrapped.
            Text(name if "@" in name or len(name) < _LONG else name.replace("_", " ")),
            justify="right" if is_right else "left",
            # A name that is cut off may be another's, too; a number is never broken.
            overflow="fold",
            no_wrap=name in _WHOLE,
            min_width=max(map(len, cells)) if is_right else None,
        )
    for row in kept:
        table.add_row(*(Text(_write_cell(name, row.get(name))) for name in heads))
    return table


def _write_cell(name: str, value: Any) -> str:
    if name in _QUOTED and isinstance(value, str):
        return repr(value)
    if name == "created":  # to the minute, in UTC as it comes
        return str(value)[:16].replace("T", " ")
    text = escape_controls(show_value(value))
    return text[:_DIGITS_OF_DIGEST] if name == "sha256" else text


def draw_tokens(found: Any) -> Table:
    """Draw a row for each token of a scored target or a completion, and what was read of it."""
    rows = list_rows(found, "token")
    hidden = ("place", "token_id")
    return draw_rows([{name: row[name] for name in row if name not in hidden} for row in rows])


def draw_aggregates(aggregates: Mapping[str, Aggregate]) -> Table:
    """Draw a row for each column of a sequence."""
    rows = [{"over the tokens": name, **one.model_dump()} for name, one in aggregates.items()]
    return draw_rows(rows)


def draw_scores(result: ItemScore) -> Iterator[Table | Text]:
    """Draw a row per target; then what is unusual, and the alternatives."""
    cut = ["truncated_tokens"] if any(target.truncated_tokens for target in result.targets) else []
    rows = list_rows(result, "target")
    yield draw_rows(rows, *_SCORED, *cut, "flags")
    if any(target.variants for target in result.targets):
        yield draw_rows(rows, "target", *_SPACES)
    for target in result.targets:
        if target.boundary == "merged":
            yield Text(
                f"{target.target!r}: joins tokens with the context's end"
                f"{', so it is not compared with the others' if result.flags else ''}; "
                "--boundary separate keeps them apart"
            )
        if target.top is not None:
            yield Text(f"most probable at each token of {target.target!r}")
            yield draw_rows([
                {"token": token} | {
                    f"#{rank}": f"{name!r} {show_value(logprob)}"
                    for rank, (name, logprob) in enumerate(zip(*top, strict=True), 1)
                }
                for token, *top in zip(target.tokens or target.top.token_ids, target.top.tokens,
                                       target.top.logprobs, strict=True)
            ])  # fmt: skip


def draw_diagnostics(result: ItemScore, with_tokens: bool) -> Iterator[Table | Text]:
    """Draw what was read of each target: a row for each token if wanted, and the aggregates."""
    for target in result.targets:
        yield Text(
            f"{target.target!r}: logprob {show_value(target.logprob)}, perplexity "
            f"{show_value(target.perplexity)}, {target.num_tokens} tokens",
            "bold",
        )
        if with_tokens or target.probes is not None:
            yield draw_tokens(target)
        if target.aggregates is not None:
            yield draw_aggregates(target.aggregates)


def draw_perplexity(answer: PerplexityAnswer) -> Table:
    """Draw a row per statistic of the whole."""
    made = {"protocol": _describe_windows(answer.provenance), "model": answer.model}
    return draw_statistics(answer.total, made)


def draw_statistics(found: BaseModel, more: Mapping[str, Any] = MappingProxyType({})) -> Table:
    """Draw a row per field of a message that has a value of its own."""
    fields = {name: ", ".join(v) if isinstance(v, list) else v for name, v in found}
    rows = [
        {"statistic": name, "value": show_value(value)}
        for name, value in {**fields, **more}.items()
        if value not in (None, "") and not isinstance(value, BaseModel | dict)
    ]
    return draw_rows(rows)


def _describe_windows(made: Provenance) -> str:
    """Write how a text was cut: `exl3, windows of 2048 tokens, stride 2048, at most 100`."""
    if made.protocol is None or made.context_length is None:  # a server that does not say it
        return made.protocol or ""
    rows = "" if made.rows is None else f", at most {made.rows}"
    return f"{made.protocol}, windows of {made.context_length} tokens, stride {made.stride}{rows}"


def draw_card(answer: VectorCard | TrainAnswer) -> Iterator[Table | Text]:
    """Draw a row per layer of a vector, what is known of it, and the vectors it resembles."""
    yield draw_rows(list_rows(answer, "layer"), *_LAYER)
    card = answer.vector if isinstance(answer, TrainAnswer) else answer
    for line, style in describe_card(card):
        yield Text(line, style)
    if isinstance(answer, TrainAnswer) and (near := list_rows(answer, "neighbour")):
        yield Text(f"cosine to the nearest of {answer.similar.compared} stored vectors")
        yield draw_rows(near)
    if isinstance(answer, TrainAnswer) and answer.similar.left_out:
        yield Text(f"{answer.similar.left_out} stored vectors were not compared", "dim")


def draw_checks(checks: Sequence[SelftestCheck]) -> Table:
    """Draw a row per check of a self-test: its promise, and under it what was measured."""
    table = Table("check", box=box.SIMPLE_HEAD)
    for name in ("values", "largest", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
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
        yield draw_answer(answer.steering)


def draw_sweep(answer: SweepAnswer, rows: Sequence[FlatRow]) -> Iterator[Table]:
    """Draw a row for each target, and one for each text, at each scale and set of layers."""
    where = ("layers", "scale", "relative_norm")
    if answer.unsteered.items:
        items = [row | {"continuation": row["target"]} for row in rows if row["item"] is not None]
        yield draw_rows(items, *where, "item", "continuation", "logprob", "change", "kl")
    if answer.unsteered.texts:
        texts = [row for row in rows if row["text"] is not None]
        yield draw_rows(texts, *where, "text", "perplexity")


def escape_controls(text: str) -> str:
    """Write control characters out: a model's output must not steer a terminal."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)

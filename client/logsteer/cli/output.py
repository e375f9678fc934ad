"""How a command gives its answer: tables and text, JSON, or rows for other programs."""

import argparse
import csv
import json
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from logsteer.cli.arguments import FORMATS, ROW_FORMATS, TerminalConsole
from logsteer.errors import LogsteerError
from logsteer.extras.labels import describe_card, describe_changes, is_number, pick_told, show_value
from logsteer.extras.plots import check_plot_path, plot_answer
from logsteer.extras.rows import FlatRow, list_completions, list_rows
from logsteer.schemas import (
    AdapterList,
    AppliedInterventions,
    AppliedParameters,
    CaptureList,
    Completion,
    GenerateAnswer,
    ItemScore,
    ModelList,
    OverrideList,
    PromptCompletions,
    Provenance,
    SaeList,
    SelftestCheck,
    SteerAnswer,
    SteerPiece,
    SweepAnswer,
    TokenizeAnswer,
    TrainAnswer,
    VariantList,
    VectorCard,
    VectorList,
)
from logsteer.schemas.common import Aggregate


def wants_json(arguments: argparse.Namespace) -> bool:
    """Return whether something else than tables is printed."""
    return choose_format(arguments) != "table"


def choose_format(arguments: argparse.Namespace) -> str:
    """Return the format that was asked for, by a flag or by the name of the file."""
    if getattr(arguments, "json", False):
        return "json"
    if arguments.output_format is not None:
        return str(arguments.output_format)
    suffix = Path(arguments.output or "").suffix.lstrip(".").lower()
    return suffix if suffix in FORMATS else "table"


def check_output(arguments: argparse.Namespace) -> None:
    """Check the options of a command's answer before any request.

    Exits with 2 where they do not go together. Raises LogsteerError where something is missing.
    """
    form, file = choose_format(arguments), arguments.output
    if getattr(arguments, "json", False) and arguments.output_format not in (None, "json"):
        arguments.refuse(
            f"--json and --format {arguments.output_format} are two formats: leave out one"
        )
    if file is not None and form == "table" and arguments.output_format is None:
        arguments.refuse(
            f"--output {file}: give --format, or a name that ends in one of {ROW_FORMATS}"
        )
    if arguments.per is not None and form not in ROW_FORMATS:
        arguments.refuse("--per goes with --format jsonl or csv")
    if file is not None and not Path(file).absolute().parent.is_dir():
        raise LogsteerError(f"{file}: there is no directory {Path(file).absolute().parent}")
    if arguments.plot:
        check_plot_path(arguments.plot)


def show(
    arguments: argparse.Namespace,
    answer: BaseModel,
    *tables: Any,
    rows: Callable[[], Sequence[FlatRow]] | None = None,
    draw: Callable[[str], object] | None = None,
) -> None:
    """Print the tables, or the answer in the format asked for; then draw the plot asked for.

    Below the tables is what the answer was computed under.

    `rows` gives its rows, and `draw` its plot, in place of the class's own.
    """
    form, plot = choose_format(arguments), arguments.plot
    if form == "table":
        changes = draw_changes(answer) if isinstance(answer, AppliedParameters) else ()
        _print_tables(arguments, [*tables, *changes])
    elif form == "json":
        with _open_output(arguments) as file:
            file.write(answer.model_dump_json(indent=2) + "\n")
    else:
        _write_rows(arguments, list_rows(answer, arguments.per) if rows is None else rows())
    if plot:
        (draw or (lambda path: plot_answer(answer, path)))(plot)
        if form == "table" and arguments.output is None:
            _print_tables(arguments, [Text(f"plot: {plot}")])


def _print_tables(arguments: argparse.Namespace, tables: Iterable[Any]) -> None:
    with _open_output(arguments) as file:
        console = TerminalConsole(file=None if file is sys.stdout else file)
        for table in tables:
            console.print(table)


def _open_output(arguments: argparse.Namespace) -> Any:
    if arguments.output is None:
        return nullcontext(sys.stdout)  # which does not end with the context
    return Path(arguments.output).open("w", encoding="utf-8", newline="")


def _write_rows(arguments: argparse.Namespace, rows: Sequence[FlatRow]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with _open_output(arguments) as file:
        if choose_format(arguments) == "jsonl":
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            return
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_write_csv_cell(row.get(name)) for name in names] for row in rows)


def _write_csv_cell(value: Any) -> Any:
    """Return a value as CSV has it: as JSON where it is no text or number, empty for null."""
    return json.dumps(value) if isinstance(value, bool | list | dict) else value


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
_LAYER = ("layer", "norm", "auc", "accuracy", "pair_accuracy", "scale", "gain", "harm")
_COLUMNS: Mapping[type, tuple[str, ...]] = {
    ModelList: ("id", "engine", "state", "replicas", "context_length", "vocab_size", "detail"),
    VectorList: ("name", "hook", "layers", "source", "method", *_STORED),
    AdapterList: ("name", "model", "rank", "alpha", "modules", *_STORED),
    OverrideList: ("name", "model", "tensors", "moved", "total", "norm", *_STORED),
    VariantList: ("name", "model", "steering", "adapter", "override", "description", *_STORED),
    SaeList: ("name", "architecture", "hook", "layer", "features", "k", *_STORED),
    CaptureList: (
        "name",
        "state",
        "model",
        "layers",
        "hook",
        "documents",
        "rows",
        "bytes",
        "error",
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
        if target.boundary == "no_context":
            yield Text(f"{target.target!r}: nothing precedes its first token, which is not scored")
        if target.top is not None and target.top.tokens:
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


def draw_statistics(found: BaseModel, more: Mapping[str, Any] = MappingProxyType({})) -> Table:
    """Draw a row per field of a message that has a value of its own."""
    fields = {name: ", ".join(v) if isinstance(v, list) else v for name, v in found}
    rows = [
        {"statistic": name, "value": show_value(value)}
        for name, value in {**fields, **more}.items()
        if value not in (None, "") and not isinstance(value, BaseModel | dict)
    ]
    return draw_rows(rows)


def describe_windows(made: Provenance) -> str:
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


def draw_generated(
    answer: SteerAnswer | GenerateAnswer, prompts: Sequence[str]
) -> Iterator[Table | Text]:
    """Draw a row per completion of each prompt, and under them what was read of each."""
    for number, result in enumerate(answer.results):
        if len(prompts) > 1:
            yield Text(repr(prompts[number]), "bold")
        yield _draw_completions(result, isinstance(answer, SteerAnswer))
        for which, completion in list_completions(result):
            if found := list(draw_read(completion)):
                name = {None: "", True: "steered ", False: "unsteered "}[which.get("steered")]
                yield Text(f"{name}completion {which['completion']}", "bold")
                yield from found


def draw_grown(answer: SteerAnswer | GenerateAnswer) -> Iterator[Table | Text]:
    """Draw how the one completion that was shown as it came has ended, and what was read of it."""
    (completion,) = answer.results[0].completions
    yield Text(_sum_up(completion), "dim")
    yield from draw_read(completion)


def draw_read(completion: Completion) -> Iterator[Table | Text]:
    """Draw a row per token of what was read beside the log-probabilities, and the aggregates."""
    read = (completion.columns, completion.ranks, completion.probes)
    if any(found is not None for found in read):
        yield draw_tokens(completion)
    if completion.aggregates is not None:
        yield draw_aggregates(completion.aggregates)


def stream_one(
    events: Generator[Any, None, None], console: Console, prompt: str
) -> SteerAnswer | GenerateAnswer:
    """Return the answer; print the prompt and its completion as pieces come."""
    shown = False
    try:
        for event in events:
            if not shown:
                # The prompt waits for the first event, so that a refusal stands alone.
                console.out(escape_controls(prompt), style="dim", end="", highlight=False)
                shown = True
            if isinstance(event, SteerPiece):
                console.out(escape_controls(event.text), end="", highlight=False)
    finally:
        if shown:
            console.out("", highlight=False)
    assert isinstance(event, SteerAnswer | GenerateAnswer), "a stream ends with its result"
    return event


def _draw_completions(result: PromptCompletions, is_steered: bool) -> Table:
    """Draw a row per completion, beside it the unsteered one with the same seed if asked for."""
    columns = [result.completions, *([] if result.baseline is None else [result.baseline])]
    heads = ["steered" if is_steered else "continuation", "unsteered"][: len(columns)]
    table = Table(*heads, box=box.SIMPLE_HEAD, show_lines=len(result.completions) > 1)
    for row in zip(*columns, strict=True):
        cells = (Text(escape_controls(one.text)).append(f"\n{_sum_up(one)}", "dim") for one in row)
        table.add_row(*cells)
    return table


def _sum_up(completion: Completion) -> str:
    """Return one line about a completion."""
    return (
        f"{completion.num_tokens} tokens, {completion.finish_reason}, "
        f"logprob {show_value(completion.logprob)}, seed {completion.seed}"
    )

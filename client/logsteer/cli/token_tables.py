"""What answers say of single tokens, drawn as tables for a terminal."""

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from logsteer.cli.continuations import draw_completions, sum_up_completion
from logsteer.cli.tables import draw_rows, show_number
from logsteer.extras.rows import name_columns
from logsteer.schemas import Completion, GenerateAnswer, GradientAnswer, ItemScore, TargetGradient
from logsteer.schemas.common import Aggregate, Float, RowColumns


def draw_diagnostics(result: ItemScore, with_tokens: bool) -> Iterator[Table | Text]:
    """Draw what was read of each target: a row for each token if wanted, and the aggregates."""
    for target in result.targets:
        yield Text(
            f"{target.target!r}: logprob {show_number(target.logprob)}, perplexity "
            f"{show_number(target.perplexity)}, {target.num_tokens} tokens",
            "bold",
        )
        if with_tokens or target.probes is not None:
            yield draw_token_columns(target.tokens or [], target.logprobs or [], target)
        if target.aggregates is not None:
            yield draw_aggregates(target.aggregates)


def draw_token_columns(
    tokens: Sequence[str], logprobs: Sequence[Float], found: RowColumns
) -> Table:
    """Draw a row per token of a sequence, a column for each that was read."""
    columns = name_columns(logprobs, found, between="\n")
    rows = zip(tokens, *columns.values(), strict=True)
    table = draw_rows(
        ["token", *(f">{name}" for name in columns)],
        ([repr(token), *map(show_number, values)] for token, *values in rows),
    )
    for column in table.columns:
        column.overflow = "fold"  # a name that is cut off may be another's, too
    return table


def draw_end(completion: Completion) -> Iterator[Table | Text]:
    """Draw how a completion that was shown as it came has ended, and what probes have read."""
    yield Text(sum_up_completion(completion), "dim")
    if completion.probes is not None:
        yield draw_token_columns(completion.tokens, completion.logprobs, completion)


def draw_aggregates(aggregates: Mapping[str, Aggregate]) -> Table:
    """Draw a row per column of a sequence."""
    return draw_rows(
        ["over the tokens", ">mean", ">min", ">max", ">early", ">late", ">sum"],
        (
            [name, *map(show_number, [one.mean, one.min, one.max, one.early, one.late, one.sum])]
            for name, one in aggregates.items()
        ),
    )


def draw_gradients(answer: GradientAnswer) -> Iterator[Table | Text]:
    """Draw a row per position of each target, its gradients' norms; or a row per target."""
    targets = [target for item in answer.results for target in item.targets]
    if answer.along is not None:
        yield Text(f"along {answer.along.name} ({answer.along.sha256[:12]})")
        rows = []
        for one in targets:
            numbers = [show_number(one.logprob), show_number(one.directional)]
            rows.append([repr(one.target), *numbers, str(len(one.token_ids))])
        yield draw_rows(["target", ">logprob", ">d logprob / d eta", ">tokens"], rows)
        return
    for target in targets:
        yield Text(f"{target.target!r}: logprob {show_number(target.logprob)}", "bold")
        yield _draw_norms(target)


def _draw_norms(target: TargetGradient) -> Table:
    norms = target.norms or {}
    rows = []
    for position, *values in zip(target.positions or [], *norms.values(), strict=True):
        part = "context" if position < target.num_context else "target"
        rows.append([str(position), part, *map(show_number, values)])
    return draw_rows([">position", "part", *(f">norm at layer {layer}" for layer in norms)], rows)


def draw_generated(prompts: Sequence[str], answer: GenerateAnswer) -> Iterator[Table | Text]:
    """Draw a row per completion of each prompt, and under them what was read of each."""
    for prompt, result in zip(prompts, answer.results, strict=True):
        yield Text(repr(prompt), "bold")
        yield draw_completions(result, "continuation")
        for completion in result.completions:
            if any(
                x is not None for x in (completion.columns, completion.ranks, completion.probes)
            ):
                yield draw_token_columns(completion.tokens, completion.logprobs, completion)
            if completion.aggregates is not None:
                yield draw_aggregates(completion.aggregates)

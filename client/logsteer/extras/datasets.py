"""Prompts from where they are stored: lists, JSON lines, and Hugging Face datasets.

A source names its kind in front of a colon, `hf:openai/gsm8k/main@test`; a path that ends in
`.jsonl` or `.json`, and every `Path`, is read as JSON lines, each an object or a text as a JSON
string. Further kinds are added by `register_dataset`.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, SupportsIndex, TypeAlias

from logsteer.errors import InvalidRequestError, LogsteerError
from logsteer.extras.hub import cut_split, load_rows
from logsteer.extras.json_files import read_json_lines

Row: TypeAlias = Mapping[str, Any]
Reader: TypeAlias = Callable[[str], Iterable[str | Row]]
Source: TypeAlias = str | Path | Iterable[str | Row]

EVALUATED_SPLIT = "test"
"""The split that is evaluated where none is named."""

PROMPT = "prompt"
"""The field of a row that is continued."""

_FORM = 'an object, or a text in quotation marks, "Once upon a time"'


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt, and the row of its dataset that it comes from."""

    prompt: str
    row: Row


def _read_file(path: str) -> Iterable[str | Row]:
    """Yield the rows of a file of JSON lines. Errors: InvalidRequestError, OSError."""
    with Path(path).open("rb") as lines:
        try:
            for _, row in read_json_lines(lines, path, _FORM):
                yield row
        except LogsteerError as error:
            raise _refuse(str(error)) from error


_HUB = "hf"
_READERS: dict[str, Reader] = {"jsonl": _read_file, _HUB: load_rows}


def register_dataset(kind: str, reader: Reader) -> None:
    """Read sources `KIND:NAME` by `reader(NAME)`, which returns rows or texts, from now on."""
    _READERS[kind] = reader


def read_prompts(source: Source, field: str = PROMPT, limit: int | None = None) -> list[PromptRow]:
    """Return the prompts of a source, or its first `limit`; a row holds its prompt in `field`.

    Errors: InvalidRequestError for a row without that text; OSError.
    """
    prompts = []
    for number, row in enumerate(islice(read_rows(source), limit)):
        prompt = read_row(row, number, field)
        if not prompt:
            raise _refuse(f"row {number} has an empty text under {field!r}; leave it out")
        prompts.append(PromptRow(prompt, {field: row} if isinstance(row, str) else row))
    if not prompts:
        raise _refuse("the source has no prompts")
    return prompts


def read_row(row: object, number: int, field: str, field_kind: str = "field") -> str:
    """Return the text of a row: itself, or what it holds in `field`.

    `number` and `field_kind`, what one calls a field there, are said in errors. Errors:
    InvalidRequestError for a row without a text there.
    """
    if isinstance(row, str):
        return row
    if not isinstance(row, Mapping):
        raise _refuse(f"row {number} is {row!r:.60}, neither a text nor an object with fields")
    if field not in row:
        fields = ", ".join(map(str, row)) or "nothing"
        raise _refuse(
            f"row {number} has no text under {field!r}, only {fields}; name a {field_kind}"
        )
    text = row[field]
    if not isinstance(text, str):
        raise _refuse(
            f"row {number} has {text!r:.60} under {field!r}, no text; name another {field_kind}, "
            "or leave the row out"
        )
    return text


def read_rows(source: Source) -> Iterable[str | Row]:
    """Return the rows of a source. Errors: InvalidRequestError for a string that names none."""
    if isinstance(source, Path):
        return _read_file(str(source))
    if not isinstance(source, str):
        return source
    kind, _, name = source.partition(":")
    if name and kind in _READERS:
        return _READERS[kind](name)
    if source.endswith((".jsonl", ".json")):
        return _read_file(source)
    raise _refuse(
        f"{source!r} names no source: pass [text] for one prompt; hf:NAME for a data set, a path "
        f"that ends in .jsonl, or KIND:NAME of {', '.join(_READERS)}"
    )


def name_source(name: str, split: str | None) -> str:
    """Return the source to evaluate that a name stands for, Hugging Face's unless it says its kind.

    Those may name their split, `NAME@SPLIT`; it is `test` where neither that nor `split` says one.
    Errors: InvalidRequestError for a split of other kinds, and for two splits.
    """
    kind, _, rest = name.partition(":")
    if not (rest and kind in _READERS):
        kind, rest = ("jsonl" if name.endswith((".jsonl", ".json")) else _HUB), name
    if kind != _HUB:
        if split is not None:
            raise _refuse(f"{name!r} has no splits; leave --split out")
        return name
    repository, named = cut_split(rest)
    if named is not None and split is not None:
        raise _refuse(f"{name} names split {named!r}, and --split {split!r}; give one of them")
    return f"{_HUB}:{repository}@{named or split or EVALUATED_SPLIT}"


def check_counts(**counts: int) -> None:
    """Refuse numbers of prompts or requests, by their names, that are no integers from 1 on."""
    for name, count in counts.items():
        is_integer = isinstance(count, SupportsIndex) and not isinstance(count, bool)
        if not is_integer or int(count) < 1:
            detail = f"{name} is {count!r}; give an integer, at least 1"
            raise InvalidRequestError("invalid_request", detail, param=name)


def draw_prompts(
    prompts: Sequence[PromptRow], count: int | None, with_replacement: bool, seed: int
) -> list[PromptRow]:
    """Draw `count` prompts in random order, each at most once unless `with_replacement`.

    All of them in their order for None. Errors: InvalidRequestError where there are too few.
    """
    draw = random.Random(seed)
    if count is None:
        return draw.choices(prompts, k=len(prompts)) if with_replacement else list(prompts)
    if with_replacement:
        return draw.choices(prompts, k=count)
    if count > len(prompts):
        raise _refuse(
            f"{count} prompts are asked for, the source has {len(prompts)}; draw with_replacement"
        )
    return draw.sample(prompts, count)


def _refuse(detail: str) -> InvalidRequestError:
    return InvalidRequestError("invalid_request", detail, param="source")

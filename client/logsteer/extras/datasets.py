"""Prompts from where they are stored: lists, JSON lines, and Hugging Face datasets.

A source names its kind in front of a colon, `hf:openai/gsm8k/main@test`; a path that ends
in `.jsonl` or `.json`, and every `Path`, is read as JSON lines. Further kinds are added by
`register_dataset`.
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, SupportsIndex, TypeAlias

from logsteer.errors import InvalidRequestError
from logsteer.extras.hub import load_rows

Row: TypeAlias = Mapping[str, Any]
Reader: TypeAlias = Callable[[str], Iterable[Row]]
Source: TypeAlias = str | Path | Iterable[str | Row]

PROMPT = "prompt"
"""The field of a row that is continued."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt, and the row of its dataset that it comes from."""

    prompt: str
    row: Row


def _read_json_lines(path: str) -> Iterable[Row]:
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise _refuse(f"{path}, line {number}: no JSON ({error.msg})") from error
            yield {PROMPT: row} if isinstance(row, str) else row


_READERS: dict[str, Reader] = {"jsonl": _read_json_lines, "hf": load_rows}


def register_dataset(kind: str, reader: Reader) -> None:
    """Read sources `KIND:NAME` by `reader(NAME)`, which returns their rows, from now on."""
    _READERS[kind] = reader


def read_prompts(source: Source, field: str = PROMPT, limit: int | None = None) -> list[PromptRow]:
    """Return the prompts of a source, or its first `limit`; a row holds its prompt in `field`.

    Errors: InvalidRequestError for a row without that text; OSError.
    """
    prompts = []
    for number, row in enumerate(islice(read_rows(source), limit)):
        if isinstance(row, str):
            row = {field: row}
        prompt = row.get(field) if isinstance(row, Mapping) else None
        if not isinstance(prompt, str) or not prompt:
            fields = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
            raise _refuse(f"row {number} has no text under {field!r}, only {fields}; name a field")
        prompts.append(PromptRow(prompt, row))
    if not prompts:
        raise _refuse("the source has no prompts")
    return prompts


def read_rows(source: Source) -> Iterable[str | Row]:
    """Return the rows of a source. Errors: InvalidRequestError for a string that names none."""
    if isinstance(source, Path):
        return _read_json_lines(str(source))
    if not isinstance(source, str):
        return source
    kind, _, name = source.partition(":")
    if name and kind in _READERS:
        return _READERS[kind](name)
    if source.endswith((".jsonl", ".json")):
        return _read_json_lines(source)
    raise _refuse(
        f"{source!r} names no source: pass [text] for one prompt; hf:NAME for a data set, a path "
        f"that ends in .jsonl, or KIND:NAME of {', '.join(_READERS)}"
    )


def name_source(name: str, split: str | None) -> str:
    """Return the source that a name stands for: one of Hugging Face's, unless it says its kind.

    The split is `test` unless given. Errors: InvalidRequestError for a split of other kinds.
    """
    kind, _, rest = name.partition(":")
    if not (rest and kind in _READERS) and not name.endswith((".jsonl", ".json")):
        return f"hf:{name}@{split or 'test'}"
    if split is not None:
        raise _refuse(f"{name} has no splits of that name; write hf:NAME@SPLIT, or leave it out")
    return name


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

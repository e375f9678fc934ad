"""Prompts and texts from where they are stored: lists, files, and Hugging Face data sets.

A source names its kind in front of a colon, `hf:openai/gsm8k/main@test`; or it is the path of a
file that ends in `.parquet`, or of JSON lines (`.jsonl`, `.jsonl.gz`, `.json`, and every other
`Path`), each an object or a text as a JSON string. Further kinds are added by `register_dataset`.

`hf:NAME[/CONFIG][@SPLIT]` is read through `datasets`: NAME is `owner/name` or `name` on the hub,
or a directory laid out like those; the split is `train` unless said, which most data sets have.
"""

import json
import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, SupportsIndex, TypeAlias

from pydantic import ValidationError

from logsteer.errors import InvalidRequestError, LogsteerError
from logsteer.extras import import_package
from logsteer.extras.files import RowFile, has_rows
from logsteer.schemas import Message
from logsteer.schemas.chat import CONVERSATION


def read_json_lines(lines: Iterable[bytes], name: str, form: str) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1, and the value of each line that is not blank.

    Where a line may be a text, a JSON string is that text, and the caller says which field of an
    object stands for it. `name` is said in errors, and `form`: what to write in a line. Raises
    LogsteerError for a line that is not JSON.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, parse_json(line.rstrip(), f"{name}, line {number}", f"; write {form}")


def parse_json(text: str | bytes, place: str, hint: str = "") -> Any:
    """Return the value of a JSON text; LogsteerError, which says where it is and ends in a hint."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        reason = f"{error.msg} at {line}column {error.colno}"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:  # no UTF-8, or an integer of too many digits
        reason = str(error)
    raise LogsteerError(f"{place}: no JSON: {reason}{hint}")


def load_steering(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return a steering object from itself, from its JSON, or from a file of that.

    Raises LogsteerError where there is no JSON object, OSError where there is no file. The fields
    are checked by the request that they go into.
    """
    if isinstance(source, Mapping):
        return dict(source)
    place, text = "steering", str(source)
    if not text.lstrip().startswith("{"):
        place, text = text, read_text(Path(text))
    found = parse_json(text, place)
    if not isinstance(found, dict):
        raise LogsteerError(f'{place}: no steering object such as {{"vectors": [{{"name": …}}]}}')
    return found


def read_text(path: Path) -> str:
    """Return the text of a file; LogsteerError where it is not UTF-8 or empty."""
    return decode_text(path.read_bytes(), str(path))


def decode_text(data: bytes, name: str) -> str:
    """Return the text of UTF-8 bytes; LogsteerError, with the name, for other bytes or none."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise LogsteerError(f"{name} is not UTF-8: {error}") from error
    if not text:
        raise LogsteerError(f"{name} is empty")
    return text


DEFAULT_SPLIT = "train"
"""The split of a name without one, wherever a name is read."""
_LOCAL = (".", "/", "~")
"""What a name begins with that is a path and nothing else."""


def load_rows(name: str) -> Iterable[Mapping[str, Any]]:
    """Return the rows of `NAME[/CONFIG][@SPLIT]`; the split is `train` unless given.

    Errors: InvalidRequestError where `datasets` is not installed, or there is no such data set,
    configuration or split.
    """
    missing = "data sets of Hugging Face need a package: pip install 'logsteer[datasets]'"
    datasets = import_package("datasets", _refuse(missing))
    path, split = cut_split(name)
    split = split or DEFAULT_SPLIT
    tried = []
    for repository, config in _list_readings(path):
        tried.append(f"{repository!r}" + (f", configuration {config!r}" if config else ""))
        try:
            rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
                repository, config, split=split
            )
        except (FileNotFoundError, ConnectionError) as error:  # there is none, or nobody answers
            reason = str(error)
            continue
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            told = str(error.__cause__ or error).partition("\nExample")[0].rstrip(".\n ")
            raise _refuse(f"{tried[-1]}: {told}; write NAME/CONFIG@SPLIT") from error
        return rows
    raise _refuse(f"no data set {' and none '.join(tried)} was found: {reason}")


def cut_split(name: str) -> tuple[str, str | None]:
    """Return the two of `NAME@SPLIT`, None for a name without a split.

    A directory may have an @ in its name; a split has no slash.
    """
    path, at, split = name.rpartition("@")
    if not at or "/" in split or not split:
        return name, None
    return path, split


def _list_readings(name: str) -> Iterator[tuple[str, str | None]]:
    """Yield what a name may mean, as repository or directory and configuration.

    `openai/gsm8k/main` is one repository and configuration, and so is `./gsm8k/main`. `gsm8k/main`
    is repository `main` of `gsm8k`, or configuration `main` of `gsm8k`.
    """
    place = Path(name).expanduser()
    parts = name.strip("/").split("/")
    if len(parts) > 1 and _has_configuration(place.parent, place.name):
        yield str(place.parent), place.name
    elif place.is_dir():
        yield str(place), None
    elif name.startswith(_LOCAL):
        if not place.parent.is_dir():
            raise _refuse(f"there is no directory {name!r}")
        yield str(place.parent), place.name
    elif not all(parts) or len(parts) > 3:
        raise _refuse(f"{name!r} is neither a directory nor NAME, OWNER/NAME or OWNER/NAME/CONFIG")
    elif len(parts) == 3:
        yield "/".join(parts[:2]), parts[2]
    else:
        yield name, None
        if len(parts) == 2:
            yield parts[0], parts[1]


def _has_configuration(directory: Path, name: str) -> bool:
    """Return whether the card of a data set in a directory names a configuration."""
    if not (directory / "README.md").is_file():
        return False
    from datasets import get_dataset_config_names

    return name in get_dataset_config_names(str(directory))


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
    """A prompt, and the row of its dataset that it comes from.

    Of a conversation the prompt is its last turn, and `messages` has all of them.
    """

    prompt: str
    row: Row
    messages: list[Message] | None = None


def _read_file(path: str, columns: Sequence[str] | None = None) -> Iterable[str | Row]:
    """Yield the rows of a file, of Parquet these columns. Errors: InvalidRequestError, OSError."""
    try:
        with RowFile(Path(path), columns, None if has_rows(path) else "jsonl") as file:
            for _, row in read_json_lines(file.lines, path, _FORM):
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

    That is a text, or a conversation as a list of messages. Errors: InvalidRequestError for a row
    without it; OSError.
    """
    prompts = []
    for number, row in enumerate(islice(read_rows(source), limit)):
        if isinstance(row, Mapping) and isinstance(row.get(field), list):
            turns = _read_conversation(row[field], number, field)
            prompts.append(PromptRow(turns[-1].content, row, turns))
            continue
        prompt = read_row(row, number, field)
        if not prompt:
            raise _refuse(f"row {number} has an empty text under {field!r}; leave it out")
        prompts.append(PromptRow(prompt, {field: row} if isinstance(row, str) else row))
    if not prompts:
        raise _refuse("the source has no prompts")
    return prompts


def _read_conversation(turns: object, number: int, field: str) -> list[Message]:
    try:
        return CONVERSATION.validate_python(turns)
    except ValidationError as invalid:
        reason = invalid.errors(include_url=False)[0]["msg"]
        raise _refuse(f"row {number} has no conversation under {field!r}: {reason}") from invalid


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


def read_rows(source: Source, columns: Sequence[str] | None = None) -> Iterable[str | Row]:
    """Return the rows of a source; of a Parquet file these columns, where they are named.

    Errors: InvalidRequestError for a string that names none.
    """
    if isinstance(source, Path):
        return _read_file(str(source), columns)
    if not isinstance(source, str):
        return source
    if names_kind(source):
        kind, _, name = source.partition(":")
        return _READERS[kind](name)
    if has_rows(source):
        return _read_file(source, columns)
    raise _refuse(
        f"{source!r} names no source: pass [text] for one prompt; hf:NAME for a data set, a path "
        f"that ends in .jsonl or .parquet, or KIND:NAME of {', '.join(_READERS)}"
    )


def names_kind(source: str) -> bool:
    """Return whether a source is KIND:NAME."""
    kind, _, name = source.partition(":")
    return bool(name) and kind in _READERS


def name_source(name: str) -> str:
    """Return the source to evaluate that a name stands for, Hugging Face's unless it says its kind.

    Those may name their split, `NAME@SPLIT`; it is `test` where they do not.
    """
    if has_rows(name) or (names_kind(name) and not name.startswith(f"{_HUB}:")):
        return name
    repository, split = cut_split(name.removeprefix(f"{_HUB}:"))
    return f"{_HUB}:{repository}@{split or EVALUATED_SPLIT}"


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
            f"{count} prompts were requested, the source has {len(prompts)}; draw with_replacement"
        )
    return draw.sample(prompts, count)


def _refuse(detail: str) -> InvalidRequestError:
    return InvalidRequestError("invalid_request", detail, param="source")


_CHUNK = 64 * 1024
JOIN = "\n\n"
"""What stands between two rows in the perplexity scripts of GPTQ, llama.cpp and ExLlamaV3."""


class RowChunks(Iterable[bytes]):
    """The bytes of a source's rows, several rows at a time, each time it is iterated.

    `columns` are read of a Parquet file, and no others. Iterating raises InvalidRequestError for a
    row that cannot be written, for no rows, and for an iterator that was iterated before.
    """

    def __init__(self, source: Source, columns: Sequence[str]) -> None:
        self._source = source
        self._columns = columns
        self._began = False

    def __iter__(self) -> Iterator[bytes]:
        if self._began and isinstance(self._source, Iterator):
            raise _refuse("the source is an iterator, and cannot be read again; give a list of it")
        self._began = True
        chunk, number = b"", -1
        for number, row in enumerate(read_rows(self._source, self._columns)):
            chunk += self._encode(number, row)
            if len(chunk) > _CHUNK:
                yield chunk
                chunk = b""
        if number < 0:
            raise _refuse("the source has no rows")
        yield chunk

    @abstractmethod
    def _encode(self, number: int, row: str | Row) -> bytes: ...


class RowLines(RowChunks):
    """JSON lines of a source's rows, as a data set to capture.

    A row has a text in `field`, a conversation there or in `messages`, or `token_ids`.
    """

    def __init__(self, source: Source, field: str) -> None:
        super().__init__(source, (field, "token_ids", "messages"))

    def _encode(self, number: int, row: str | Row) -> bytes:
        return json.dumps(self._choose(number, row)).encode() + b"\n"

    def _choose(self, number: int, row: str | Row) -> Any:
        field = self._columns[0]
        if isinstance(row, Mapping):
            if isinstance(row.get(field), list):
                return {"messages": row[field]}
            if field not in row and "token_ids" in row:
                return {"token_ids": list(map(int, row["token_ids"]))}
            if field not in row and "messages" in row:
                return {"messages": row["messages"]}
        return read_row(row, number, field)


class JoinedRows(RowChunks):
    """UTF-8 of one column of a data set's rows, `join` between them.

    `Client.perplexity_stream` takes it.
    """

    def __init__(self, source: Source, column: str, join: str = JOIN) -> None:
        super().__init__(source, (column,))
        self._join = join

    def _encode(self, number: int, row: str | Row) -> bytes:
        text = read_row(row, number, self._columns[0], "column")
        piece = (self._join if number else "") + text
        try:
            return piece.encode()
        except UnicodeEncodeError as error:
            raise _refuse(
                f"row {number} has a lone surrogate, {piece[error.start]!r}, which UTF-8 cannot "
                "express; write the whole character"
            ) from error

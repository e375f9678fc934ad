"""Where samples are kept, a line of JSON for each drawn prompt: in memory, or in a file.

A line is read into objects when it is asked for. The first line of a file says which run it is of;
every further one is a `DrawnPrompt`. They are appended as they come.
"""

import io
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, overload

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from logsteer.errors import AnswerError, InvalidRequestError
from logsteer.schemas import PromptCompletions

Header = Mapping[str, Any]

_MARK = b'{"logsteer_samples":1,'
"""What the file begins with."""


class DrawnPrompt(PromptCompletions):
    """One drawn prompt with its continuations.

    `rewards` and `reward_errors` have an entry for each continuation; they are None where no
    reward was asked for, and where none has failed.
    """

    index: int
    prompt: str
    rewards: list[float | None] | None = None
    reward_errors: list[str | None] | None = None


class Draws(Sequence[DrawnPrompt]):
    """Drawn prompts in the order of their `index`, and what the run was that drew them.

    They are kept in memory; or in the file of a path, of which memory holds where each begins. What
    an earlier run has left there is kept, but for a last line that it was stopped in. Raises
    InvalidRequestError for a file of something else, or in no directory; OSError.
    """

    def __init__(self, path: str | PathLike[str] | None = None) -> None:
        self.header: Header | None = None
        self._path = None if path is None else Path(path)
        self._lines: dict[int, bytes | int] = {}
        self._order = array("q")
        if self._path is None:
            return
        if self._path.exists():
            self._load(self._path)
        elif not self._path.parent.is_dir():
            raise _refuse(f"{self._path.parent} is no directory; make it, or name another file")

    @overload
    def __getitem__(self, place: int) -> DrawnPrompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[DrawnPrompt]: ...
    def __getitem__(self, place: int | slice) -> DrawnPrompt | list[DrawnPrompt]:
        if len(self._order) != len(self):
            self._order = array("q", sorted(self._lines))
        found = self._order[place]
        if isinstance(found, array):
            return [_read_draw(self._read(index)) for index in found]
        return _read_draw(self._read(found))

    def has(self, index: int) -> bool:
        """Return whether the draw of this index is there."""
        return index in self._lines

    def __len__(self) -> int:
        return len(self._lines)

    def begin(self, header: Header) -> None:
        """Record what the run is; where that is known, compare them.

        Raises InvalidRequestError where the draws are of another run, and names what differs.
        """
        if self.header is None:
            self.header = header
            if self._path is not None:
                self._append(self._path, [_MARK + to_json(header).removeprefix(b"{")])
            return
        for name, was, now in _compare(self.header, header, header):
            raise _refuse(
                f"{self._path or 'this call'} has samples of another run: {name} was "
                f"{_shorten(was)} and is {_shorten(now)}; name another file, or ask as before"
            )

    def add(self, lines: Mapping[int, bytes]) -> None:
        """Keep the lines of these indices; in a file, by one write."""
        if self._path is None:
            self._lines |= lines
        else:
            starts = self._append(self._path, list(lines.values()))
            self._lines |= zip(lines, starts, strict=True)

    def _read(self, index: int) -> bytes:
        line = self._lines[index]
        if isinstance(line, bytes):
            return line
        assert self._path is not None, "only a file has places"
        with self._path.open("rb") as file:
            file.seek(line)
            return file.readline()

    @staticmethod
    def _append(path: Path, lines: Sequence[bytes]) -> list[int]:
        """Append the lines; return where each begins."""
        with path.open("ab", buffering=0) as file:
            place = file.seek(0, io.SEEK_END)
            starts = []
            for line in lines:
                starts.append(place)
                place += len(line) + 1
            rest = memoryview(b"".join(line + b"\n" for line in lines))
            while rest:
                rest = rest[file.write(rest) :]
        return starts

    def _load(self, path: Path) -> None:
        """Read what is there; cut off a last line that has no end."""
        place = 0
        with path.open("r+b") as file:
            for number, line in enumerate(file, start=1):
                try:
                    if number == 1 and not line.startswith(_MARK[: len(line)]):
                        raise ValueError("it has no header")
                    if not line.endswith(b"\n"):
                        file.truncate(place)
                        return
                    if number == 1:
                        self.header = from_json(line)
                    else:
                        index = DrawnPrompt.model_validate_json(line).index
                        self._lines.setdefault(index, place)
                except ValueError as error:
                    raise _refuse(
                        f"{path}, line {number}, is no line that sampling has written: "
                        f"{_name_fault(error)}; name another file"
                    ) from error
                place += len(line)


def _compare(was: Header, now: Header, keys: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs, by its name in the innermost object, and both values."""
    for key in keys:
        old, new = was.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _compare(old, new, {**old, **new})
        elif old != new:
            yield key, old, new


def _read_draw(line: bytes) -> DrawnPrompt:
    try:
        return DrawnPrompt.model_validate_json(line)
    except ValidationError as error:
        raise AnswerError(f"what the server sent is no sample: {_name_fault(error)}") from error


def _name_fault(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)


def _shorten(value: Any) -> str:
    text = to_json(value).decode()
    return text if len(text) <= 80 else text[:79] + "…"


def _refuse(detail: str) -> InvalidRequestError:
    return InvalidRequestError("invalid_request", detail, param="file")

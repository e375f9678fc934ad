"""Where samples are kept, a line of JSON for each drawn prompt: in memory, or in a file.

A line is read into objects when it is asked for. The first line of a file says which run it is of;
every further one is a `DrawnPrompt`. They are appended as they come.
"""

import io
from abc import ABC, abstractmethod
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


class Draws(Sequence[DrawnPrompt], ABC):
    """Drawn prompts in the order of their `index`, and what the run was that drew them."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self._order = array("q")

    @overload
    def __getitem__(self, place: int) -> DrawnPrompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[DrawnPrompt]: ...
    def __getitem__(self, place: int | slice) -> DrawnPrompt | list[DrawnPrompt]:
        if len(self._order) != len(self):
            self._order = array("q", sorted(self._indices()))
        found = self._order[place]
        if isinstance(found, array):
            return [_read_draw(self._read(index)) for index in found]
        return _read_draw(self._read(found))

    def has(self, index: int) -> bool:
        """Return whether the draw of this index is there."""
        return index in self._indices()

    def __len__(self) -> int:
        return len(self._indices())

    def begin(self, header: Header) -> None:
        """Note what the run is; where that is known, compare them.

        Raises InvalidRequestError where the draws are of another run, and names what differs.
        """
        if self.header is None:
            self.header = header
            return
        for name, was, now in _compare(self.header, header, header):
            raise _refuse(
                f"{self} has samples of another run: {name} was {_shorten(was)} and is "
                f"{_shorten(now)}; name another file, or ask as before"
            )

    @abstractmethod
    def add(self, lines: Mapping[int, bytes]) -> None:
        """Keep the lines of these indices."""

    @abstractmethod
    def _indices(self) -> Mapping[int, Any]:
        """Return what has each index that is there as a key."""

    @abstractmethod
    def _read(self, index: int) -> bytes:
        """Return the line of an index."""


class MemoryDraws(Draws):
    """Draws in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[int, bytes] = {}

    def __str__(self) -> str:
        """Return what an error calls it."""
        return "this call"

    def add(self, lines: Mapping[int, bytes]) -> None:
        """Keep the lines of these indices."""
        self._lines |= lines

    def _indices(self) -> Mapping[int, bytes]:
        return self._lines

    def _read(self, index: int) -> bytes:
        return self._lines[index]


class FileDraws(Draws):
    """Draws in a file; memory holds where each begins.

    What an earlier run has left is kept, but for a last line that it was stopped in.
    Raises InvalidRequestError for a file of something else, or in no directory; OSError.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        self._starts: dict[int, int] = {}
        if self.path.exists():
            self._load()
        elif not self.path.parent.is_dir():
            raise _refuse(f"{self.path.parent} is no directory; make it, or name another file")

    def __str__(self) -> str:
        """Return what an error calls it."""
        return str(self.path)

    def begin(self, header: Header) -> None:
        """Note what the run is, in a file that is new; else compare them, as `Draws.begin`."""
        if self.header is None:
            self._append([_MARK + to_json(header).removeprefix(b"{")])
        super().begin(header)

    def add(self, lines: Mapping[int, bytes]) -> None:
        """Append the lines, in one write."""
        self._starts |= zip(lines, self._append(list(lines.values())), strict=True)

    def _indices(self) -> Mapping[int, int]:
        return self._starts

    def _read(self, index: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            return file.readline()

    def _append(self, lines: Sequence[bytes]) -> list[int]:
        """Append the lines; return where each begins."""
        with self.path.open("ab", buffering=0) as file:
            place = file.seek(0, io.SEEK_END)
            starts = []
            for line in lines:
                starts.append(place)
                place += len(line) + 1
            rest = memoryview(b"".join(line + b"\n" for line in lines))
            while rest:
                rest = rest[file.write(rest) :]
        return starts

    def _load(self) -> None:
        """Read what is there; cut off a last line that has no end."""
        place = 0
        with self.path.open("r+b") as file:
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
                        self._starts.setdefault(index, place)
                except ValueError as error:
                    raise _refuse(
                        f"{self.path}, line {number}, is no line that sampling has written: "
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

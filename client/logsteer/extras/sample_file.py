"""The file that samples are kept in: JSON lines, appended to as they come.

The first line says which run it is of; every further one is a `DrawnPrompt`.
"""

import io
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, overload

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from logsteer.errors import InvalidRequestError
from logsteer.extras.samples import DrawnPrompt

Header = Mapping[str, Any]

_MARK = b'{"logsteer_samples":1,'
"""What the file begins with."""


class SampleFile(Sequence[DrawnPrompt]):
    """The draws that a file holds, by their `index`; of each, memory holds its place alone.

    What an earlier run has left is kept, but for a last line that it was stopped in.
    Raises InvalidRequestError for a file of something else; OSError.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.header: Header | None = None
        self._starts: dict[int, int] = {}
        self._order = array("q")
        if self.path.exists():
            self._load()

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, index: object) -> bool:
        """Return whether the file has the draw of this index."""
        return index in self._starts

    def __iter__(self) -> Iterator[DrawnPrompt]:
        with self.path.open("rb") as file:
            for index in self._indices():
                yield _read_draw(file, self._starts[index])

    @overload
    def __getitem__(self, place: int) -> DrawnPrompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[DrawnPrompt]: ...
    def __getitem__(self, place: int | slice) -> DrawnPrompt | list[DrawnPrompt]:
        found = self._indices()[place]
        with self.path.open("rb") as file:
            if isinstance(found, array):
                return [_read_draw(file, self._starts[index]) for index in found]
            return _read_draw(file, self._starts[found])

    def begin(self, header: Header) -> None:
        """Write the first line of a file that has none; else compare them.

        Raises InvalidRequestError where the file is of another run, and names what differs.
        """
        if self.header is None:
            self._append([_MARK + to_json(header).removeprefix(b"{")])
            self.header = header
            return
        for name, was, now in _compare(self.header, header, header):
            raise _refuse(
                f"{self.path} has samples of another run: {name} was {_shorten(was)} and is "
                f"{_shorten(now)}; name another file, or ask as before"
            )

    def add(self, draws: Sequence[DrawnPrompt]) -> None:
        """Append draws, in one write."""
        starts = self._append([draw.model_dump_json(exclude_unset=True).encode() for draw in draws])
        self._starts |= zip((draw.index for draw in draws), starts, strict=True)

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

    def _indices(self) -> "array[int]":
        """Return the indices that are there, in order."""
        if len(self._order) != len(self._starts):
            self._order = array("q", sorted(self._starts))
        return self._order


def _compare(was: Header, now: Header, keys: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs, by its name in the innermost object, and both values."""
    for key in keys:
        old, new = was.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _compare(old, new, {**old, **new})
        elif old != new:
            yield key, old, new


def _read_draw(file: io.BufferedIOBase, start: int) -> DrawnPrompt:
    file.seek(start)
    return DrawnPrompt.model_validate_json(file.readline())


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

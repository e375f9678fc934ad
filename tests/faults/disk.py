"""Faults of a disk for tests of stores: calls that fail, and what a loss of power leaves.

`fail_calls` has the n-th call that changes the disk fail. `record_calls` notes all of them, and
`list_states` says what may be there when the power goes after any of them: a file whose bytes were
not brought to the disk is whole, half or empty; entries of a directory that were not brought there
have changed or not, each for itself.
"""

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CALLS = ("write", "fsync", "link", "replace", "unlink", "mkdir", "open")
"""Of the module os: all by which a store changes its disk."""


@dataclass
class CallCounter:
    """Calls that were seen, and which of them fail: the n-th, and those behind it if `lasting`."""

    failing: int
    error: int
    lasting: bool
    count: int = 0

    def check(self, name: str) -> None:
        """Count a call. Errors: OSError for those that fail."""
        self.count += 1
        is_due = self.count >= self.failing if self.lasting else self.count == self.failing
        if not is_due:
            return
        if self.error == errno.ENOSPC and name in ("unlink", "fsync", "open"):
            return  # what takes no room does not fail for lack of it
        raise OSError(self.error, os.strerror(self.error))


@contextmanager
def fail_calls(counter: CallCounter) -> Iterator[None]:
    """Have calls fail as the counter says; opening a file counts where that makes one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, _count(name, getattr(os, name), counter))
        yield


def _count(name: str, call: Callable[..., Any], counter: CallCounter) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        if name != "open" or arguments[1] & os.O_EXCL:
            counter.check(name)
        return call(*arguments, **options)

    return counted


# ------------------------------------------------------------------ loss of power

Files = dict[str, bytes]
"""What lies below a directory, by relative path."""


@dataclass(frozen=True)
class Step:
    """One call that changed the disk: `create`, `write`, `sync`, `sync_directory`, `link`,
    `replace`, `unlink`."""

    kind: str
    path: str
    data: bytes = b""
    target: str = ""


@dataclass
class Recorder:
    """The steps below a directory, in order."""

    root: Path
    steps: list[Step] = field(default_factory=list)

    def name(self, path: Any) -> str:
        """Return a path as steps give it."""
        return os.path.relpath(os.fspath(path), self.root)


@contextmanager
def record_calls(recorder: Recorder) -> Iterator[None]:
    """Note what is done to files below the recorder's directory."""
    handles: dict[int, str] = {}
    steps = recorder.steps
    real = {
        name: getattr(os, name) for name in ("open", "write", "fsync", "link", "replace", "unlink")
    }

    def opened(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        handle: int = real["open"](path, flags, *arguments, **options)
        handles[handle] = recorder.name(path)
        if flags & os.O_EXCL:
            steps.append(Step("create", recorder.name(path)))
        return handle

    def written(handle: int, data: Any) -> int:
        count: int = real["write"](handle, data)
        steps.append(Step("write", handles[handle], bytes(data[:count])))
        return count

    def synced(handle: int) -> None:
        real["fsync"](handle)
        is_directory = (recorder.root / handles[handle]).is_dir()
        steps.append(Step("sync_directory" if is_directory else "sync", handles[handle]))

    def replaced(source: Any, target: Any, **options: Any) -> None:
        real["replace"](source, target, **options)
        steps.append(Step("replace", recorder.name(source), target=recorder.name(target)))

    def linked(source: Any, target: Any, **options: Any) -> None:
        real["link"](source, target, **options)
        steps.append(Step("link", recorder.name(source), target=recorder.name(target)))

    def unlinked(path: Any, **options: Any) -> None:
        real["unlink"](path, **options)
        steps.append(Step("unlink", recorder.name(path)))

    with pytest.MonkeyPatch.context() as patch:
        for name, call in zip(
            real, (opened, written, synced, linked, replaced, unlinked), strict=True
        ):
            patch.setattr(os, name, call)
        yield


def list_states(before: Files, steps: list[Step]) -> Iterator[tuple[int, Files]]:
    """Yield what may be there when the power goes behind each step, with the number of steps."""
    for count in range(len(steps) + 1):
        yield from ((count, files) for files in _list_states_behind(before, steps[:count]))


def _list_states_behind(before: Files, steps: list[Step]) -> Iterator[Files]:
    """Yield every state in which entries not brought to the disk have changed or not."""
    loose = [index for index in range(len(steps)) if not _is_entry_safe(steps, index)]
    for chosen in itertools.product((True, False), repeat=len(loose)):
        lost = {index for index, is_there in zip(loose, chosen, strict=True) if not is_there}
        for share in (1.0, 0.5, 0.0):
            yield _apply(before, steps, lost, share)


def _is_entry_safe(steps: list[Step], index: int) -> bool:
    """Return whether a change of a directory is on the disk; True for what is no such change.

    A file's creation goes with its first rename: an upload's own entry does not matter.
    """
    step = steps[index]
    if step.kind not in ("link", "replace", "unlink"):
        return True
    directory = str(Path(step.target or step.path).parent)
    return any(s.kind == "sync_directory" and s.path == directory for s in steps[index + 1 :])


def _apply(before: Files, steps: list[Step], lost: set[int], share: float) -> Files:
    files = dict(before)
    written: Files = {}
    synced: set[str] = set()
    for step in steps:
        if step.kind in ("create", "write"):
            written[step.path] = written.get(step.path, b"") + step.data
        elif step.kind == "sync":
            synced.add(step.path)
    for path, data in written.items():
        files[path] = data if path in synced else data[: int(len(data) * share)]
    for index, step in enumerate(steps):
        if index in lost:
            continue
        if step.kind == "replace" and step.path in files:
            files[step.target] = files.pop(step.path)
        elif step.kind == "link" and step.path in files:
            files[step.target] = files[step.path]
        elif step.kind == "unlink":
            files.pop(step.path, None)
    return files

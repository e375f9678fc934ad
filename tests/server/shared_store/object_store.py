"""A file system for fsspec that behaves as an object store does, and as badly.

Files are written whole and visible at once; there is no rename and no append. Listings may be late
by `LATE` changes, calls slow, failing, hanging or returning other bytes than were stored.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import fsspec
from fsspec import AbstractFileSystem


@dataclass
class ObjectFaults:
    """What goes wrong: calls that fail, `failing` next ones or all of them; bytes that turn."""

    away: bool = False
    failing: int = 0
    hanging_s: float = 0.0
    hides: int = 0
    """The last so many files that were written are not in listings yet."""
    turns: int = 0
    """The next so many reads of contents return other bytes."""
    before: Callable[[str, str], None] = lambda call, path: None
    """Is told of each call before it is done."""
    calls: list[tuple[str, str]] = field(default_factory=list)


class ObjectStore(AbstractFileSystem):  # type: ignore[misc]
    """One dictionary for all instances, as one service is for all of its clients."""

    protocol = "objects"
    cachable = False
    files: dict[str, bytes] = {}  # noqa: RUF012
    faults = ObjectFaults()
    forgotten = threading.Event()
    lock = threading.Lock()

    @classmethod
    def forget(cls) -> None:
        """Be an empty store without faults; calls that hang go on."""
        cls.forgotten.set()
        cls.files, cls.faults, cls.forgotten = {}, ObjectFaults(), threading.Event()

    def _begin(self, call: str, path: str) -> None:
        faults, forgotten = type(self).faults, type(self).forgotten
        with self.lock:
            faults.calls.append((call, path))
            failing, faults.failing = faults.failing, max(0, faults.failing - 1)
        faults.before(call, path)
        if faults.hanging_s:
            forgotten.wait(faults.hanging_s)
        if faults.away or failing:
            raise ConnectionError("the object store was told to fail")

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Return the bytes of a file, or some of them."""
        path = self._strip_protocol(path)
        self._begin("get", path)
        try:
            data = type(self).files[path]
        except KeyError:
            raise FileNotFoundError(path) from None
        if type(self).faults.turns and "/contents/" in path:
            type(self).faults.turns -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        return data[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write a file whole."""
        path = self._strip_protocol(path)
        self._begin("put", path)
        with self.lock:
            type(self).files = {**type(self).files, path: bytes(value)}

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        """Write a file of this machine whole."""
        with open(lpath, "rb") as file:  # noqa: PTH123
            self.pipe_file(rpath, file.read())

    def rm_file(self, path: str) -> None:
        """Remove a file; as with S3, one that is not there is removed, too."""
        path = self._strip_protocol(path)
        self._begin("delete", path)
        with self.lock:
            type(self).files = {n: own for n, own in type(self).files.items() if n != path}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return the size of a file."""
        path = self._strip_protocol(path)
        self._begin("head", path)
        if path not in type(self).files:
            raise FileNotFoundError(path)
        return {"name": path, "type": "file", "size": len(type(self).files[path])}

    def find(self, path: str, detail: bool = False, **_: Any) -> Any:
        """List what begins with a path; late, where told so."""
        path = self._strip_protocol(path).rstrip("/") + "/"
        self._begin("list", path)
        files = type(self).files
        shown = list(files)[: len(files) - type(self).faults.hides]
        return {
            name: {
                "name": name,
                "type": "file",
                "size": len(files[name]),
                "etag": hash(files[name]),
            }
            for name in shown
            if name.startswith(path)
        }

    def mv(self, *_: Any, **__: Any) -> None:
        """Refuse: there is no rename."""
        raise NotImplementedError

    _open = mkdir = makedirs = rmdir = mv
    ls = find


fsspec.register_implementation("objects", ObjectStore, clobber=True)

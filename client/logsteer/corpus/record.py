"""What a job has finished, on disk: its lines, how far they reach, and the lock on both.

    OUT.part     the lines of rows 0 to n, appended to
    OUT.job      what was asked for; a record for each commit; at last that the job is done

A record is written once the lines that it counts are on the disk. What stands behind the last
record that fits is cut off, so a job goes on from there wherever it was interrupted. Both files
are held by one process at a time.
"""

import errno
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from logsteer.corpus.answers import RowCounts
from logsteer.errors import LogsteerError

VERSION = 1
_BLOCK = 2**20


@dataclass(frozen=True)
class Record:
    """A commit: rows before `rows` are finished, and their lines are `bytes` long.

    `crc` is the CRC-32 of the lines since the record before, `sha256` the digest of their rows.
    `tally` is of all rows; `seconds` have all runs taken.
    """

    rows: int = 0
    bytes: int = 0
    crc: int = 0
    sha256: str = ""
    seconds: float = 0.0
    tally: RowCounts = field(default_factory=RowCounts)


class JobRecord:
    """The two files of a job, open and locked.

    `header` is what its lines follow from. `records` are those that hold, `identity` the model that
    answered. `is_whole`: no row is left; `is_placed`: and the target has its name. `done` is what
    the end was told with, once there is one.
    Errors: LogsteerError where another process has them, or where they are of another job.
    """

    def __init__(self, target: Path, header: Mapping[str, Any], restart: bool) -> None:
        self.target = target
        self.part_path = target.with_name(f"{target.name}.part")
        self.path = target.with_name(f"{target.name}.job")
        self.header = {"score-file": VERSION, **header}
        self.records: list[Record] = []
        self.identity: dict[str, Any] | None = None
        self.is_whole = self.is_placed = False
        self.done: dict[str, Any] | None = None
        self._part = -1
        is_new = not self.path.exists()
        self._file = lock(self.path)
        try:
            if restart:
                os.ftruncate(self._file, 0)
            self._read()
            if self.done is None and not self.is_placed:
                if not self.records and not self.is_whole and not restart:
                    self._check_names(is_new)
                self._part = os.open(self.part_path, os.O_RDWR | os.O_CREAT, 0o666)
                os.ftruncate(self._part, self.last.bytes)
                os.lseek(self._part, 0, os.SEEK_END)
                if not self.records and not self.is_whole:
                    self._begin()
        except BaseException:
            if is_new:
                self.path.unlink(missing_ok=True)
            self.close()
            raise

    @property
    def last(self) -> Record:
        """The last record that holds; one of nothing where there is none."""
        return self.records[-1] if self.records else Record()

    def close(self) -> None:
        """Close the files, and let go of them."""
        for own in (self._part, self._file):
            if own >= 0:
                os.close(own)
        self._part = self._file = -1

    def write(self, lines: bytes) -> None:
        """Append lines, which count from the next record on. Errors: OSError."""
        write_all(self._part, lines, self.part_path)

    def record_identity(self, identity: Mapping[str, Any]) -> None:
        """Record which model answers."""
        self.identity = dict(identity)
        self._append({"identity": self.identity})

    def commit(self, record: Record) -> None:
        """Have everything written so far on the disk, and say so. Errors: OSError."""
        os.fsync(self._part)
        self._append(asdict(record))
        os.fsync(self._file)
        self.records[:] = [record]

    def end(self) -> None:
        """Record that no row is left."""
        if not self.is_whole:
            self._append({"whole": True})
            os.fsync(self._file)
            self.is_whole = True

    def finish(self, told: Mapping[str, Any]) -> None:
        """Record that the target has its name, and what was told; the lines are not needed more."""
        self.part_path.unlink(missing_ok=True)
        done = {"done": {**told, "bytes": self.target.stat().st_size}}
        lines = [self.header, {"identity": self.identity}, done]
        new = self.path.with_name(f"{self.path.name}.new")
        with new.open("wb") as file:
            file.write(b"".join(_line(line) for line in lines))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)
        sync_directory(self.path.parent)

    def _check_names(self, is_new: bool) -> None:
        """Refuse to write over files that no job is known to have written."""
        for path in (self.target, *([self.part_path] if is_new else [])):
            if path.exists():
                raise LogsteerError(
                    f"{path} exists, and no job is known that wrote it: name another file, or "
                    "--restart to replace it"
                )

    def _begin(self) -> None:
        self.identity = None
        os.ftruncate(self._file, 0)
        self._append(self.header)
        os.fsync(self._file)
        sync_directory(self.path.parent)

    def _append(self, document: Mapping[str, Any]) -> None:
        os.lseek(self._file, 0, os.SEEK_END)
        write_all(self._file, _line(document), self.path)

    def _read(self) -> None:
        """Read what was noted, and cut off what does not hold."""
        os.lseek(self._file, 0, os.SEEK_SET)
        with os.fdopen(os.dup(self._file), "rb") as file:
            header = _parse(file.readline())
            if header is None:
                return
            self._check(header)
            kept = file.tell()
            checked = _PartCheck(self.part_path)
            with checked:
                while (document := _parse(file.readline())) is not None:
                    if "done" in document:
                        self._check_done(document["done"])
                    elif "identity" in document:
                        self.identity = document["identity"]
                    elif "whole" in document:
                        self.is_whole = True
                    else:
                        tally = RowCounts(**document.pop("tally"))
                        record = Record(**document, tally=tally)
                        if not checked.holds(record):
                            break
                        self.records.append(record)
                    kept = file.tell()
        if not self.part_path.exists():
            self.is_placed = self.is_whole and self.target.exists()
            if not self.is_placed:
                self.records, self.is_whole = [], False
        os.ftruncate(self._file, kept)

    def _check_done(self, done: dict[str, Any]) -> None:
        size = self.target.stat().st_size if self.target.exists() else None
        if size != done["bytes"]:
            was = "is gone" if size is None else f"has {size} bytes, not {done['bytes']}"
            raise LogsteerError(
                f"{self.target} was finished and {was} now; --restart makes it anew"
            )
        self.done = done

    def _check(self, header: Mapping[str, Any]) -> None:
        """Check that the files are of this job. Errors: LogsteerError that says what differs."""
        names = [n for n in {**header, **self.header} if header.get(n) != self.header.get(n)]
        if names:
            told = "; ".join(
                f"{name} was {_show(header.get(name))} and is {_show(self.header.get(name))}"
                for name in names
            )
            raise LogsteerError(
                f"{self.path} is of another job: {told}. Name another file, or --restart to begin "
                "anew"
            )


class _PartCheck:
    """Reads the lines once along with the records, and finds what is whole of them.

    A job whose lines have become the target has none left; all of its records hold.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb") if path.exists() else None
        self._at = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def holds(self, record: Record) -> bool:
        """Return whether the lines that a record counts are there as they were written."""
        if self._file is None:
            return True
        left, crc = record.bytes - self._at, 0
        while left > 0 and (block := self._file.read(min(left, _BLOCK))):
            crc = zlib.crc32(block, crc)
            left -= len(block)
        self._at = record.bytes
        return left == 0 and crc == record.crc


def lock(path: Path) -> int:
    """Open a file for this process alone, made where it is not there; return its descriptor.

    Errors: LogsteerError where another process has it.
    """
    import fcntl

    while True:
        found = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have put another file in its place.
            if path.exists() and os.path.samestat(os.fstat(found), path.stat()):
                return found
        except OSError as error:
            os.close(found)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise LogsteerError(f"{path} cannot be locked: {error.strerror}") from error
            target = path.name.removesuffix(".job")
            raise LogsteerError(f"{target} is being written by another process") from error
        os.close(found)


def write_all(file: int, data: bytes, path: Path) -> None:
    """Write all of the data. Errors: OSError that names the file."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(file, view) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on the disk."""
    found = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(found)
    finally:
        os.close(found)


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a line's document; None for one that is not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        document = json.loads(line)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"

"""What a job has finished, on disk: its lines, how far they reach, and the lock on both.

    OUT.part     the lines of rows 0 to n, appended to; held by one process at a time
    OUT.job      what was asked for, and the last commit; at last that the job is done

A commit is written once the lines that it counts are on the disk, as a new file in the place of the
old one. Lines behind the last commit are cut off, so a job resumes there wherever it was
interrupted. The finished lines become the file that was asked for, which has its name once it is
whole.
"""

import errno
import gzip
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from logsteer.corpus.answers import RowCounts
from logsteer.errors import LogsteerError
from logsteer.extras.files import find_format

VERSION = 2


@dataclass(frozen=True)
class Record:
    """A commit: rows before `rows` are finished, and their lines are `bytes` long.

    `sha256` is the digest of these rows, `tally` counts them; `seconds` have all runs taken.
    `is_whole`: no row is left.
    """

    rows: int = 0
    bytes: int = 0
    sha256: str = ""
    seconds: float = 0.0
    tally: RowCounts = field(default_factory=RowCounts)
    is_whole: bool = False


class JobRecord:
    """The two files of a job, open and locked.

    `header` is what its lines follow from. `last` is the last commit, `identity` the model that
    answered. `is_placed`: all lines are written, and the target has its name. `done` is what the
    end was told with, once there is one.
    Errors: LogsteerError where another process has them, or where they are of another job.
    """

    def __init__(self, target: Path, header: Mapping[str, Any], restart: bool) -> None:
        self.target = target
        self.part_path = target.with_name(f"{target.name}.part")
        self.path = target.with_name(f"{target.name}.job")
        self.header = {"score-file": VERSION, **header}
        self.last = Record()
        self.identity: Mapping[str, Any] | None = None
        self.is_placed = False
        self.done: dict[str, Any] | None = None
        if not restart and not self.path.exists():
            self._check_names()
        self._part = lock(self.part_path)
        try:
            if not restart:
                self._read()
            if self.done is not None or self.is_placed:
                self.part_path.unlink(missing_ok=True)
                return
            os.ftruncate(self._part, self.last.bytes)
            os.lseek(self._part, 0, os.SEEK_END)
            # Before the first line, so that the lines are known to be this job's.
            self._replace({"commit": asdict(self.last)})
        except BaseException:
            if not os.fstat(self._part).st_size:
                self.part_path.unlink(missing_ok=True)
            self.close()
            raise

    def close(self) -> None:
        """Close the lines, and let go of the job."""
        os.close(self._part)

    def write(self, lines: bytes) -> None:
        """Append lines, which count from the next commit on. Errors: OSError."""
        write_all(self._part, lines, self.part_path)

    def commit(self, record: Record) -> None:
        """Have everything written so far on the disk, and say so. Errors: OSError."""
        os.fsync(self._part)
        self._replace({"commit": asdict(record)})
        self.last = record

    def finish(self, told: Mapping[str, Any]) -> None:
        """Record that the target has its name, and what was told; the lines are not needed more."""
        self.part_path.unlink(missing_ok=True)
        self._replace({"done": {**told, "bytes": self.target.stat().st_size}})
        sync_directory(self.path.absolute().parent)

    def _check_names(self) -> None:
        """Refuse to write over files that no job is known to have written."""
        for path in (self.target, self.part_path):
            if path.exists() and (path == self.target or path.stat().st_size):
                raise LogsteerError(
                    f"{path} exists, and no job is known that wrote it: name another file, or "
                    "--restart to replace it"
                )

    def _replace(self, document: Mapping[str, Any]) -> None:
        new = self.path.with_name(f"{self.path.name}.new")
        whole = {"header": self.header, "identity": self.identity, **document}
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_all(file, json.dumps(whole).encode(), new)
            os.fsync(file)
        finally:
            os.close(file)
        new.replace(self.path)

    def _read(self) -> None:
        """Read the last commit; none where its lines are not there."""
        if not self.path.exists():
            return
        try:
            found = json.loads(self.path.read_bytes())
            self._check(found["header"])
        except (ValueError, KeyError, TypeError) as error:
            raise LogsteerError(
                f"{self.path} is not a record of a job of this version; --restart begins again"
            ) from error
        if "done" in found:
            self._check_done(found["done"])
            return
        commit = found["commit"]
        last = Record(**{**commit, "tally": RowCounts(**commit["tally"])})
        has_lines = os.fstat(self._part).st_size >= last.bytes
        # The lines of a whole job may have become its target.
        self.is_placed = not has_lines and last.is_whole and self.target.exists()
        if has_lines or self.is_placed:
            self.last, self.identity = last, found["identity"]

    def _check_done(self, done: dict[str, Any]) -> None:
        size = self.target.stat().st_size if self.target.exists() else None
        if size != done["bytes"]:
            was = "is gone" if size is None else f"has {size} bytes, not {done['bytes']}"
            raise LogsteerError(
                f"{self.target} was finished and {was} now; --restart makes it again"
            )
        self.done = done

    def _check(self, header: Mapping[str, Any]) -> None:
        """Check that the files are of this job. Errors: LogsteerError that says what differs."""
        names = [n for n in {**header, **self.header} if header.get(n) != self.header.get(n)]
        if names:
            told = "; ".join(
                f"{name} was {json.dumps(header.get(name)):.200} and is "
                f"{json.dumps(self.header.get(name)):.200}"
                for name in names
            )
            raise LogsteerError(
                f"{self.path} is of another job: {told}. Name another file, or --restart to begin "
                "again"
            )


def check_target(path: Path) -> None:
    """Make sure that a file of this name can be written. Errors: LogsteerError."""
    if find_format(path) == "parquet":
        raise LogsteerError(
            f"{path}: results are written as JSON lines: name a .jsonl or .jsonl.gz"
        )
    if not path.absolute().parent.is_dir():
        raise LogsteerError(f"{path}: there is no directory {path.absolute().parent}")


def place(lines: Path, target: Path) -> None:
    """Make the target of the finished lines, and give it its name. Errors: OSError.

    The same lines give the same bytes: a job that was interrupted here does this again.
    """
    new = lines
    if find_format(target) == "jsonl.gz":
        new = target.with_name(f"{target.name}.new")
        # Without a name and a time, which would differ from run to run.
        with (
            new.open("wb") as file,
            lines.open("rb") as plain,
            gzip.GzipFile("", "wb", 6, file, mtime=0) as packed,
        ):
            shutil.copyfileobj(plain, packed, 2**20)
    with new.open("rb") as whole:
        os.fsync(whole.fileno())
    new.replace(target)
    sync_directory(target.absolute().parent)


def lock(path: Path) -> int:
    """Open a file for this process alone, made where it is not there; return its descriptor.

    Errors: LogsteerError where another process has it.
    """
    import fcntl

    while True:
        found = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have given it another name, or none.
            if path.exists() and os.path.samestat(os.fstat(found), path.stat()):
                return found
        except OSError as error:
            os.close(found)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise LogsteerError(f"{path} cannot be locked: {error.strerror}") from error
            target = path.name.removesuffix(".part")
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

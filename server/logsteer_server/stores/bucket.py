"""Files behind a URL that fsspec reaches: bounded calls, tried again, that never half-write a card.

Calls are told by their place below the URL, such as `vectors/contents/…`. What is asked of the
file system is what object stores have: read and write a file whole, list, remove. There is no
rename, no lock, no append; a read and a listing after a write see it (S3, Google's and Azure's
stores promise that). A write may arrive long after it was given up.
"""

import importlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from logsteer.errors import APIError, api_error
from logsteer_server.settings import ConfigurationError, SharedStore
from logsteer_server.stores.local_files import copy_file, list_below, remove_file, write_file

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

PIECE = 16 * 2**20
"""Bytes of a content that one call reads; a call that moves more has this often the time."""
READ_AT_ONCE = 256
"""Small files that one call reads."""
FIRST_PAUSE_S = 0.2
"""Before a call is tried again; twice as long before each further one."""
REST_S = 2.0
"""After a call that failed in vain, others fail at once for so long: nobody waits in line for what
does not answer."""
LASTING = (PermissionError, NotImplementedError, IsADirectoryError, NotADirectoryError, TypeError)
"""What trying again does not mend."""


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A file that a listing has: its bytes, and a text that differs when the file does."""

    size: int
    version: str


class Bucket:
    """The files below `store_url`; threads may share it.

    Errors of all methods: FileNotFoundError; APIError `overloaded` where the store does not answer
    in the settings' time, `internal` where it refuses. Errors here: ConfigurationError for a URL
    that cannot be used, also where the package for it is missing.
    """

    def __init__(self, store: SharedStore) -> None:
        self.url = store.url
        self._timeout_s = store.timeout_s
        self._retries = store.retries
        self._system = open_file_system(store)
        self._root = str(self._system._strip_protocol(store.url)).rstrip("/")
        self._is_local = "file" in _name_protocols(self._system)
        self._pool = ThreadPoolExecutor(store.threads, "bucket")
        self._lock = threading.Lock()
        self._rests_until = 0.0
        self.trouble: str | None = None
        """Why the last call failed; None where it did not."""

    def list_files(self, place: str = "") -> dict[str, BucketEntry]:
        """Return the files below a place, by what follows it; none where the place is not there."""
        start = self._locate(place)
        if self._is_local:
            present = self._call(list_below, Path(start)).items()
            return {
                file: BucketEntry(own.st_size, f"{own.st_ino}-{own.st_mtime_ns}-{own.st_size}")
                for file, own in present
            }

        def find() -> Mapping[str, Mapping[str, Any]]:
            self._system.invalidate_cache()
            found: Mapping[str, Mapping[str, Any]] = self._system.find(start, detail=True)
            return found

        try:
            found = self._call(find)
        except FileNotFoundError:
            return {}
        files = {path: about for path, about in found.items() if about.get("type") == "file"}
        return {
            path[len(start) + 1 :]: BucketEntry(int(about["size"]), repr(sorted(about.items())))
            for path, about in files.items()
            if path.startswith(f"{start}/")
        }

    def read(self, place: str) -> bytes:
        """Return a file's bytes."""
        return bytes(self._call(self._system.cat_file, self._locate(place)))

    def read_many(self, places: Sequence[str]) -> dict[str, bytes]:
        """Return the bytes of small files by their places; those that are gone are left out."""
        found: dict[str, bytes] = {}
        for start in range(0, len(places), READ_AT_ONCE):
            found |= self._call(self._read_some, places[start : start + READ_AT_ONCE])
        return found

    def _read_some(self, places: Sequence[str]) -> dict[str, bytes]:
        system, paths = self._system, {self._locate(place): place for place in places}
        if getattr(system, "async_impl", False) and len(paths) > 1:  # it reads them at once
            found = system.cat(list(paths), on_error="return")
        else:
            found = {path: _read_if_there(system, path) for path in paths}
        read = {}
        for path, data in found.items():
            if isinstance(data, Exception) and not isinstance(data, FileNotFoundError):
                raise data
            if isinstance(data, bytes):
                read[paths[path]] = data
        return read

    def read_piece(self, place: str, start: int, end: int) -> bytes:
        """Return the bytes [start, end) of a file."""
        return bytes(self._call(self._system.cat_file, self._locate(place), start=start, end=end))

    def download(self, place: str, write: Callable[[bytes], object], size: int) -> None:
        """Pass a file of so many bytes on, piece by piece."""
        for start in range(0, size, PIECE):
            write(self.read_piece(place, start, min(size, start + PIECE)))

    def measure(self, place: str) -> int:
        """Return a file's size."""
        path = self._locate(place)

        def measure() -> int:
            self._system.invalidate_cache()
            return int(self._system.info(path)["size"])

        return self._call(measure)

    def write(self, place: str, data: bytes) -> None:
        """Write a small file: whoever reads it meanwhile gets the old one or the new one."""
        path = self._locate(place)
        with self._refuse_lack():
            if self._is_local:
                self._call(write_file, Path(path), data)
            else:
                self._call(self._system.pipe_file, path, data)

    def upload(self, file: Path, place: str) -> None:
        """Copy a file of this machine to a place that no other upload has."""
        path, size = self._locate(place), file.stat().st_size
        with self._refuse_lack():
            if self._is_local:
                self._call(copy_file, file, Path(path), num_bytes=size)
            else:
                self._call(self._system.put_file, str(file), path, num_bytes=size)

    @contextmanager
    def _refuse_lack(self) -> Iterator[None]:
        """Turn what a bucket that is not there makes of writing to it into APIError."""
        try:
            yield
        except FileNotFoundError as error:
            raise self._refuse_lasting(error) from error

    def remove(self, place: str) -> None:
        """Remove a file, if it is there."""
        path = self._locate(place)
        with suppress(FileNotFoundError):
            if self._is_local:
                self._call(remove_file, Path(path), Path(self._root))
            else:
                self._call(self._system.rm_file, path)

    def probe(self) -> None:
        """Find out whether the store answers."""
        with suppress(FileNotFoundError):
            self._call(self._system.info, self._locate("names"))

    def close(self) -> None:
        """Take no more calls. Does not wait for those at work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _locate(self, place: str) -> str:
        return f"{self._root}/{place}" if place else self._root

    def _call(
        self, work: Callable[..., T], *arguments: Any, num_bytes: int = 0, **options: Any
    ) -> T:
        """Return what a call returns, tried as often as the settings say."""
        if time.monotonic() < self._rests_until:
            raise self._refuse()
        pause_s = FIRST_PAUSE_S
        timeout_s = self._timeout_s * (1 + num_bytes // PIECE)
        for left in reversed(range(self._retries + 1)):
            future: Future[T] = self._pool.submit(work, *arguments, **options)
            try:
                result = future.result(timeout_s)
            except FileNotFoundError:
                self._note(None)
                raise
            except LASTING as error:
                raise self._refuse_lasting(error) from error
            except Exception as error:  # whatever a file system's package raises may pass
                future.cancel()
                failure: Exception = error
                timed_out = isinstance(error, FutureTimeout) and not future.done()
                why = f"no answer within {timeout_s:g} s" if timed_out else repr(error)
            else:
                self._note(None)
                return result
            if left:
                time.sleep(pause_s)
                pause_s *= 2
        self._note(why)
        self._rests_until = time.monotonic() + REST_S
        raise self._refuse() from failure

    def _note(self, trouble: str | None) -> None:
        with self._lock:
            known, self.trouble = self.trouble, trouble
        if trouble is not None and known is None:
            log.error("%s cannot be used: %s", self.url, trouble)
        elif trouble is None and known is not None:
            log.warning("%s answers again", self.url)

    def _refuse_lasting(self, error: Exception) -> APIError:
        self._note(f"{type(error).__name__}: {error}")
        detail = "The shared store refuses this server; the server's log says why."
        return api_error("internal", detail)

    def _refuse(self) -> APIError:
        detail = (
            "The shared store of vectors, overrides and adapters does not answer. Try again; what "
            "names none of them is answered meanwhile."
        )
        return api_error("overloaded", detail, retry_after=REST_S)


def open_file_system(store: SharedStore) -> Any:
    """Return fsspec's file system of a URL. Errors: ConfigurationError."""
    try:
        fsspec = importlib.import_module("fsspec")
        known = importlib.import_module("fsspec.registry").known_implementations
    except ImportError as error:
        raise ConfigurationError("store_url takes the package fsspec: install it") from error
    protocol, separator, _ = store.url.partition("://")
    if not separator:
        raise ConfigurationError(f"store_url: {store.url} is no URL, such as s3://bucket/logsteer")
    try:
        return fsspec.filesystem(
            protocol,
            # What others have written is to be seen, so nothing may be remembered here.
            **{"use_listings_cache": False, "skip_instance_cache": True, **store.options},
        )
    except ImportError as error:
        needed = known.get(protocol, {}).get("err", str(error))
        raise ConfigurationError(
            f"store_url: {protocol}:// takes a package that is not installed. fsspec says: {needed}"
        ) from error
    except Exception as error:
        raise ConfigurationError(f"store_url: {store.url} cannot be used: {error}") from error


def _read_if_there(system: Any, path: str) -> bytes | FileNotFoundError:
    try:
        return bytes(system.cat_file(path))
    except FileNotFoundError as error:
        return error


def _name_protocols(system: Any) -> Collection[str]:
    found = system.protocol
    return (found,) if isinstance(found, str) else tuple(found)

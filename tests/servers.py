"""`logsteer-server` processes for tests: those of one test, and those that a whole session shares.

Shared servers start in the background, in the order in which the selected files of tests need them,
while tests that need none run, and end after the last file that needs them. One process owns them,
pytest's own or, under pytest-xdist, that of the controller; it and the workers speak through files
in one directory:

    wanted.json      for each server its files, written by a worker once it knows what is selected
    NAME/url         its server is ready and answers here
    NAME/failed      it is not, and why
    NAME.asked       a test waits for its server
    finished/FILE    this file of tests has run
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from logsteer import Client

START_TIMEOUT_S = 600
LISTEN_TIMEOUT_S = 120
STARTS_AT_ONCE = 2
SERVERS_AHEAD = 3
"""No more of them run while no test waits for another: a model of one takes up to 0.9 GiB."""
POLL_S = 0.05

Configuration = dict[str, Any]


class Server:
    """A `logsteer-server`: its `directory`, its `url`, what it has printed, and its process.

    `process` is None where another process started it.
    """

    def __init__(self, directory: Path, url: str, process: subprocess.Popen[bytes] | None) -> None:
        self.directory = directory
        self.config_path = directory / "models.yaml"
        self.url = url
        self.process = process

    @classmethod
    def start(cls, config: Configuration, directory: Path, **environment: str) -> "Server":
        """Start a server that keeps its files in this directory; it is not ready yet."""
        server = cls(directory, "", None)
        server.config_path.write_text(yaml.safe_dump(config))
        arguments = ["--port", "0", "--config", str(server.config_path)]
        variables = os.environ | {"XDG_DATA_HOME": str(directory)} | environment
        with (directory / "log").open("wb") as log:
            server.process = subprocess.Popen(
                [sys.executable, "-m", "logsteer_server", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=variables,
                start_new_session=True,  # so that a test can signal all of its processes
            )
        server.url = server._wait_for(r"listens on (http://\S+);")
        return server

    def _wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + LISTEN_TIMEOUT_S
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.output):
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.stop()
        raise RuntimeError(f"the server printed no {pattern!r}:\n{self.output}")

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return (self.directory / "log").read_text()

    @property
    def lines(self) -> list[str]:
        """What was printed so far, by line."""
        return self.output.splitlines(keepends=True)

    def wait_until_ready(self) -> None:
        """Wait until `/readyz` says so. Errors: RuntimeError where a model failed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        # On a busy machine a poll may come so late that the server has closed the connection.
        with Client(self.url, max_retries=3) as client:
            while time.monotonic() < deadline and self.process.poll() is None:
                failed = [card for card in client.models().models if card.state == "failed"]
                if failed:
                    raise RuntimeError(f"{failed}\n{self.output}")
                if client.ready().ready:
                    return
                time.sleep(0.1)
        raise RuntimeError(f"the server did not become ready:\n{self.output}")

    def stop(self) -> None:
        """End the server as Ctrl-C does."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def stop_all(servers: Iterable[Server]) -> None:
    """End servers side by side."""
    servers = list(servers)
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        list(pool.map(Server.stop, servers))


class SharedServers:
    """The directory through which the owner of the servers and the tests speak."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def want(self, files: Mapping[str, Iterable[str]]) -> None:
        """Say which files of tests need each server, in order; the first call of all counts."""
        with contextlib.suppress(FileExistsError):
            own = self.directory / f"wanted-{os.getpid()}"
            own.write_text(json.dumps({name: list(needed) for name, needed in files.items()}))
            os.link(own, self.directory / "wanted.json")

    def find(self, name: str) -> Server:
        """Return this server once it is ready. Errors: RuntimeError where it did not start."""
        (self.directory / f"{name}.asked").touch()
        place = self.directory / name
        # Others may be starting that were asked for before.
        deadline = time.monotonic() + 3 * START_TIMEOUT_S
        while not (place / "url").exists():
            if (place / "failed").exists():
                raise RuntimeError((place / "failed").read_text())
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server {name} was not started in time")
            time.sleep(0.05)
        return Server(place, (place / "url").read_text(), None)

    def finish(self, file: str) -> None:
        """Say that all selected tests of a file have run."""
        mark = self._mark(file)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()

    def is_finished(self, file: str) -> bool:
        """Return whether `finish` was told this file."""
        return self._mark(file).exists()

    def _mark(self, file: str) -> Path:
        return self.directory / "finished" / file


class Starter:
    """Starts what tests want of the configurations, two servers at once, and ends it.

    A server that no test waits for yet starts as soon as its models have room beside those that
    run; one that a test waits for starts at once.
    """

    def __init__(
        self, directory: Path, configurations: Mapping[str, Callable[[Path], Configuration]]
    ) -> None:
        self._directory = directory
        self._configurations = configurations
        self._shared = SharedServers(directory)
        self._starting: dict[str, Future[None]] = {}
        self._running: dict[str, Server] = {}
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(STARTS_AT_ONCE)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        wanted = self._directory / "wanted.json"
        while not wanted.exists():
            if self._closing.wait(POLL_S):
                return
        files = json.loads(wanted.read_text())
        waiting = list(files)
        while not self._closing.wait(POLL_S):
            self._starting = {n: own for n, own in self._starting.items() if not own.done()}
            for name in self._running.keys() - self._starting.keys():
                if all(map(self._shared.is_finished, files[name])):
                    self._running.pop(name).stop()
            if len(self._starting) < STARTS_AT_ONCE and (name := self._choose(waiting)):
                waiting.remove(name)
                self._starting[name] = self._pool.submit(self._start, name)

    def _choose(self, waiting: list[str]) -> str | None:
        """Return the server to be started next: one that a test waits for, or the first."""
        asked = [name for name in waiting if (self._directory / f"{name}.asked").exists()]
        if asked:
            return asked[0]
        if waiting and len(self._running.keys() | self._starting.keys()) < SERVERS_AHEAD:
            return waiting[0]
        return None

    def _start(self, name: str) -> None:
        place = self._directory / name
        place.mkdir()
        try:
            server = Server.start(self._configurations[name](place), place)
            self._running[name] = server
            server.wait_until_ready()
        except Exception as error:  # whoever waits for this server raises it
            write(place / "failed", f"{type(error).__name__}: {error}")
        else:
            write(place / "url", server.url)

    def close(self) -> None:
        """End all servers. Blocks for seconds."""
        self._closing.set()
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)
        stop_all(self._running.values())


def write(path: Path, text: str) -> None:
    """Write a file that is whole as soon as it is there."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)

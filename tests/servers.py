"""`logsteer-server` processes for tests: those of one test, and those that a whole session shares.

Shared servers start in the background, in the order in which the selected tests need them, while
tests that need none run. One process owns them, pytest's own or, under pytest-xdist, that of the
controller; it and the workers speak through files in one directory:

    wanted.json      names in order, written by a worker once it knows which tests are selected
    NAME/url         its server is ready and answers here
    NAME/failed      it is not, and why
    NAME/released    no test needs it any more
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
MODELS_AT_ONCE = 12
"""Models of all servers that run: one takes up to 0.9 GiB, most of it the code of its engine."""

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
        command = [sys.executable, "-m", "logsteer_server", "--port", "0", "--config"]
        with (directory / "log").open("wb") as log:
            server.process = subprocess.Popen(
                [*command, str(server.config_path)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=os.environ | {"XDG_DATA_HOME": str(directory)} | environment,
                start_new_session=True,  # so that a test can send a signal to all of its processes
            )
        server.url = server._wait_for(r"listens on (http://\S+);")
        return server

    def _wait_for(self, pattern: str) -> str:
        assert self.process is not None
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
        assert self.process is not None
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
        assert self.process is not None
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

    def want(self, names: Iterable[str]) -> None:
        """Say which servers the tests of this session need, in order; the first call counts."""
        with contextlib.suppress(FileExistsError):
            own = self.directory / f"wanted-{os.getpid()}"
            own.write_text(json.dumps(list(names)))
            os.link(own, self.directory / "wanted.json")

    def find(self, name: str) -> Server:
        """Return this server once it is ready. Errors: RuntimeError where it did not start."""
        place = self.directory / name
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (place / "url").exists():
            if (place / "failed").exists():
                raise RuntimeError((place / "failed").read_text())
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server {name} was not started in {START_TIMEOUT_S} s")
            time.sleep(0.05)
        return Server(place, (place / "url").read_text(), None)

    def release(self, name: str) -> None:
        """Let this server end: no test needs it any more."""
        (self.directory / name / "released").touch()


class Starter:
    """Starts what tests want of the configurations, two servers at once, and ends it.

    A server whose models have no room beside those that run waits for others to be released.
    """

    def __init__(
        self, directory: Path, configurations: Mapping[str, Callable[[Path], Configuration]]
    ) -> None:
        self._directory = directory
        self._configurations = configurations
        self._closing = threading.Event()
        self._running: dict[str, Server] = {}
        self._models: dict[str, int] = {}
        self._room = threading.Condition()
        self._pool = ThreadPoolExecutor(STARTS_AT_ONCE)
        self._starts: list[Future[None]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        wanted = self._directory / "wanted.json"
        while not self._closing.wait(0.05):
            if not self._starts and wanted.exists():
                names = json.loads(wanted.read_text())
                self._starts = [self._pool.submit(self._start, name) for name in names]
                wanted = self._directory / "nothing more"
            for name in list(self._running):
                if (self._directory / name / "released").exists():
                    self._running.pop(name).stop()
                    with self._room:
                        del self._models[name]
                        self._room.notify_all()

    def _take_room(self, name: str, models: int) -> None:
        with self._room:
            self._room.wait_for(
                lambda: (
                    self._closing.is_set() or sum(self._models.values()) + models <= MODELS_AT_ONCE
                )
            )
            self._models[name] = models

    def _start(self, name: str) -> None:
        place = self._directory / name
        place.mkdir()
        try:
            config = self._configurations[name](place)
            self._take_room(name, len(config["models"]))
            server = Server.start(config, place)
            self._running[name] = server
            server.wait_until_ready()
        except Exception as error:  # whoever waits for this server raises it
            if name not in self._running:
                self._models.pop(name, None)
            write(place / "failed", f"{type(error).__name__}: {error}")
        else:
            write(place / "url", server.url)

    def close(self) -> None:
        """End all servers. Blocks for seconds."""
        self._closing.set()
        with self._room:
            self._room.notify_all()
        self._pool.shutdown(cancel_futures=True)
        self._thread.join()
        stop_all(self._running.values())


def write(path: Path, text: str) -> None:
    """Write a file that is whole as soon as it is there."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)

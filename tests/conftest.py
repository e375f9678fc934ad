"""Servers that a whole test session shares: each is started once, as a user would start it."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml

from logsteer import Client

ROOT = Path(__file__).resolve().parents[1]
DEMO_MODEL = ROOT / "demo" / "model"
SHARED = ROOT.parent / "shared"
STORIES_MODEL = SHARED / "models" / "stories260k"
START_TIMEOUT_S = 300
VOCAB_SIZE = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]

hypothesis.settings.register_profile("shared-machine", deadline=None)
hypothesis.settings.load_profile("shared-machine")

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(),
    reason="SKIPPED BECAUSE ../shared IS ABSENT: its models and data are needed",
)


class Server:
    """A `logsteer-server` process: `url`, what it has printed so far, and its process."""

    def __init__(self, config: dict[str, Any], directory: Path, **environment: str) -> None:
        path = directory / "models.yaml"
        path.write_text(yaml.safe_dump(config))
        self.config_path = path
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "logsteer_server", "--config", str(path), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=directory,
            env=os.environ
            | {"OMP_WAIT_POLICY": "PASSIVE", "XDG_DATA_HOME": str(directory)}
            | environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_for(r"listens on (http://\S+);")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def _wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.output):
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"the server printed no {pattern!r}:\n{self.output}")

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return "".join(self.lines)

    def wait_until_ready(self) -> None:
        """Wait until `/readyz` says so. Errors: RuntimeError where a model failed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with Client(self.url, max_retries=0) as client:
            while time.monotonic() < deadline and self.process.poll() is None:
                models = {card.id: card for card in client.models().models}
                failed = [c for c in models.values() if c.state == "failed"]
                if failed:
                    raise RuntimeError(f"{failed}\n{self.output}")
                if client.ready().ready:
                    return
                time.sleep(0.2)
        raise RuntimeError(f"the server did not become ready:\n{self.output}")

    def stop(self) -> None:
        """End the server as Ctrl-C does."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


ServerFactory = Callable[..., Server]


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFactory]:
    """Starts servers that end with the session: `start_server(config, **environment)`."""
    servers: list[Server] = []

    def start(config: dict[str, Any], **environment: str) -> Server:
        servers.append(Server(config, tmp_path_factory.mktemp("server"), **environment))
        servers[-1].wait_until_ready()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def fake_model(model_id: str = "fake", **engine_args: Any) -> dict[str, Any]:
    """Configuration of a fake model with the demo model's tokenizer."""
    return {
        "id": model_id,
        "engine": "fake",
        "path": str(DEMO_MODEL),
        "engine_args": {"vocab_size": VOCAB_SIZE, **engine_args},
    }


def vllm_model(model_id: str, path: Path, **settings: Any) -> dict[str, Any]:
    """Configuration of a small model on vLLM."""
    defaults = {"dtype": "float32", "memory": "256MiB", "compile": False}
    return {"id": model_id, "engine": "vllm", "path": str(path)} | defaults | settings


@pytest.fixture(scope="session")
def fake_server(start_server: ServerFactory) -> Server:
    """A server with one fake model."""
    return start_server({"models": [fake_model()]})


@pytest.fixture(scope="session")
def vllm_server(start_server: ServerFactory) -> Server:
    """A server with real vLLM: `demo`, and `stories` where ../shared has it.

    It has no result cache, so that whatever is compared was computed twice.
    """
    models = [vllm_model("demo", DEMO_MODEL)]
    if STORIES_MODEL.is_dir():
        models.append(vllm_model("stories", STORIES_MODEL))
    return start_server({"models": models, "cache_bytes": 0})


def tlens_model(model_id: str, path: Path, **settings: Any) -> dict[str, Any]:
    """Configuration of a small model on TransformerLens."""
    defaults = {"dtype": "float32", "devices": "cpu"}
    return {"id": model_id, "engine": "transformer_lens", "path": str(path)} | defaults | settings


@pytest.fixture(scope="session")
def tlens_server(start_server: ServerFactory) -> Server:
    """A server with TransformerLens: `demo`; without a result cache, like vLLM's."""
    return start_server({"models": [tlens_model("demo", DEMO_MODEL)], "cache_bytes": 0})


@pytest.fixture(scope="session")
def fake_client(fake_server: Server) -> Iterator[Client]:
    """A client of the fake server."""
    with Client(fake_server.url, max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def vllm_client(vllm_server: Server) -> Iterator[Client]:
    """A client of the vLLM server; requests go to `demo` unless they name another model."""
    with Client(vllm_server.url, model="demo", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="session")
def tlens_client(tlens_server: Server) -> Iterator[Client]:
    """A client of the TransformerLens server."""
    with Client(tlens_server.url, max_retries=0, timeout=300) as client:
        yield client

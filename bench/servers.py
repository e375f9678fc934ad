"""Servers to measure: logsteer's, and the stock one of vLLM, each as a user would start it."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

START_TIMEOUT_S = 400


def find_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def run_server(command: list[str], url: str, health: str, log: Path) -> Iterator[str]:
    """The URL of a server that answers; it is stopped at the end."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        try:
            _wait(process, url + health, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=30).status_code == httpx.codes.OK:
                return
        time.sleep(0.5)
    raise RuntimeError(f"no answer from {url}:\n{log.read_text()[-3000:]}")


def run_logsteer(
    models: dict[str, Path], directory: Path, engine: str = "vllm", **settings: Any
) -> contextlib.AbstractContextManager[str]:
    """logsteer's own server with these models by id, in float32, without a result cache.

    `settings` are those of each model; on vLLM they run eagerly.
    """
    if engine == "vllm":
        settings = {"memory": "1GiB", "compile": False} | settings
    entries = [
        {"id": name, "path": str(path), "dtype": "float32", "engine": engine} | settings
        for name, path in models.items()
    ]
    config = directory / "models.yaml"
    stores = {"store_directory": str(directory / "stores")}
    config.write_text(yaml.safe_dump({"models": entries, "cache_bytes": 0} | stores))
    port = find_port()
    command = [
        sys.executable,
        "-m",
        "logsteer_server",
        "--config",
        str(config),
        "--port",
        str(port),
    ]
    return run_server(
        command, f"http://127.0.0.1:{port}", "/readyz", directory / f"logsteer-{port}.log"
    )


def run_stock(path: Path, directory: Path) -> contextlib.AbstractContextManager[str]:
    """vLLM's own server with one model, eager, in float32, its other settings as they come."""
    port = find_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path),
        "--served-model-name", "stock", "--dtype", "float32", "--enforce-eager",
        "--port", str(port), "--host", "127.0.0.1",
    ]  # fmt: skip
    return run_server(
        command, f"http://127.0.0.1:{port}", "/health", directory / f"stock-{port}.log"
    )

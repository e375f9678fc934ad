"""Servers to measure: logsteer's, and the stock one of vLLM, each as a user would start it."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
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


def find_process(url: str) -> psutil.Process:
    """Return the process of ours that serves at a URL. Errors: LookupError where there is none."""
    port = url.rpartition(":")[2]
    for child in psutil.Process().children():
        command = child.cmdline()
        if "--port" in command and command[command.index("--port") + 1] == port:
            return child
    raise LookupError(f"no process of this one serves at {url}")


def run_logsteer(
    models: Mapping[str, Path],
    directory: Path,
    engine: str = "vllm",
    server: Mapping[str, Any] | None = None,
    **settings: Any,
) -> contextlib.AbstractContextManager[str]:
    """logsteer's own server with these models by id, in float32, without a result cache.

    `server` are settings of the server, `settings` those of each model.
    """
    if engine == "vllm":
        settings = {"memory": "1GiB"} | settings
    entries = [
        {"id": name, "path": str(path), "dtype": "float32", "engine": engine} | settings
        for name, path in models.items()
    ]
    port = find_port()
    config = directory / f"models-{port}.yaml"
    own = {"cache_bytes": 0, "store_directory": str(directory / f"stores-{port}"), **(server or {})}
    config.write_text(yaml.safe_dump({"models": entries} | own))
    command = [
        sys.executable, "-m", "logsteer_server", "--config", str(config), "--port", str(port),
    ]  # fmt: skip
    return run_server(
        command, f"http://127.0.0.1:{port}", "/readyz", directory / f"logsteer-{port}.log"
    )


def run_stock(
    path: Path, directory: Path, dtype: str, memory: int | float, *more: str
) -> contextlib.AbstractContextManager[str]:
    """vLLM's own server with one model and its own defaults, but for dtype and memory: bytes of
    cache, or a share of the GPU; `more` are arguments of its command.
    """
    size = "--kv-cache-memory-bytes" if isinstance(memory, int) else "--gpu-memory-utilization"
    port = find_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path),
        "--served-model-name", "stock", "--dtype", dtype, "--port", str(port),
        "--host", "127.0.0.1", size, str(memory), *more,
    ]  # fmt: skip
    return run_server(
        command, f"http://127.0.0.1:{port}", "/health", directory / f"stock-{port}.log"
    )

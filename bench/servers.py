"""Servers to measure: logsteer's, and the stock one of vLLM, each as a user would start it; and
modules of bench that run in a process of their own.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from tests.ports import find_port

START_TIMEOUT_S = 400
ALL_CORES = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))))}
"""What has stock vLLM compute on all cores, as ours does: of itself it leaves one to its scheduler,
which is half of a machine with two.
"""


@contextlib.contextmanager
def run_server(
    command: list[str], url: str, health: str, log: Path, environment: dict[str, str]
) -> Iterator[str]:
    """The URL of a server that answers; it is stopped at the end."""
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | own | environment,
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


def find_engines(server: psutil.Process) -> list[psutil.Process]:
    """Return the processes of a server's engines."""
    return [child for child in server.children() if "spawn_main" in " ".join(child.cmdline())]


def read_cpu(process: psutil.Process) -> float:
    """Return the CPU seconds of a process, those of its children left out."""
    times = process.cpu_times()
    return float(times.user + times.system)


def run_module(
    name: str, *arguments: object, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what a module of bench prints as its result, in a process of its own.

    Errors: RuntimeError with the end of its messages where it fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", *map(str, arguments)],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"bench.{name} has failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = read_result(done.stdout.splitlines())
    return found


def read_result(lines: Iterable[str]) -> Any:
    """Return what the first line has that begins with `result`; vLLM prints, too.

    Errors: EOFError where there is no such line.
    """
    for line in lines:
        if line.startswith("result "):
            return json.loads(line.removeprefix("result "))
    raise EOFError("no line of the output begins with `result`")


def print_result(result: object) -> None:
    """Print what `read_result` reads."""
    print("result", json.dumps(result), flush=True)


class Worker:
    """A process of a module of bench that prints a result once it is ready, and one for each line
    that it is told; `told` is the first.
    """

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log
        self.told = self._read()

    def ask(self, question: object) -> Any:
        """Return the answer to a question. Errors: RuntimeError where the process ends."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        try:
            return read_result(self._process.stdout)
        except EOFError as error:
            detail = f"the process has ended:\n{self._log.read_text()[-3000:]}"
            raise RuntimeError(detail) from error


@contextlib.contextmanager
def start_worker(log: Path, name: str, *arguments: object) -> Iterator[Worker]:
    """Give a process of a module of bench, which is stopped at the end."""
    command = [sys.executable, "-m", f"bench.{name}", *map(str, arguments)]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            yield Worker(process, log)
            process.communicate(timeout=60)
        finally:
            process.kill()


def answer_questions(first: object, answer: Callable[[Any], object]) -> None:
    """Be such a process: print a first result, then one for each line, until stdin ends."""
    print_result(first)
    for line in sys.stdin:
        print_result(answer(json.loads(line)))


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
        command, f"http://127.0.0.1:{port}", "/readyz", directory / f"logsteer-{port}.log", {}
    )


def run_stock(
    path: Path, directory: Path, dtype: str, memory: int | float, *more: str
) -> contextlib.AbstractContextManager[str]:
    """vLLM's own server with one model and its own defaults, but for dtype, cores, and memory:
    bytes of cache, or a share of the GPU. `more` are further arguments.
    """
    size = "--kv-cache-memory-bytes" if isinstance(memory, int) else "--gpu-memory-utilization"
    port = find_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path),
        "--served-model-name", "stock", "--dtype", dtype, "--port", str(port),
        "--host", "127.0.0.1", size, str(memory), *more,
    ]  # fmt: skip
    return run_server(
        command, f"http://127.0.0.1:{port}", "/health", directory / f"stock-{port}.log", ALL_CORES
    )

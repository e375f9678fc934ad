"""Where benchmarks run: their files and models, the servers they share, other servers."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from logsteer_server.contract.engine import Engine
from logsteer_server.contract.jobs import GenerateJob, GenerateOutput, Policy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))
import corpus as corpus

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo" / "model"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where peers run, as our engines do by default."""
GREEDY = Policy(temperature=0.0)


def make_model(
    directory: Path,
    *,
    vocab: int = 26_552,
    hidden: int = 384,
    layers: int = 4,
    sharpness: float = 1.0,
) -> Path:
    """A checkpoint with random weights of a fixed seed; by default 18 million of them.

    Its vocabulary is larger than its tokenizer's, so it is measured with token ids. `sharpness`
    multiplies its logits: 10 makes their distributions about as peaked as a trained model's.
    """
    path = directory / f"llama-{vocab}-{hidden}-{layers}-{sharpness:g}"
    if path.is_dir():
        return path
    torch.manual_seed(0)
    heads = hidden // 64
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.constant_(model.model.norm.weight, sharpness)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, path / name)
    return path


def read_vocab(path: Path) -> int:
    """The vocabulary size of a checkpoint."""
    return int(json.loads((path / "config.json").read_text())["vocab_size"])


def generate(engine: Engine, jobs: Sequence[GenerateJob]) -> list[list[int]]:
    """Return the tokens of each job. Errors: RuntimeError where one fails."""
    engine.add(list(enumerate(jobs)))
    tokens: dict[int, list[int]] = {}
    while engine.busy:
        for index, result in engine.step():
            if not isinstance(result, GenerateOutput):
                raise RuntimeError(str(result))
            tokens[index] = result.token_ids.tolist()
    return [tokens[index] for index in range(len(jobs))]


def run_module(name: str, *arguments: object, **options: Any) -> Any:
    """Return what a module of bench prints as its result, run in a process of its own."""
    command = [sys.executable, "-m", f"bench.{name}", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options)
    return json.loads(find_result(done.stdout.splitlines()))


def find_result(lines: Iterable[str]) -> str:
    """Return what stands behind `result` in the first line that begins with it; vLLM prints, too.

    Errors: ValueError where there is no such line.
    """
    for line in lines:
        if line.startswith("result "):
            return line.removeprefix("result ")
    raise ValueError("there is no result")


class Worker:
    """A process of a module of bench that answers lines; `told` is its first result."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log
        self.told: Any = self._read()

    def ask(self, line: str) -> Any:
        """Return its answer to a line. Errors: RuntimeError where the process ends."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        try:
            return json.loads(find_result(self._process.stdout))
        except ValueError as error:
            ended = f"the process has ended:\n{self._log.read_text()[-3000:]}"
            raise RuntimeError(ended) from error


@contextlib.contextmanager
def start_worker(log: Path, name: str, *arguments: object) -> Iterator[Worker]:
    """Give a process of a module of bench; it is stopped at the end."""
    command = [sys.executable, "-m", f"bench.{name}", *map(str, arguments)]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            yield Worker(process, log)
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
        finally:
            if process.poll() is None:
                process.kill()


def find_engines(server: psutil.Process) -> list[psutil.Process]:
    """Return the processes of a server's engines."""
    return [child for child in server.children() if "spawn_main" in " ".join(child.cmdline())]


def read_cpu(process: psutil.Process) -> float:
    """Return the CPU seconds of a process, those of its children left out."""
    times = process.cpu_times()
    return float(times.user + times.system)


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
    path: Path, directory: Path, dtype: str, memory: int
) -> contextlib.AbstractContextManager[str]:
    """vLLM's own server with one model and its own defaults, but for dtype and bytes of cache."""
    port = find_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path),
        "--served-model-name", "stock", "--dtype", dtype, "--port", str(port),
        "--host", "127.0.0.1", "--kv-cache-memory-bytes", str(memory),
    ]  # fmt: skip
    return run_server(
        command, f"http://127.0.0.1:{port}", "/health", directory / f"stock-{port}.log"
    )


ID = "model"
"""The id of the model in a server of ours."""
MEMORY = 8 * 2**30 if DEVICE == "cuda" else 2**30
"""Bytes of cached keys and values of a server: several with weights of their own run at once."""


@dataclass
class Workplace:
    """A directory for files, and the model: the user's, or one that is made.

    `dtype` is that of the user's model; the one made is measured in float32. `stack` ends what rows
    share.
    """

    directory: Path
    stack: contextlib.ExitStack
    given: Path | None = None
    dtype: str = "auto"
    _shared: list[str] = field(default_factory=list)

    def find_model(self, **shape: Any) -> Path:
        """Return the user's checkpoint, else one of 18 M random weights or of the shape given."""
        return self.given or make_model(self.directory, **shape)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of an engine of ours, under the names of `EngineSpec` and of the configuration.

        All others are its defaults, as a user has them.
        """
        dtype = "float32" if self.given is None else self.dtype
        return {"dtype": dtype, "memory": f"{MEMORY >> 30}GiB"}

    def serve(
        self, path: Path, engine: str = "vllm", **settings: Any
    ) -> contextlib.AbstractContextManager[str]:
        """Return the URL of a new server of ours, which ends with the block."""
        own = self.settings if engine == "vllm" else {"dtype": self.settings["dtype"]}
        return run_logsteer({ID: path}, self.directory, engine, **(own | settings))

    def serve_stock(self, path: Path) -> contextlib.AbstractContextManager[str]:
        """Return the URL of vLLM's own server, which ends with the block: with its own defaults,
        but for dtype and memory, which are those of ours.
        """
        return run_stock(path, self.directory, self.settings["dtype"], MEMORY)

    def share(self) -> str:
        """Return the URL of a server of the model, which is started once for all rows."""
        if not self._shared:
            self._shared.append(self.stack.enter_context(self.serve(self.find_model())))
        return self._shared[0]

    def stop_shared(self) -> None:
        """End the server that rows share, which would take from a row that it has no part in."""
        self.stack.close()
        self._shared.clear()

    def describe(self) -> dict[str, Any]:
        """Return what of this belongs beside a result."""
        found = {"device": DEVICE}
        if self.given is not None:
            found |= {"model": self.given.name, "dtype": self.dtype}
        return found


def describe_stock(chosen: Mapping[str, Any] | None = None) -> str:
    """Return the note that says with which settings stock vLLM ran, and what it chose itself."""
    words = "".join(f", {name} {value}" for name, value in (chosen or {}).items())
    return f"stock vLLM has its own defaults, but for our dtype and memory{words}"

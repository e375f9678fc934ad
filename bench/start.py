"""Where the time of a start goes: from the command to the first answer, by process and by phase.

    .venv/bin/python bench/start.py                        the demo, as `make serve` starts it
    .venv/bin/python bench/start.py --config models.yaml --runs 5
    .venv/bin/python bench/start.py --cold                 with empty caches of compiled code
    .venv/bin/python bench/start.py --imports              and which packages an engine imports

Wall-clock time is what a user waits; CPU time says the same on a machine with other work. The CPU
time of a process counts that of its children that have ended, such as vLLM's look at a model class.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
DEMO_CONFIG = ROOT / "demo" / "models.yaml"
ITEM = {"context": "The capital of France is", "targets": [" Paris"]}
TICKS = os.sysconf("SC_CLK_TCK")
TIMEOUT_S = 600
IMPORT_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")


def measure_start(directory: Path, runs: int) -> dict[str, Any]:
    """Measure starts of the demo to the first answer, after one that fills the caches."""
    first, *others = [start_server(DEMO_CONFIG, directory, {}) for _ in range(runs + 1)]
    ways = {phase: {"s": spread([one[phase] for one in others])} for phase in first}
    figures = {"s to the first answer": ways["wall: first answer"]["s"]}
    return {"runs": runs, "ways": ways, "figures": figures}


def spread(seconds: list[float]) -> list[float]:
    """Return the least, the median and the most of them."""
    return [round(x, 2) for x in (min(seconds), statistics.median(seconds), max(seconds))]


def start_server(config: Path, directory: Path, environment: dict[str, str]) -> dict[str, float]:
    """Start a server, ask its first model something, end it; return seconds by phase."""
    log = directory / "start.log"
    command = [sys.executable, "-m", "logsteer_server", "--port", "0", "--config", str(config)]
    began = time.monotonic()
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment
        )
    found: dict[str, float] = {}
    try:
        while not (url := re.search(r"listens on (\S+);", log.read_text())):
            _wait(server, log, began)
        found["wall: listens"] = time.monotonic() - began
        model = _list_models(url[1])[0]["id"]
        while _list_models(url[1])[0]["state"] != "ready":
            _wait(server, log, began)
        found["wall: ready"] = time.monotonic() - began
        _ask(url[1], "/logprob", {"model": model, "items": [ITEM]})
        found["wall: first answer"] = time.monotonic() - began
        return found | read_cpu(server.pid)
    finally:
        server.terminate()
        server.wait()


def _wait(server: subprocess.Popen[bytes], log: Path, began: float) -> None:
    if server.poll() is not None or time.monotonic() - began > TIMEOUT_S:
        raise RuntimeError(f"the server did not start:\n{log.read_text()}")
    time.sleep(0.1)


def _ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return an answer's JSON; without a body it is a GET."""
    method = "GET" if body is None else "POST"
    answer = httpx.request(method, url + path, json=body, timeout=TIMEOUT_S)
    return answer.raise_for_status().json()


def _list_models(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _ask(url, "/models")["models"]
    if failed := next((card for card in found if card["state"] == "failed"), None):
        raise RuntimeError(failed["detail"])
    return found


def read_cpu(server: int) -> dict[str, float]:
    """Return the CPU seconds that a server's processes have taken so far, by what they are."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        stats[int(path.parent.name)] = fields
    found: Counter[str] = Counter()
    for pid, fields in stats.items():
        own, ended = (sum(map(int, fields[n : n + 2])) / TICKS for n in (11, 13))
        if pid == server:
            found["CPU: HTTP process"] = own
        elif pid in _find_children(server, stats):
            command = Path(f"/proc/{pid}/cmdline").read_text()
            name = "resource tracker" if "resource_tracker" in command else "engines"
            found[f"CPU: {name}"] += own
            found["CPU: what engines started and has ended"] += ended
    return dict(found)


def _find_children(pid: int, stats: dict[int, list[str]]) -> set[int]:
    """Return all processes below one."""
    own = {child for child, fields in stats.items() if int(fields[1]) == pid}
    return own.union(*(_find_children(child, stats) for child in own))


def run_engine(config: Path) -> None:
    """Build the engine of the first model in this process, and print seconds by phase as JSON."""
    import resource
    from importlib import import_module

    import numpy as np

    from logsteer_server.contract.jobs import ScoreJob
    from logsteer_server.imports import hold_collector, leave_out_unused
    from logsteer_server.runtime.process import build_engine
    from logsteer_server.settings import load_settings

    marks: list[tuple[str, float, float]] = []

    def mark(phase: str) -> None:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = time.process_time() + ended.ru_utime + ended.ru_stime
        marks.append((phase, time.monotonic(), cpu))

    settings = load_settings(config)
    spec = settings.models[0].to_spec(settings.directory)
    mark("interpreter, settings")
    with hold_collector():
        leave_out_unused()
        if spec.engine == "vllm":
            from logsteer_server.engines.vllm.config import WORKER, set_environment

            set_environment(spec)
            import_module("logsteer_server.engines.vllm.core")
            import_module(WORKER.rpartition(".")[0])
        else:
            import_module("logsteer_server.engines.tlens.engine")
    mark("imports")
    engine = build_engine(spec)
    mark("model, cache, warm-up, questions to the model")
    tokens = np.array([1, 5, 6, 7], dtype=np.int32)
    engine.add([(0, ScoreJob(tokens, tokens[-1:]))])
    while engine.busy:
        engine.step()
    mark("first score")
    phases = {
        f"engine: {phase}": {"wall_s": round(wall - before, 2), "cpu_s": round(cpu - spent, 2)}
        for (_, before, spent), (phase, wall, cpu) in pairwise(marks)
    }
    print(json.dumps(phases | {"engine: modules": len(sys.modules)}), flush=True)
    os._exit(0)


def profile_engine(config: Path, environment: dict[str, str], *flags: str) -> tuple[Any, str]:
    """Run an engine's start in a process of its own; return its phases, and what else it wrote."""
    command = [sys.executable, *flags, __file__, "--engine", "--config", str(config)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def count_imports(written: str) -> list[tuple[str, float]]:
    """Return seconds by package from what `-X importtime` writes, the longest first."""
    seconds: Counter[str] = Counter()
    for own, module in IMPORT_LINE.findall(written):
        seconds[module.split(".")[0]] += int(own) / 1e6
    return seconds.most_common(25)


def main() -> None:
    """Print where the time goes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=DEMO_CONFIG)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="with empty caches, in every run")
    parser.add_argument("--imports", action="store_true", help="by package; this takes time itself")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        run_engine(options.config)
    runs = []
    with tempfile.TemporaryDirectory(prefix="logsteer-start-") as name:
        for index in range(options.runs):
            caches = {cache: f"{name}/{index}/{cache}" for cache in CACHES} if options.cold else {}
            runs.append(start_server(options.config, Path(name), caches))
            print(f"run {index + 1}: {runs[-1]['wall: first answer']:.1f} s", flush=True)
    for phase in runs[0]:
        low, median, high = spread([run[phase] for run in runs])
        print(f"{phase:<52} {median:6.2f} s ({low:.2f} to {high:.2f})")
    phases, _ = profile_engine(options.config, {})
    for phase, taken in phases.items():
        print(f"{phase:<52} {json.dumps(taken)}")
    if options.imports:
        _, written = profile_engine(options.config, {}, "-X", "importtime")
        for package, seconds in count_imports(written):
            print(f"import {package:<45} {seconds:6.2f} s")


if __name__ == "__main__":
    main()

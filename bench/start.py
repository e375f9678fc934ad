"""Where the time of a start goes: from the command to the first answer of the demo, by process.

Wall-clock time is what a user waits; CPU time says the same on a machine with other work. The CPU
time of a process counts that of its children that have ended, such as vLLM's look at a model class.
"""

import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
DEMO_CONFIG = ROOT / "demo" / "models.yaml"
ITEM = {"context": "The capital of France is", "targets": [" Paris"]}
TICKS = os.sysconf("SC_CLK_TCK")
TIMEOUT_S = 600


def measure_start(directory: Path, runs: int) -> dict[str, Any]:
    """Measure starts of the demo to the first answer, after one that fills the caches."""
    first, *others = [start_server(DEMO_CONFIG, directory) for _ in range(runs + 1)]
    ways = {phase: {"s": spread([one[phase] for one in others])} for phase in first}
    figures = {"s to the first answer": ways["wall: first answer"]["s"]}
    return {"runs": runs, "ways": ways, "figures": figures}


def spread(seconds: list[float]) -> list[float]:
    """Return the least, the median and the most of them."""
    return [round(x, 2) for x in (min(seconds), statistics.median(seconds), max(seconds))]


def start_server(config: Path, directory: Path) -> dict[str, float]:
    """Start a server, ask its first model something, end it; return seconds by phase."""
    log = directory / "start.log"
    command = [sys.executable, "-m", "logsteer_server", "--port", "0", "--config", str(config)]
    began = time.monotonic()
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
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
    found: dict[str, float] = defaultdict(float)
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

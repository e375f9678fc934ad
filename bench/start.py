"""Where the time of a start goes: from the command to the first answer, by process.

Wall-clock time is what a user waits; CPU time says the same on a machine with other work. The CPU
time of a process counts that of its children that have ended, such as vLLM's look at a model class.
"""

import contextlib
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from bench.models import ID, ROOT, Workplace
from bench.servers import read_cpu
from bench.timing import spread

DEMO_CONFIG = ROOT / "demo" / "models.yaml"
ITEM = {"context": "The capital of France is", "targets": [" Paris"]}
TIMEOUT_S = 600


def measure_start(place: Workplace, runs: int) -> dict[str, Any]:
    """Measure starts to the first answer, of the demo or the user's model, after one that fills the
    caches.
    """
    config = DEMO_CONFIG
    if place.given is not None:
        config = place.directory / "start.yaml"
        own = {"id": ID, "path": str(place.given), **place.settings}
        config.write_text(yaml.safe_dump({"models": [own]}))
    first, *others = [start_server(config, place.directory) for _ in range(runs + 1)]
    ways = {phase: {"s": spread([one[phase] for one in others])} for phase in first}
    figures = {"s to the first answer": ways["wall: first answer"]["s"]}
    return {"runs": runs, "ways": ways, "figures": figures}


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
        body = {"model": model, "items": [ITEM]}
        httpx.post(f"{url[1]}/logprob", json=body, timeout=TIMEOUT_S).raise_for_status()
        found["wall: first answer"] = time.monotonic() - began
        return found | measure_cpu(psutil.Process(server.pid))
    finally:
        server.terminate()
        server.wait()


def _wait(server: subprocess.Popen[bytes], log: Path, began: float) -> None:
    if server.poll() is not None or time.monotonic() - began > TIMEOUT_S:
        raise RuntimeError(f"the server did not start:\n{log.read_text()}")
    time.sleep(0.1)


def _list_models(url: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/models", timeout=TIMEOUT_S).raise_for_status()
    found: list[dict[str, Any]] = answer.json()["models"]
    if failed := next((card for card in found if card["state"] == "failed"), None):
        raise RuntimeError(failed["detail"])
    return found


def measure_cpu(server: psutil.Process) -> dict[str, float]:
    """Return the CPU seconds that a server's processes have taken so far, by what they are."""
    found: dict[str, float] = defaultdict(float)
    found["CPU: HTTP process"] = read_cpu(server)
    for child in server.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            times, command = child.cpu_times(), " ".join(child.cmdline())
            name = "resource tracker" if "resource_tracker" in command else "engines"
            found[f"CPU: {name}"] += times.user + times.system
            ended = times.children_user + times.children_system
            found["CPU: what engines started and has ended"] += ended
    return dict(found)

"""Writes docs/images/dashboard.png: `.venv/bin/python -m tests.deploy.picture`

A service on Ray of two logical nodes is under load for some minutes, and a Prometheus scrapes it.
Meanwhile sequences are generated that together do not fit into the model's cache, the ledger stands
still until Serve replaces it, and an engine is killed, so that panels of what is rare are not flat.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from PIL import Image

from tests.cluster.local import FAKE, KeyedCluster, find_engines_below, running
from tests.conftest import ROOT, vllm_model
from tests.deploy.observed import PLACE, PROMETHEUS, scrape_agents, send_requests

PICTURE = ROOT / "docs" / "images" / "dashboard.png"
MAX_BYTES = 400_000
DEMO = vllm_model("demo", adapter_slots=1, memory="12MiB")
CROWD = {
    "model": "demo", "prompt_ids": [list(range(5, 25))], "n": 16, "max_tokens": 600,
    "ignore_eos": True,
}  # fmt: skip
"""Twice as many tokens as the model's cache has room for."""


async def load(cluster: KeyedCluster, width: int, minutes: float) -> None:
    """Send requests of every kind; in between crowd the cache, stop the ledger, kill an engine."""

    async def crowd() -> None:
        await asyncio.sleep(60 * minutes / 5)
        async with httpx.AsyncClient(headers=cluster.headers, timeout=600) as http:
            await http.post(f"{cluster.url}/generate", json=CROWD)

    async def stop_ledger() -> None:
        await asyncio.sleep(60 * minutes / 2)
        for ledger in cluster.find_own("ledger"):
            os.kill(ledger.pid, signal.SIGSTOP)

    async def kill_engine() -> None:
        await asyncio.sleep(60 * minutes * 3 / 4)
        for engine in find_engines_below(cluster.find_actors()[:1]):
            engine.kill()

    tokens = [cluster.keys[name] for name in ("ann", "few")]
    work = send_requests(cluster.url, tokens, ["demo", "fake"], "demo", width, 60 * minutes)
    await asyncio.gather(work, crowd(), stop_ledger(), kill_engine())


def main() -> int:
    """Draw the picture; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("picture", type=Path, nargs="?", default=PICTURE)
    parser.add_argument("--minutes", type=float, default=4.0)
    arguments = parser.parse_args()
    if PROMETHEUS is None:
        sys.exit("no Prometheus is on PATH: apt-get install prometheus")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        # What a store behind a URL holds is read too seldom for a picture of minutes.
        store = {"store_url": None, "store_directory": str(directory / "store")}
        with running(KeyedCluster(directory, **store)) as cluster:
            cluster.serve(FAKE, DEMO)
            with cluster.connect("ann") as http:
                width = http.get("/models/demo").json()["hidden_size"]
            with scrape_agents(cluster.targets, directory) as prometheus:
                asyncio.run(load(cluster, width, arguments.minutes))
                time.sleep(5)
                draw(prometheus.url, arguments.picture, arguments.minutes)
    size = arguments.picture.stat().st_size
    if size > MAX_BYTES:
        sys.exit(f"{arguments.picture} has {size} bytes, more than {MAX_BYTES}")
    return 0


def draw(url: str, picture: Path, minutes: float) -> None:
    """Run the script that draws what Prometheus answers."""
    script = str(PLACE / "draw_dashboard.py")
    command = [sys.executable, script, url, str(picture), "--minutes", str(minutes + 0.3)]
    subprocess.run(command, check=True)
    with Image.open(picture) as image:  # lines on white take few colours
        image.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    sys.exit(main())

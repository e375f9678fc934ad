"""What tests ask a Docker engine, through its command line."""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

CHUNK = 8 * 2**20


def docker(
    *arguments: str | Path, env: Mapping[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run docker; what it says of an error is shown where the test fails."""
    done = subprocess.run(
        ["docker", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | dict(env or {}),
        text=True,
        capture_output=True,
        check=False,
    )
    if check and done.returncode:
        print(done.stdout[-4000:], done.stderr[-8000:], file=sys.stderr)
        raise AssertionError(f"docker {' '.join(map(str, arguments))[:200]}: see standard error")
    return done


def inspect(name: str) -> dict[str, Any]:
    """What the engine knows of a container or an image."""
    found: list[dict[str, Any]] = json.loads(docker("inspect", name).stdout)
    return found[0]


def find_lack() -> str | None:
    """What is missing here for building and running images, if anything."""
    for command, lack in {
        ("info",): "no Docker engine",
        ("buildx", "version"): "no docker buildx",
        ("compose", "version"): "no docker compose of version 2",
    }.items():
        try:
            if docker(*command, check=False).returncode:
                return lack
        except FileNotFoundError:
            return "no docker command"
    return None


def search_layers(image: str, needles: Collection[bytes]) -> set[bytes]:
    """Those of some byte strings that stand anywhere in an image's layers or its configuration."""
    overlap = max(map(len, needles))
    found = set()
    tail = b""
    with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saving:
        assert saving.stdout
        while chunk := saving.stdout.read(CHUNK):
            window = tail + chunk
            found |= {needle for needle in needles if needle in window}
            tail = window[-overlap:]
    assert saving.returncode == 0
    return found

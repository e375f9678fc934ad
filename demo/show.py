"""Serves the demo model, makes the three calls of docs/index.md, prints the answers, and stops.

With --url it makes the calls to a server that runs already, in a container for example.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import httpx

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 600

CALLS = {
    "/logprob": {
        "items": [{"context": "The capital of France is", "targets": [" Paris", " London"]}],
        "per_token": False,
    },
    "/perplexity": {"texts": ["The capital of France is Paris."]},
    "/tokenize": {"texts": ["The capital of France is Paris."]},
}


def wait_until_ready(url: str, server: subprocess.Popen[bytes] | None = None) -> None:
    """Wait for the model. Errors: SystemExit where the server ends or takes too long."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if server is not None and server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode}; see its messages above")
        try:
            if httpx.get(f"{url}/readyz", timeout=30).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    sys.exit(f"the server was not ready after {TIMEOUT_S} s")


def show(url: str) -> None:
    """Print each call and what it answers, without the fields that every answer carries."""
    for path, body in CALLS.items():
        response = httpx.post(url + path, json=body, timeout=60)
        response.raise_for_status()
        print(f"\nPOST {path} {json.dumps(body)}")
        print(json.dumps(response.json()["results"], indent=2))


def main() -> None:
    """Run the demo on the port given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="port to serve the demo model on")
    parser.add_argument("--url", help="a server that runs already, asked in place of an own one")
    arguments = parser.parse_args()
    if arguments.url:
        wait_until_ready(arguments.url)
        show(arguments.url)
        return
    command = [sys.executable, "-m", "logsteer_server", "--config", str(HERE / "models.yaml")]
    server = subprocess.Popen([*command, "--port", str(arguments.port)])
    url = f"http://127.0.0.1:{arguments.port}"
    try:
        wait_until_ready(url, server)
        show(url)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()

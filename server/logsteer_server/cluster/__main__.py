"""`python -m logsteer_server.cluster`: the service on Ray, on logical nodes of this machine."""

import argparse
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from logsteer_server.settings import ConfigurationError

POLL_S = 0.2
ANSWER_S = 10.0
NODE_CPUS = 64
"""Logical ones: what is to run here is said by the configuration, not counted against cores."""
STORE_BYTES = 150 * 2**20


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m logsteer_server.cluster",
        description="Serve a configuration with Ray Serve, on a Ray of its own on this machine.",
    )
    parser.add_argument(
        "--config", type=Path, required=True, help="YAML file that lists the models"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default 8000)")
    parser.add_argument("--nodes", type=int, default=2, help="logical nodes (default 2)")
    parser.add_argument("--ingresses", type=int, default=1, help="HTTP processes (default 1)")
    return parser.parse_args(argv)


class Interrupted(BaseException):
    """Somebody wants the cluster to end."""


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Interrupted


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted; return the exit status: 2 for an unusable configuration."""
    arguments = parse_arguments(argv)
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _hold_directory() as directory:
            os.environ |= {
                "RAY_TMPDIR": directory,
                "RAY_USAGE_STATS_ENABLED": "0",
                # One proxy listens for all nodes.
                "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
            }
            # It would kill actors for what other programs of this machine take.
            os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
            os.environ.pop("RAY_ADDRESS", None)  # another Ray is somebody else's
            return _serve(arguments)
    except Interrupted:
        return 0
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


@contextmanager
def _hold_directory() -> Iterator[str]:
    """Give Ray a directory of its own: sockets' paths in it may have 107 characters."""
    directory = tempfile.mkdtemp(prefix="logsteer-ray-", dir="/tmp")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _serve(arguments: argparse.Namespace) -> int:
    # Ray reads the environment that was set above when it is imported.
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from logsteer_server.cluster.application import ClusterArguments, bind, read_settings

    wanted = ClusterArguments(
        config=arguments.config, host=arguments.host, ingresses=arguments.ingresses
    )
    settings = read_settings(wanted)
    cluster = Cluster(shutdown_at_exit=True)
    try:
        for _ in range(arguments.nodes):
            cluster.add_node(
                num_cpus=NODE_CPUS, object_store_memory=STORE_BYTES, include_dashboard=False
            )
        ray.init(address=cluster.address, logging_level=logging.WARNING, log_to_driver=False)
        serve.start(
            http_options={
                "host": arguments.host,
                "port": arguments.port,
                "location": "HeadOnly",
            },
            logging_config={"log_level": "WARNING"},
        )
        url = f"http://{arguments.host}:{arguments.port}"
        print(f"logsteer on Ray, {arguments.nodes} nodes, comes up at {url}.", flush=True)
        serve.run(bind(settings, wanted), name="logsteer", route_prefix="/")
        name = settings.models[0].id if len(settings.models) > 1 else None
        _report(url, name, settings.api_key is not None or settings.key_file is not None)
        threading.Event().wait()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        cluster.shutdown()
    return 0


def _report(url: str, name: str | None, needs_key: bool) -> None:
    """Print how each model came up, and what to ask."""
    from logsteer_server.serving import suggest_calls

    while True:
        answer = httpx.get(f"{url}/readyz", timeout=ANSWER_S)
        document: dict[str, Any] = answer.json()
        if answer.status_code == httpx.codes.OK:
            break
        if "failed" in document["models"].values():
            print(f"  {document}", file=sys.stderr, flush=True)
            return
        time.sleep(POLL_S)
    print(suggest_calls(url, name, needs_key), flush=True)


if __name__ == "__main__":
    sys.exit(main())

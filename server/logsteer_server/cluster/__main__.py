"""`python -m logsteer_server.cluster`: the service on Ray, on logical nodes of this machine.

SIGHUP has the configuration read again; SIGINT and SIGTERM end it.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from logsteer_server.cluster.own_ray import NODE_CPUS, hold_ray_directory
from logsteer_server.models.changes import RELOAD_RETRY_S, refuse_configuration
from logsteer_server.settings import ConfigurationError, Settings

POLL_S = 0.2
ANSWER_S = 10.0
STORE_BYTES = 150 * 2**20
ONE_LOOP = {
    # An actor's calls, those it makes and its own work on one event loop: between threads each
    # would be handed over several times a request.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""In the environment of nodes alone: this process has no loop that its calls could run on."""


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
    parser.add_argument(
        "--targets",
        type=Path,
        help="write the addresses of the nodes' metrics there, as Ray does where it has a "
        "dashboard; deploy/ray/prometheus.yml reads them",
    )
    parser.add_argument("--ingresses", type=int, default=1, help="HTTP processes (default 1)")
    parser.add_argument(
        "--calls-per-replica",
        type=float,
        default=4.0,
        help="calls at work in a replica at which max_replicas has another start (default 4)",
    )
    parser.add_argument(
        "--scale-up-s", type=float, default=30.0, help="seconds of more work before (default 30)"
    )
    parser.add_argument(
        "--scale-down-s", type=float, default=600.0, help="of less, before one ends (default 600)"
    )
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
        with hold_ray_directory() as directory:
            os.environ |= {
                "RAY_TMPDIR": directory,
                # Calls of the proxy as those between the service's actors are, with less work.
                "RAY_SERVE_PROXY_USE_GRPC": "1",
                # One proxy listens for all nodes.
                "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
                # What hangs cannot end by itself, however long that is waited for.
                "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
                # Jobs carry vectors, whose bounds are the service's own; Serve's is 4 MiB.
                "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
            }
            os.environ.pop("RAY_ADDRESS", None)  # another Ray is somebody else's
            return _serve(arguments)
    except Interrupted:
        return 0
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _serve(arguments: argparse.Namespace) -> int:
    # Ray reads the environment that was set above when it is imported.
    from ray import serve

    from logsteer_server.cluster.application import (
        ClusterArguments,
        bind,
        read_settings,
        reread_settings,
    )
    from logsteer_server.cluster.wanted import SERVICE

    names = ("config", "host", "ingresses", "calls_per_replica", "scale_up_s", "scale_down_s")
    wanted = ClusterArguments(**{name: getattr(arguments, name) for name in names})
    settings = read_settings(wanted)
    with _run_ray(arguments, settings):
        serve.start(
            http_options={"host": arguments.host, "port": arguments.port, "location": "HeadOnly"},
            logging_config={"log_level": "WARNING"},
        )
        url = f"http://{arguments.host}:{arguments.port}"
        print(f"logsteer on Ray, {arguments.nodes} nodes, comes up at {url}.", flush=True)
        asked = threading.Event()
        signal.signal(signal.SIGHUP, lambda *_: asked.set())
        serve.run(bind(settings, wanted), name=SERVICE, route_prefix="/")
        name = settings.models[0].id if len(settings.models) > 1 else None
        needs_key = settings.api_key is not None or settings.key_file is not None
        # Models may load for hours; the configuration is read again meanwhile.
        threading.Thread(target=_report, args=(url, name, needs_key), daemon=True).start()
        while asked.wait():
            asked.clear()
            _reload(partial(reread_settings, wanted))
    return 0


@contextmanager
def _run_ray(arguments: argparse.Namespace, settings: Settings) -> Iterator[None]:
    """Have Ray run, and end it with what it runs."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.serve.exceptions import RayServeException

    from logsteer_server.cluster.wanted import SERVICE

    cluster = Cluster(shutdown_at_exit=True)
    try:
        for number in range(arguments.nodes):
            cluster.add_node(
                num_cpus=NODE_CPUS,
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                env_vars=ONE_LOOP | _part_node(settings, number),
            )
        ray.init(address=cluster.address, logging_level=logging.WARNING, log_to_driver=False)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if arguments.targets is not None:
            _write_targets(arguments.targets, ray.nodes())
        signal.signal(signal.SIGTERM, _interrupt)  # Ray has put its own handler there
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if ray.is_initialized():
            # Whoever has asked is answered. `serve.shutdown` would wait for a call of the
            # controller's that ends by its death, of which Ray prints an error.
            with contextlib.suppress(RayServeException):
                serve.delete(SERVICE)
            ray.shutdown()
        cluster.shutdown()


def _reload(reread: Callable[[], Settings]) -> None:
    """Read the configuration again, and print what that changes on all ingresses."""
    from ray import serve

    from logsteer_server.cluster.wanted import SERVICE

    try:
        settings = reread()
    except ConfigurationError as error:
        print(f"SIGHUP: {refuse_configuration(error).detail}", file=sys.stderr, flush=True)
        return
    while True:
        try:
            coordinator = serve.get_deployment_handle("coordinator", SERVICE)
            found = coordinator.reload.remote(settings, 0.0).result()
            break
        except Exception as error:  # Ray's or Serve's, which starts a coordinator again
            print(f"SIGHUP: the coordinator was lost: {error!r}", file=sys.stderr, flush=True)
            time.sleep(RELOAD_RETRY_S)
    for name, changed in found.report.by_kind.items():
        print(f"SIGHUP: {name.replace('_', ' ')}: {', '.join(changed)}", flush=True)


def _write_targets(path: Path, nodes: list[dict[str, Any]]) -> None:
    """Write where each node's agent has its metrics, in Prometheus' form for files."""
    found = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes]
    path.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": found}]))


def _part_node(settings: Settings, number: int) -> dict[str, str]:
    """Return the environment of a logical node: with `store_url`, none reads another's disk."""
    if settings.store_url is None:
        return {}
    return {"XDG_DATA_HOME": os.path.join(os.environ["RAY_TMPDIR"], f"node-{number}")}  # noqa: PTH118


def _report(url: str, name: str | None, needs_key: bool) -> None:
    """Print how each model came up, and what to ask."""
    from logsteer_server.serving import suggest_calls

    while True:
        try:
            answer = httpx.get(f"{url}/readyz", timeout=ANSWER_S)
        except httpx.TransportError:  # the ingress may be about to come up, on a busy machine
            time.sleep(POLL_S)
            continue
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

"""`python -m logsteer_server.cluster`: the service on a Ray of its own on this machine.

SIGINT and SIGTERM end it; POST /admin/reload has the configuration read again.
"""

import argparse
import logging
import os
import secrets
import signal
import sys
from contextlib import suppress
from pathlib import Path

from logsteer_server.engines.lifetime import ScratchDirectory, sweep
from logsteer_server.serving import suggest_calls
from logsteer_server.settings import ConfigurationError, load_settings

HOST = "127.0.0.1"
PARENT = Path("/tmp")  # noqa: S108 - the directory below it is made by mkdtemp
"""Paths of sockets below it may have 107 characters, which a longer $TMPDIR would take."""
NODE_CPUS = 64
"""Logical ones of a node: the configuration says what runs here, not the number of cores."""
STORE_BYTES = 80 * 2**20
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # It would kill actors for what other programs of this machine take.
    "RAY_memory_monitor_refresh_ms": "0",
    # A replica that hangs cannot end by itself.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted; return the exit status: 2 for an unusable configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m logsteer_server.cluster",
        description="Serve a configuration with Ray Serve, on a Ray of its own on this machine.",
    )
    parser.add_argument(
        "--config", type=Path, required=True, help="YAML file that lists the models"
    )
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8000)")
    parser.add_argument("--nodes", type=int, default=1, help="logical nodes (default 1)")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sweep(PARENT)
        with ScratchDirectory(PARENT) as directory:
            # Whoever has the token may run code: it is new, and never leaves this user's processes.
            token = secrets.token_hex(32)
            os.environ |= ENVIRONMENT | {"RAY_TMPDIR": str(directory), "RAY_AUTH_TOKEN": token}
            os.environ.pop("RAY_ADDRESS", None)  # another Ray is somebody else's
            for name in ("host", "port"):
                if (value := getattr(arguments, name)) is not None:
                    os.environ[f"LOGSTEER_{name.upper()}"] = str(value)
            _serve(arguments, directory)
    except KeyboardInterrupt:
        return 0
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _serve(arguments: argparse.Namespace, directory: Path) -> None:
    """Have Ray run at the loopback address with the service, and end it with what it runs."""
    # Ray reads the environment that was set above when it is imported.
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.serve.exceptions import RayServeException

    from logsteer_server.cluster.application import SERVE_LOG, ClusterArguments, build, deploy
    from logsteer_server.cluster.ingress import SERVICE

    application = build(ClusterArguments(config=arguments.config.resolve()))
    settings = load_settings(arguments.config)
    # The kernel kills Ray's processes with this one: `shutdown_at_exit` asks it to.
    cluster = Cluster(shutdown_at_exit=True)
    try:
        for _ in range(arguments.nodes):
            cluster.add_node(
                num_cpus=NODE_CPUS,
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                node_ip_address=HOST,
            )
        # `init` puts this process' address in the place of the loopback's: here it is that one.
        ray._private.worker._global_node = cluster.head_node
        ray.init(address=cluster.address, logging_level=logging.WARNING, log_to_driver=True)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        # Ray has put its own handler there.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        print(f"Ray's logs are in {directory}/session_latest/logs.", flush=True)
        serve.start(proxy_location="Disabled", logging_config=SERVE_LOG)
        deploy(application)
        url = f"http://{settings.host}:{settings.port}"
        name = settings.models[0].id if len(settings.models) > 1 else None
        needs_key = settings.api_key is not None or settings.key_file is not None
        print(f"logsteer on Ray comes up at {url}; GET /models says how far.")
        print(suggest_calls(url, name, needs_key), flush=True)
        signal.pause()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if ray.is_initialized():
            # `serve.shutdown` would wait for a call that ends by its callee's death.
            with suppress(RayServeException):
                serve.delete(SERVICE)
            ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())

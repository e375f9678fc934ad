"""`python -m logsteer_server.cluster`: the service on a Ray of its own on this machine.

SIGINT and SIGTERM end it; POST /admin/reload has the configuration read again.
"""

import argparse
import os
import secrets
import sys
from pathlib import Path

from logsteer_server.engines.lifetime import ScratchDirectory, sweep
from logsteer_server.settings import ConfigurationError

# Paths of sockets below it may have 107 characters, which a longer $TMPDIR would take.
PARENT = Path("/tmp")  # noqa: S108 - the directory below it is made by mkdtemp
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    # One node alone keeps to the loopback address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # It would kill actors for what other programs of this machine take.
    "RAY_memory_monitor_refresh_ms": "0",
    # A replica that hangs cannot end by itself.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Few cores start many processes at once.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Otherwise a request goes to a replica that hangs where the other is 0.1 s late with its count.
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "1",
}


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted; return the exit status: 2 for an unusable configuration."""
    parser = argparse.ArgumentParser(prog="python -m logsteer_server.cluster", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file with the models")
    config = parser.parse_args(argv).config.resolve()
    # Whoever has the token may run code: it is new, and never leaves this user's processes.
    os.environ |= ENVIRONMENT | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.pop("RAY_ADDRESS", None)  # another Ray is somebody else's
    from logsteer_server.cluster.application import run  # Ray reads the environment

    sweep(PARENT)
    try:
        with ScratchDirectory(PARENT) as directory:
            print(f"Ray's logs are in {directory}/session_latest/logs.", flush=True)
            # CPUs are logical: the configuration says what runs here. The kernel ends Ray with us.
            own = {"num_cpus": 64, "object_store_memory": 80_000_000, "_temp_dir": str(directory)}
            run(config, **own, include_dashboard=False)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

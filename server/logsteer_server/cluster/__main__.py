"""`python -m logsteer_server.cluster`: the service on a Ray of its own on this machine.

SIGINT and SIGTERM end it; POST /admin/reload has the configuration read again.
"""

import argparse
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from logsteer_server.engines.lifetime import PR_SET_PDEATHSIG, ScratchDirectory, sweep
from logsteer_server.settings import ConfigurationError

# Paths of sockets below it may have 107 characters, which a longer $TMPDIR would take.
PARENT = Path("/tmp")  # noqa: S108 - the directory below it is made by mkdtemp
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
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
NODE = ["-m", "ray.scripts.scripts", "start", "--block", "--min-worker-port=0"]
NODE += ["--max-worker-port=0", "--object-store-memory=80000000"]
NODE += ["--dashboard-agent-listen-port=0"]


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted; return the exit status.

    0 after a signal, 1 where Ray has ended, 2 for an unusable configuration.
    """
    parser = argparse.ArgumentParser(prog="python -m logsteer_server.cluster", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file with the models")
    parser.add_argument("--nodes", type=int, default=0, help="nodes beside a head without models")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sweep(PARENT)
    try:
        with ScratchDirectory(PARENT) as directory:
            # Whoever has the token may run code: it is new, and never leaves this user's processes.
            os.environ |= ENVIRONMENT | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
            os.environ.pop("RAY_ADDRESS", None)  # another Ray is somebody else's
            _serve(arguments.config.resolve(), arguments.nodes, directory)
    except KeyboardInterrupt:
        return 0
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("error: Ray has ended", file=sys.stderr)
    return 1


def _serve(config: Path, num_nodes: int, directory: Path) -> None:
    """Start Ray and the service on it, wait for Ray's end or an interrupt, and end all of it."""
    from logsteer_server.cluster.application import read_document

    settings, _ = read_document(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        unused = listener.getsockname()[1]  # in place of a fixed one
    # One node alone keeps to the loopback address; several have addresses of their own.
    first = min(num_nodes, 1)
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = str(first)
    address_file = directory / f"{first}/ray_current_cluster"
    processes = []

    def start_node(number: int, *options: str, cpus: int = 64) -> None:
        # CPUs are logical: the configuration says what runs here.
        own = (f"--num-cpus={cpus}", f"--node-ip-address=127.0.0.{1 + number}")
        processes.append(_start(*NODE, *own, f"--temp-dir={directory}/{number}", *options))

    try:
        head = ("--head", "--port=0", "--include-dashboard=false")
        start_node(first, *head, f"--ray-client-server-port={unused}", cpus=0 if num_nodes else 64)
        while not (address_file.exists() and (address := address_file.read_text())):
            if processes[0].poll() is not None:
                return
            time.sleep(0.1)
        for number in range(num_nodes):
            start_node(first + 1 + number, f"--address={address}")
        run = f"from logsteer_server.cluster.application import run; run({str(config)!r})"
        processes.append(_start("-c", run, RAY_ADDRESS=address))
        url = f"http://{settings.host}:{settings.port}"
        print(f"logsteer on Ray comes up at {url}; GET /models says how far.")
        print(f"Ray's logs are in {directory}/{first}/session_latest/logs.", flush=True)
        processes[-2].wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        deadline = time.monotonic() + settings.drain_s + 30
        for process in reversed(processes):
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(1.0, deadline - time.monotonic()))
            process.kill()


def _start(*command: str, **environment: str) -> "subprocess.Popen[bytes]":
    """Start Python out of a terminal's reach; the kernel ends it with this process."""
    return subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | environment,
        start_new_session=True,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )


if __name__ == "__main__":
    sys.exit(main())

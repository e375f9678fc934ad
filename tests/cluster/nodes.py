"""A Ray of several nodes of this machine by `ray start`, as deploy/ray/compose.yml has it on hosts.

`python -m tests.cluster.nodes NODES --config CONFIG`: a head without CPUs, and nodes with models.
"""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from logsteer_server.cluster.__main__ import ENVIRONMENT, PARENT
from logsteer_server.engines.lifetime import PR_SET_PDEATHSIG, ScratchDirectory

NODE = ["-m", "ray.scripts.scripts", "start", "--block", "--min-worker-port=0"]
NODE += ["--max-worker-port=0", "--object-store-memory=80000000"]
NODE += ["--dashboard-agent-listen-port=0"]
HEAD = ["--head", "--port=0", "--include-dashboard=false"]


def start(*command: str) -> "subprocess.Popen[bytes]":
    """Python out of a terminal's reach, which the kernel ends with this process."""
    return subprocess.Popen(
        [sys.executable, *command],
        start_new_session=True,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )


def start_node(directory: Path, number: int, cpus: int, *options: str) -> "subprocess.Popen[bytes]":
    """A node with an address of its own."""
    own = (f"--num-cpus={cpus}", f"--node-ip-address=127.0.0.{number}")
    return start(*NODE, *own, f"--temp-dir={directory}/{number}", *options)


def main(config: str, nodes: int) -> None:
    """Serve until an interrupt."""
    os.environ |= ENVIRONMENT | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    with ScratchDirectory(PARENT) as directory:
        started = [start_node(directory, 2, 0, *HEAD)]
        found = directory / "2/ray_current_cluster"
        while not (found.exists() and (address := found.read_text())):
            time.sleep(0.1)
        started += [start_node(directory, 3 + n, 64, f"--address={address}") for n in range(nodes)]
        os.environ["RAY_ADDRESS"] = address
        code = "import pathlib; from logsteer_server.cluster.application import run"
        started.append(start("-c", f"{code}; run(pathlib.Path({config!r}))"))
        with suppress(KeyboardInterrupt):
            signal.pause()
        for process in reversed(started):
            process.send_signal(signal.SIGINT)
            process.wait(40)


if __name__ == "__main__":
    main(sys.argv[3], int(sys.argv[1]))

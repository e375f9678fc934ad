"""The processes of a server, and what is done to them."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import Configuration, Server

T = TypeVar("T")


@contextmanager
def running(config: Configuration, directory: Path, **environment: str) -> Iterator[Server]:
    """A server of the test's own; nothing is left of it afterwards."""
    server = Server.start(config, directory, **environment)
    try:
        yield server
    finally:
        group = [server.process.pid, *find_engines(server)]
        if server.process.poll() is None:
            server.stop()
        for pid in group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, 9)


def find_engines(server: Server) -> list[int]:
    """The pids of the server's engines, in the order of their start."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for own in psutil.Process(server.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # one that ends hides no other
                if "spawn_main" in " ".join(own.cmdline()):
                    found.append((float(own.create_time()), own.pid))
    return [pid for _, pid in sorted(found)]  # pids begin again at a limit


def find_engine(server: Server) -> int:
    """The pid of the only engine."""
    (pid,) = find_engines(server)
    return pid


def find_family(server: Server) -> list[psutil.Process]:
    """Everything that the server has started, and what that has."""
    return psutil.Process(server.process.pid).children(recursive=True)


def signal_all(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal to all of these that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; what is dead and has not been waited for does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(what: Callable[[], T], timeout_s: float = 60.0) -> T:
    """What a function returns as soon as that is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert found, f"not so within {timeout_s} s"
    return found


def read_card(server: Server, model: str) -> dict[str, Any]:
    """The card of a model."""
    return httpx.get(f"{server.url}/models/{model}", timeout=60).json()


def wait_for_state(server: Server, model: str, state: str, timeout_s: float = 60.0) -> float:
    """Seconds until the model has this state."""
    started = time.monotonic()
    wait_for(lambda: read_card(server, model)["state"] == state, timeout_s)
    return time.monotonic() - started


def wait_for_jobs(server: Server, model: str, count: int = 1) -> None:
    """Wait until the model's engine was sent so many jobs that it has not answered."""

    def count_jobs() -> int:
        return sum(own["num_jobs"] for own in read_card(server, model)["replicas"])

    wait_for(lambda: count_jobs() >= count)


def score(server: Server, model: str, *ids: int, timeout: float = 60.0) -> httpx.Response:
    """Score a token after these."""
    item = {"context_ids": [5, *ids], "target_ids": [[6]]}
    body = {"model": model, "items": [item]}
    return httpx.post(f"{server.url}/logprob", json=body, timeout=timeout)


def read_metric(server: Server, name: str, **labels: str) -> float:
    """A metric's value, summed over the samples that have these labels."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"logsteer_{name}" and labels.items() <= sample.labels.items()
    )


def read_memory(server: Server, field: str) -> int:
    """Bytes of the server's memory: VmRSS, or VmHWM, its highest since `forget_peak`."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def forget_peak(server: Server) -> None:
    """Have the highest memory be counted from now on."""
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")


def open_request(
    server: Server, line: str, content: bytes, length: int | None = None, *headers: str
) -> socket.socket:
    """Send a request, or the beginning of one whose body has a greater length."""
    url = httpx.URL(server.url)
    connection = socket.create_connection((url.host, url.port), 60)
    size = len(content) if length is None else length
    lines = [f"{line} HTTP/1.1", "Host: localhost", f"Content-Length: {size}"]
    lines += ["Content-Type: application/json", *headers, "", ""]
    connection.sendall("\r\n".join(lines).encode() + content)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    try:
        while piece := connection.recv(65_536):
            found += piece
    except ConnectionResetError:
        pass
    return found


def check_retryable(
    response: httpx.Response, code: str = "engine_restarting", detail: str = ""
) -> None:
    """Make sure that an answer says to try again, and why."""
    document = response.json()
    assert (response.status_code, document["code"]) == (503, code), document
    assert detail in document["detail"]
    assert document["retryable"]
    assert int(response.headers["retry-after"]) >= 1

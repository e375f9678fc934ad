"""The systemd unit, run by a systemd that is the first process of a container, sandbox and all."""

import json
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.containers.conftest import PROJECT, choose_base
from tests.containers.docker import docker

UNIT = ROOT / "deploy/systemd/logsteer.service"
NAME = f"{PROJECT}-systemd"
# The packages of the image on a host with systemd; the image itself has a volume where the unit
# makes its directory of state.
HOST = """\
FROM {image} AS built
FROM {base}
RUN apt-get update && apt-get install --yes --no-install-recommends systemd g++ libnuma1
COPY --from=built /opt/logsteer /opt/logsteer
COPY --from=built /srv/logsteer /srv/logsteer
COPY logsteer.service limits.conf models.yaml /host/
RUN install -D --mode 644 -t /etc/systemd/system /host/logsteer.service \
    && install -D --mode 644 -t /etc/systemd/system/logsteer.service.d /host/limits.conf \
    && install -D --mode 644 -t /etc/logsteer /host/models.yaml
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT ["/lib/systemd/systemd"]
"""
MODELS = """\
models:
  - {id: demo, path: /srv/logsteer/demo/model, dtype: float32, memory: 256MiB, compile: true}
"""
ASK = """
import sys, urllib.request
path, body = sys.argv[1:]
request = urllib.request.Request("http://127.0.0.1:8000" + path, body.encode() or None)
request.add_header("Content-Type", "application/json")
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def execute(*command: str, check: bool = True) -> str:
    """What a command prints on the host that the container is."""
    return docker("exec", NAME, *command, check=check).stdout


def show(name: str) -> str:
    """A property of the unit, as systemd says it."""
    return execute("systemctl", "show", "--value", "--property", name, "logsteer").strip()


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """What the server answers to a POST, or to a GET where there is no body."""
    sent = json.dumps(body) if body else ""
    return json.loads(execute("python3", "-c", ASK, path, sent) or "null")


def ask_when_ready(limit_s: float = 240) -> float:
    """Probability of ` Paris`, as soon as the server answers."""
    deadline = time.monotonic() + limit_s
    while not execute("python3", "-c", ASK, "/readyz", "", check=False):
        assert time.monotonic() < deadline, execute("journalctl", "--no-pager", "-u", "logsteer")
        time.sleep(1)
    item = {"context": "The capital of France is", "targets": [" Paris"]}
    return float(ask("/logprob", {"items": [item]})["results"][0]["targets"][0]["prob"])


@pytest.fixture(scope="module")
def host(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A host with the unit installed and started."""
    directory: Path = tmp_path_factory.mktemp("host")
    base = choose_base()
    if base is None:
        pytest.skip("CONTAINERS ARE NOT TESTED: the unit wants a Debian Python in /usr")
    shutil.copy(UNIT, directory)
    # An engine without CAP_SYS_RESOURCE cannot raise limits.
    limits = {"NOFILE": resource.RLIMIT_NOFILE, "MEMLOCK": resource.RLIMIT_MEMLOCK}
    lines = [
        f"Limit{name}={'infinity' if hard < 0 else hard}"
        for name, hard in ((n, resource.getrlimit(r)[1]) for n, r in limits.items())
    ]
    (directory / "limits.conf").write_text("\n".join(["[Service]", *lines, ""]))
    (directory / "models.yaml").write_text(MODELS)
    (directory / "Dockerfile").write_text(HOST.format(image=image, base=base))
    docker("buildx", "build", "--tag", NAME, directory)
    docker("rm", "--force", NAME)
    docker(
        "run", "--detach", "--name", NAME, "--privileged", "--cgroupns", "host",
        "--tmpfs", "/run", "--tmpfs", "/tmp:exec",
        "--volume", "/sys/fs/cgroup:/sys/fs/cgroup", NAME,
    )  # fmt: skip
    try:
        execute("sh", "-c", "until systemctl is-system-running --quiet; do sleep 0.2; done")
        execute("systemctl", "start", "logsteer")
        yield
    finally:
        docker("rm", "--force", "--volumes", NAME)
        docker("image", "rm", "--force", NAME)


def test_it_answers_in_its_sandbox_compiled_models_too(host: None) -> None:
    assert ask_when_ready() > 0.5
    status = execute("cat", f"/proc/{show('MainPID')}/status")
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert lines["Uid"].split()[0] not in {"0", "10001"}, "a dynamic user"
    assert (lines["NoNewPrivs"], lines["Seccomp"], int(lines["CapBnd"], 16)) == ("1", "2", 0)


def test_a_killed_server_comes_back_with_its_vectors(host: None) -> None:
    ask_when_ready()
    pairs = [
        {"positive": f"I am happy, {name}.", "negative": f"I am sad, {name}."}
        for name in ("Ann", "Bob", "Carl", "Dora", "Eve", "Fred")
    ]
    trained = {"name": "mood", "method": "mean_difference", "layers": [1], "pairs": pairs}
    ask("/vectors/train", trained)
    stored = ask("/vectors/mood")
    before = show("MainPID")
    execute("sh", "-c", f"kill -KILL {before}")
    assert ask_when_ready() > 0.5
    assert show("MainPID") != before
    assert show("NRestarts") == "1"
    assert ask("/vectors/mood") == stored


def test_it_ends_in_time_when_it_is_stopped(host: None) -> None:
    ask_when_ready()
    started = time.monotonic()
    execute("systemctl", "stop", "logsteer")
    assert time.monotonic() - started < 75
    said = execute("journalctl", "--no-pager", "--unit", "logsteer", "--lines", "2")
    assert "Deactivated successfully" in said, said

"""The image as it was built, and the service as docker-compose.yml runs it.

And the unit of systemd, in a container that runs it.
"""

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from logsteer_server import __version__
from tests.conftest import ROOT
from tests.containers.conftest import MARK, PORT, PROJECT, Service, build, choose_base
from tests.containers.docker import docker, inspect, search_layers
from tests.faults.processes import wait_for

SERVER = "logsteer-server"
MOST_BYTES = 2.75e9
COMPILED = """\
models:
  - {id: demo, path: /srv/logsteer/demo/model, dtype: float32, memory: 256MiB, compile: true}
"""


def run(image: str, program: str, *arguments: str) -> str:
    """What a program prints in a container that has nothing but the image."""
    command = ("run", "--rm", "--network", "none", "--entrypoint", program, image, *arguments)
    return docker(*command).stdout


# ------------------------------------------------------------------ the image


def test_the_image_with_ray_serves_and_ends(image: str, secrets: dict[str, Path]) -> None:
    name = tag = f"{PROJECT}-ray"
    build("ray", "--tag", tag, secrets=secrets)
    own = ("--name", name, "--env", "LOGSTEER_INSECURE=true", "--read-only", "--tmpfs=/tmp:exec")
    docker("run", "--detach", *own, "--cap-drop=ALL", "--shm-size=512m", tag)
    try:
        wait_for(lambda: inspect(name)["State"]["Health"]["Status"] == "healthy", timeout_s=180)
        docker("stop", "--time=90", name)
        assert inspect(name)["State"]["ExitCode"] == 0
    finally:
        docker("rm", "--force", "--volumes", name)


def test_it_says_what_it_is(image: str) -> None:
    found = inspect(image)
    assert found["Config"]["Labels"]["org.opencontainers.image.version"] == __version__
    assert found["Config"]["User"] == "10001:10001"
    assert run(image, SERVER, "--version").strip() == __version__
    assert found["Size"] < MOST_BYTES


def test_no_layer_has_what_reached_package_indexes(image: str, secrets: dict[str, Path]) -> None:
    assert MARK not in docker("history", "--no-trunc", image).stdout
    # A file that the image does have shows that the search reads layers.
    known = (ROOT / "deploy/models.cpu.yaml").read_bytes()
    assert search_layers(image, [MARK.encode(), known]) == {known}
    listed = "ls -A /wheels /run/secrets /etc/uv /root/.cache 2> /dev/null; cat /etc/pip.conf"
    assert (
        docker("run", "--rm", "--entrypoint", "sh", image, "-c", listed, check=False).stdout == ""
    )


def test_it_has_compilers_of_kernels_and_no_other_tools(image: str) -> None:
    tools = "for it in uv pip make cmake git curl wget; do command -v $it; done; true"
    found = run(image, "sh", "-c", tools).split()
    # pip may be the official base's own, which belongs to the other interpreter.
    assert set(found) <= {"/usr/local/bin/pip"}
    assert run(image, "sh", "-c", "command -v g++").strip() == "/usr/bin/g++"
    kept = (
        "ls -A /var/lib/apt/lists/* /var/cache/apt/* /opt/logsteer/lib/*/site-packages/torch/test"
    )
    assert run(image, "sh", "-c", f"{kept} 2> /dev/null; true") == ""


def test_bytecode_is_compiled(image: str) -> None:
    # A module counts as compiled where Python would take its bytecode: same time, same size.
    code = """
import importlib.util, pathlib, struct, sys, sysconfig
stale = []
roots = [sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "/srv/logsteer"]
for root in map(pathlib.Path, roots):
    for path in root.rglob("*.py"):
        parts = set(path.relative_to(root).parts)
        if parts & {"test", "idlelib", "lib2to3", "site-packages", "dist-packages"}: continue
        cached = pathlib.Path(importlib.util.cache_from_source(str(path)))
        status = path.stat()
        fresh = cached.exists() and struct.unpack("<II", cached.read_bytes()[8:16]) == (
            int(status.st_mtime), status.st_size)
        stale += [] if fresh else [str(path)]
print(sum(1 for _ in pathlib.Path(roots[0]).rglob("*.pyc")), *stale)
"""
    compiled, *stale = run(image, "/opt/logsteer/bin/python", "-c", code).split()
    assert int(compiled) > 10_000
    # Templates and files for other versions are called .py, too, and do not compile.
    assert len(stale) < 40, stale


def test_its_list_of_parts_is_complete(
    image: str, secrets: dict[str, Path], tmp_path: Path
) -> None:
    label = inspect(image)["Config"]["Labels"]["logsteer.sbom"]
    document = run(image, "cat", label)
    build("sbom-cpu", "--output", f"type=local,dest={tmp_path}", secrets=secrets)
    assert (tmp_path / "sbom.cdx.json").read_text() == document
    found = json.loads(document)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert found["metadata"]["component"]["version"] == __version__
    purls = {component["purl"] for component in found["components"]}
    assert len(purls) == len(found["components"])
    code = "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"
    installed = run(image, "/opt/logsteer/bin/python", "-c", code).split()
    names = {name.lower().replace("_", "-").replace(".", "-") for name in installed}
    python = {purl.removeprefix("pkg:pypi/").split("@")[0] for purl in purls if ":pypi/" in purl}
    assert python == names - {"logsteer"}
    packages = run(image, "dpkg-query", "--show", "--showformat", "${Package}\n").split()
    debian = {p.split("/", 2)[2].split("@")[0] for p in purls if p.startswith("pkg:deb/")}
    assert debian == set(packages)


# ------------------------------------------------------------------ the service


def test_it_runs_confined(service: Service) -> None:
    host = inspect(service.container)["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["Memory"] == 8 * 2**30
    assert inspect(service.container)["State"]["Health"]["Status"] == "healthy"
    status = service.execute("cat", "/proc/self/status")
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert lines["Uid"].split() == ["10001"] * 4
    assert lines["NoNewPrivs"] == "1"
    assert int(lines["CapEff"], 16) == 0
    assert int(lines["CapBnd"], 16) == 1 << 23, "SYS_NICE alone"
    for path in ("/srv/logsteer/x", "/opt/logsteer/x", "/etc/logsteer/x", "/usr/x"):
        assert service.execute("sh", "-c", f"touch {path} && echo written", check=False) == ""
    assert service.execute(
        "sh", "-c", "touch /var/lib/logsteer/x && rm /var/lib/logsteer/x && echo ok"
    )


def test_the_demo_asks_it(service: Service) -> None:
    command = [sys.executable, str(ROOT / "demo/show.py"), "--url", service.url]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("POST")] == [
        "/logprob", "/perplexity", "/tokenize",
    ]  # fmt: skip
    answer = httpx.post(
        f"{service.url}/logprob",
        json={"items": [{"context": "The capital of France is", "targets": [" Paris", " London"]}]},
        timeout=60,
    ).json()
    best = answer["results"][0]["best"]
    assert answer["results"][0]["targets"][best]["target"] == " Paris"


def test_it_ends_in_time_when_it_is_stopped(service: Service) -> None:
    service.compose("stop", "cpu")
    state = inspect(service.container)["State"]
    service.start()
    assert (state["ExitCode"], state["OOMKilled"], state["Status"]) == (0, False, "exited")


def test_a_vector_survives_a_new_container(service: Service) -> None:
    made = httpx.post(
        f"{service.url}/vectors/train",
        json={
            "name": "mood", "method": "mean_difference", "layers": [1],
            "pairs": [{"positive": f"I am happy, {name}.", "negative": f"I am sad, {name}."}
                      for name in ("Ann", "Bob", "Carl", "Dora", "Eve", "Fred")],
        },
        timeout=60,
    )  # fmt: skip
    assert made.is_success, made.text
    content = httpx.get(f"{service.url}/vectors/mood/content", timeout=60).raise_for_status()
    before = inspect(service.container)["Id"]
    service.start("--force-recreate")
    assert inspect(service.container)["Id"] != before
    again = httpx.get(f"{service.url}/vectors/mood/content", timeout=60).raise_for_status()
    assert again.content == content.content
    body: dict[str, Any] = {
        "prompts": ["The day was"], "max_tokens": 4,
        "steering": {"vectors": [{"name": "mood", "scale": 2.0}]},
    }  # fmt: skip
    steered = httpx.post(f"{service.url}/steer", json=body, timeout=60)
    assert steered.is_success, steered.text


def test_a_killed_server_is_restarted(service: Service) -> None:
    service.kill_server()
    service.wait_until_ready()
    assert httpx.get(f"{service.url}/vectors", timeout=60).is_success


@pytest.fixture
def compiled(image: str, service: Service, tmp_path: Path) -> str:
    """A container with a model that is compiled at its start, as `docker run` starts it."""
    service.compose("stop", "cpu")
    config = tmp_path / "models.yaml"
    config.write_text(COMPILED)
    config.chmod(0o644)
    tmp_path.chmod(0o755)
    return str(config)


def test_a_model_is_compiled_in_it(image: str, service: Service, compiled: str) -> None:
    name = f"{service.container}-compiled"
    docker(
        "run", "--detach", "--rm", "--name", name, "--read-only", "--cap-drop", "ALL",
        "--tmpfs", "/tmp:mode=1777,exec,size=1g", "--memory", "8g",
        "--publish", f"127.0.0.1:{PORT}:8000", "--env", "LOGSTEER_INSECURE=true",
        "--volume", f"{compiled}:/etc/logsteer/models.yaml:ro", "--stop-timeout", "75", image,
    )  # fmt: skip
    try:
        service.wait_until_ready(300)
        body = {"items": [{"context": "The capital of France is", "targets": [" Paris"]}]}
        answer = httpx.post(f"{service.url}/logprob", json=body, timeout=60).raise_for_status()
        assert answer.json()["results"][0]["targets"][0]["prob"] > 0.5
        # Kernels are libraries that g++ made from Inductor's sources.
        found = docker("exec", name, "sh", "-c", "find /tmp /var/lib/logsteer -name '*.so'").stdout
        assert found.split()
    finally:
        docker("stop", name)


# ------------------------------------------------------------------ systemd


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
    (directory / "models.yaml").write_text(COMPILED)
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

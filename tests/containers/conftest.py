"""The image, built once for all tests of it, and the compose service that runs it.

`make test-containers` runs these tests; other runs skip them and say so. They take root's access to
a Docker engine, 12 GB of disk, and minutes. Where no registry is in reach, bases.sh makes a base.
CONTAINERS=fresh builds without cached layers; CONTAINERS_PORT is the port that is published, and
CONTAINERS_PROJECT what names of images, containers and networks begin with.
"""

import os
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from tests.conftest import ROOT
from tests.containers.docker import docker, find_lack, inspect

PROJECT = os.environ.get("CONTAINERS_PROJECT", "logsteer-test")
IMAGE = f"{PROJECT}:cpu"
PYTHON_BASE = "logsteer-test/python:3.11-bookworm"
PORT = os.environ.get("CONTAINERS_PORT", "8000")
MARK = "# only for the build: 5b0e6f51a6c1"
"""Stands in each secret; a layer that holds it holds a secret."""
FIND_SERVER = """
import os, pathlib
for p in pathlib.Path('/proc').glob('[0-9]*/stat'):
    fields = p.read_text().rpartition(')')[2].split()
    if fields[1] == '1' and p.parent.name != str(os.getpid()): print(p.parent.name)
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything here, loudly, but where it was asked for and can run."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if not here:
        return
    asked = os.environ.get("CONTAINERS") in {"all", "fresh"}
    lack = find_lack() if asked else "`make test-containers` builds and runs the image"
    for item in here if lack else []:
        item.add_marker(pytest.mark.skip(reason=f"CONTAINERS ARE NOT TESTED: {lack}"))


def choose_base() -> str | None:
    """The base to build on: None for the one that the Dockerfile names, where it can be had."""
    named = next(
        line.partition("=")[2]
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("ARG PYTHON_BASE=")
    )
    for image in (named, PYTHON_BASE):
        if not docker("image", "inspect", image, check=False).returncode:
            return None if image == named else image
    if not docker("pull", named, check=False).returncode:
        return None
    make_base("python", PYTHON_BASE)
    return PYTHON_BASE


def make_base(kind: str, tag: str) -> None:
    """Make an image of Debian's packages, in place of one that no registry gave."""
    bases = str(ROOT / "tests/containers/bases.sh")
    assert os.spawnlp(os.P_WAIT, bases, bases, kind, tag) == 0, f"no image for {tag} can be had"


def provide_prometheus() -> str:
    """See to it that compose's image of Prometheus is there; return what it says that it is."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    image: str = services["prometheus"]["image"]
    has = not docker("image", "inspect", image, check=False).returncode
    if not has and docker("pull", image, check=False).returncode:
        make_base("prometheus", image)
    return docker("run", "--rm", image, "--version").stdout.splitlines()[0]


def write_secrets(directory: Path) -> dict[str, Path]:
    """How this machine reaches package indexes, as the secrets of a build, by id."""
    authority = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    index = os.environ.get("PIP_INDEX_URL")
    texts = {
        "ca": f"{MARK}\n" + (Path(authority).read_text() if authority else ""),
        "pip_conf": f"{MARK}\n[global]\ntimeout = 180\n"
        + (f"index-url = {index}\n" if index else ""),
        "uv_toml": f"{MARK}\n" + (f'[[index]]\nurl = "{index}"\ndefault = true\n' if index else ""),
    }
    if not authority:
        del texts["ca"]
    for name, text in texts.items():
        (directory / name).write_text(text)
    return {name: directory / name for name in texts}


def build(target: str, *arguments: str, secrets: dict[str, Path]) -> float:
    """Build a target; return how long it took, in seconds."""
    base = choose_base()
    wheels = os.environ.get("PIP_FIND_LINKS")
    started = time.monotonic()
    docker(
        "buildx", "build", "--target", target, *arguments,
        *(["--build-arg", f"PYTHON_BASE={base}"] if base else []),
        *(["--build-context", f"wheels={wheels}"] if wheels else []),
        *(f"--secret=id={name},src={path}" for name, path in secrets.items()),
        ".",
    )  # fmt: skip
    return time.monotonic() - started


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files that reach package indexes."""
    return write_secrets(tmp_path_factory.mktemp("secrets"))


@pytest.fixture(scope="session")
def image(secrets: dict[str, Path]) -> str:
    """The built image of the cpu target."""
    fresh = ["--no-cache"] if os.environ.get("CONTAINERS") == "fresh" else []
    seconds = build("cpu", "--tag", IMAGE, *fresh, secrets=secrets)
    size = inspect(IMAGE)["Size"] / 1e9
    print(f"\nbuilt {IMAGE} in {seconds:.0f} s: {size:.2f} GB")
    return IMAGE


@dataclass
class Service:
    """The compose service `cpu` under a project name of its own, on PORT."""

    url: str = f"http://127.0.0.1:{PORT}"

    @property
    def container(self) -> str:
        """The server's container."""
        return self.name_container("cpu")

    def name_container(self, service: str) -> str:
        """What compose calls the container of a service."""
        return f"{PROJECT}-{service}-1"

    def compose(self, *arguments: str) -> str:
        """Run docker compose on this checkout's file; return what it prints."""
        # An engine without CAP_SYS_RESOURCE cannot raise limits.
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        env = {
            "LOGSTEER_IMAGE": IMAGE,
            "LOGSTEER_INSECURE": "true",
            "LOGSTEER_PORT": PORT,
            "LOGSTEER_NOFILE": str(min(files, 65536) if files > 0 else 65536),
            "LOGSTEER_MEMLOCK": str(locked),
        }
        return docker("compose", "--project-name", PROJECT, *arguments, env=env).stdout

    def start(self, *more: str) -> None:
        """Start the container and wait until it is healthy; options and other services go along."""
        self.compose("up", "--no-build", "--detach", "--wait", "cpu", *more)

    def kill_server(self) -> None:
        """End the server in its container by SIGKILL, and wait until the engine starts it again."""
        count = inspect(self.container)["RestartCount"]
        # The server is the child of the container's first process, which reaps and passes signals.
        (server,) = self.execute("python", "-c", FIND_SERVER).split()
        self.execute("sh", "-c", f"kill -{signal.SIGKILL.value} {server}")
        deadline = time.monotonic() + 30
        while inspect(self.container)["RestartCount"] == count and time.monotonic() < deadline:
            time.sleep(0.2)
        assert inspect(self.container)["RestartCount"] == count + 1

    def execute(self, *command: str, check: bool = True) -> str:
        """What a command prints in the container."""
        return docker("exec", self.container, *command, check=check).stdout

    def wait_until_ready(self, limit_s: float = 180) -> None:
        """Wait until /readyz answers 200."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/readyz", timeout=5).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise TimeoutError(self.compose("logs"))


@pytest.fixture(scope="session")
def service(image: str) -> Iterator[Service]:
    """The running service; its container, network and volume go with the tests."""
    service = Service()
    service.compose("down", "--volumes")
    service.start()
    yield service
    service.compose("down", "--volumes")

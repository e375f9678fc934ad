"""The Dockerfile, docker-compose.yml and the configurations agree with each other and the code."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from logsteer_server.runtime.engine_process import CLOSE_TIMEOUT_S, END_TIMEOUT_S
from logsteer_server.serving import END_S, main
from logsteer_server.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(ROOT.glob("deploy/models*.yaml"))
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass
class Stage:
    """One FROM of the Dockerfile and the instructions under it."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def last(self, keyword: str) -> str:
        """The argument of an instruction's last occurrence, which is the one that counts."""
        return [argument for word, argument in self.instructions if word == keyword][-1]

    def every(self, keyword: str) -> list[str]:
        """The arguments of every occurrence of an instruction."""
        return [argument for word, argument in self.instructions if word == keyword]


def parse_dockerfile(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """Defaults of the global build arguments, and the stages by name."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage = None
    for line in filter(None, map(str.strip, joined.splitlines())):
        keyword, _, argument = line.partition(" ")
        if keyword == "FROM":
            base, _, name = argument.partition(" AS ")
            stage = stages[name] = Stage(name, base)
        elif stage is None:
            name, _, default = argument.partition("=")
            arguments[name] = default
        else:
            stage.instructions.append((keyword, argument.strip()))
    return arguments, stages


ARGUMENTS, STAGES = parse_dockerfile((ROOT / "Dockerfile").read_text())
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
    drain_s = Settings.model_fields["drain_s"].default
    needed = drain_s + END_S + CLOSE_TIMEOUT_S + 2 * END_TIMEOUT_S
    assert parse_seconds(SERVICES[service]["stop_grace_period"]) > needed
    said = re.search(r"--stop-timeout (\d+)", (ROOT / "Dockerfile").read_text())
    assert said and float(said[1]) > needed


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_configuration_is_valid(path: Path, outside: None) -> None:
    settings = load_settings(path)
    for model in settings.models:
        if isinstance(model.devices, list):
            assert len(model.devices) == model.tensor_parallel * model.pipeline_parallel
    assert any(model.required for model in settings.models)


def test_the_gpu_example_has_models_that_do_not_share_a_gpu(outside: None) -> None:
    models = load_settings(ROOT / "deploy/models.gpu.yaml").models
    devices = [gpu for model in models if isinstance(model.devices, list) for gpu in model.devices]
    assert len(models) >= 2
    assert len(set(devices)) == len(devices)
    (reach,) = (model for model in models if model.engine == "transformer_lens")
    assert isinstance(reach.devices, list) and len(reach.devices) == 2
    assert reach.path in [model.path for model in models if model.engine == "vllm"]


def test_the_demo_is_served_on_both_engines(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "demo/both.yaml"
    assert main(["--config", str(path), "--check"]) == 0
    models = load_settings(path).models
    assert {model.id: model.engine for model in models} == {
        "demo": "vllm", "demo-tlens": "transformer_lens",
    }  # fmt: skip
    assert {(path.parent / model.path).resolve() for model in models} == {ROOT / "demo/model"}
    assert {model.dtype for model in models} == {"float32"}
    assert "demo/both.yaml" in (ROOT / "demo/README.md").read_text()

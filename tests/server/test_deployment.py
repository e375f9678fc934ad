"""The Dockerfile, docker-compose.yml and the configurations agree with each other and the code."""

import fnmatch
import json
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from logsteer_server.app import create_app
from logsteer_server.listening import check_exposure
from logsteer_server.runtime.engine_process import CLOSE_TIMEOUT_S, END_TIMEOUT_S
from logsteer_server.serving import END_S, main, parse_arguments
from logsteer_server.settings import ConfigurationError, Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("cpu", "cuda")
CONFIGS = sorted(ROOT.glob("deploy/models*.yaml"))
HOME = "/srv/logsteer"
SBOM = Path(HOME, "sbom.cdx.json")
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


def list_copies() -> Iterator[tuple[str, str, str]]:
    """Stage, source and destination of every COPY, `--from` ones with the stage in the source."""
    for stage in STAGES.values():
        for copy in stage.every("COPY"):
            flags = [word for word in shlex.split(copy) if word.startswith("--")]
            *sources, destination = [w for w in shlex.split(copy) if not w.startswith("--")]
            origin = "".join(f.removeprefix("--from=") + ":" for f in flags if "--from=" in f)
            for source in sources:
                yield stage.name, origin + source, destination


def is_ignored(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore keeps a path out: the last pattern that fits it or a parent decides."""
    parts = path.split("/")
    names = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    ignored = False
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        anywhere = bare.removeprefix("**/")
        for name in names:
            fits = fnmatch.fnmatchcase(name, bare) and name.count("/") == bare.count("/")
            if bare != anywhere:
                fits = fnmatch.fnmatchcase(name.rpartition("/")[2], anywhere)
            if fits:
                ignored = not pattern.startswith("!")
    return ignored


def read_ignore_patterns() -> list[str]:
    """The patterns of .dockerignore."""
    lines = map(str.strip, (ROOT / ".dockerignore").read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def read_health_command(target: str) -> list[str]:
    """The health check's argument vector."""
    argv: list[str] = json.loads(STAGES[target].last("HEALTHCHECK").partition(" CMD ")[2])
    return argv


def read_health_url(target: str) -> tuple[int, str]:
    """Port and path that the health check asks."""
    code = read_health_command(target)[-1]
    port = re.search(r"HTTPConnection\('127\.0\.0\.1', (\d+)", code)
    path = re.search(r"request\('GET', '([^']+)'\)", code)
    assert port and path
    return int(port[1]), path[1]


def parse_seconds(text: str) -> float:
    """Seconds of a duration such as 1m30s."""
    return sum(float(n) * SECONDS[unit] for n, unit in re.findall(r"(\d+)(ms|[smh])", text))


def drop_variables(text: str) -> str:
    """Compose text with every `${NAME:-default}` replaced by its default."""
    return re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No .env file and no LOGSTEER_ variable of the developer's."""
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(f"LOGSTEER_{name.upper()}", raising=False)


def test_every_copied_file_exists_and_reaches_the_build_context() -> None:
    patterns = read_ignore_patterns()
    local = [source for _, source, _ in list_copies() if ":" not in source]
    assert len(local) >= 10
    assert [source for source in local if not (ROOT / source).exists()] == []
    assert [source for source in local if is_ignored(source, patterns)] == []


@pytest.mark.parametrize(
    "path",
    [
        ".venv/bin/python",
        ".git/config",
        ".env",
        ".hypothesis/examples/1",
        ".mypy_cache/x",
        "README.md",
        "bench/results.json",
        "client/logsteer/__pycache__/cli.cpython-311.pyc",
        "client/logsteer/schemas/__pycache__",
        "server/.env",
        "server/playground/node_modules/x/index.js",
        "shared/big.bin",
        "tests/server/test_deployment.py",
    ],
)
def test_the_build_context_leaves_out(path: str) -> None:
    assert is_ignored(path, read_ignore_patterns())


@pytest.mark.parametrize("path", ["client/logsteer/cli/command.py", "demo/model/config.json"])
def test_the_build_context_has(path: str) -> None:
    assert not is_ignored(path, read_ignore_patterns())


@pytest.mark.parametrize("target", TARGETS)
def test_the_container_runs_as_a_numbered_user_who_owns_the_volume(target: str) -> None:
    user, _, group = STAGES[target].last("USER").partition(":")
    assert int(user) > 0
    assert int(group) > 0
    setup = STAGES[STAGES[target].base].last("RUN")
    (volume,) = json.loads(STAGES[target].last("VOLUME"))
    assert f"useradd --uid {user} --gid {group} --home-dir {volume}" in setup
    assert f"install --directory --owner {user} --group {group} {volume}" in setup
    assert f"HOME={volume} " in STAGES[target].last("ENV")
    words = [word for word, _ in STAGES[target].instructions]
    assert "RUN" not in words[words.index("USER") :]


def test_base_images_are_pinned() -> None:
    stages = {*STAGES, "scratch", "${VARIANT}", "build-${VARIANT}"}
    assert ARGUMENTS["VARIANT"] in TARGETS
    bases = {stage.base for stage in STAGES.values() if stage.base not in stages}
    assert bases == {"${PYTHON_BASE}", "${CUDA_BASE}"}
    for base in (ARGUMENTS["PYTHON_BASE"], ARGUMENTS["CUDA_BASE"]):
        assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+-[a-z0-9.-]+", base), base


def test_the_image_has_the_version_of_the_project() -> None:
    project = tomllib.loads((ROOT / "server/pyproject.toml").read_text())["project"]
    assert ARGUMENTS["VERSION"] == project["version"]
    for target in TARGETS:
        assert 'image.version="$VERSION"' in STAGES[target].last("LABEL")
        assert f'image.licenses="{project["license"]}"' in STAGES[target].last("LABEL")
        assert json.loads(STAGES[target].last("ENTRYPOINT"))[0] in project["scripts"]


@pytest.mark.parametrize("target", TARGETS)
def test_the_command_is_one_that_the_server_takes(target: str) -> None:
    arguments = parse_arguments(json.loads(STAGES[target].last("CMD")))
    assert arguments.host == "0.0.0.0"
    assert str(arguments.port) == STAGES[target].last("EXPOSE")
    assert arguments.port == read_health_url(target)[0]
    destinations = {destination for _, _, destination in list_copies()}
    assert arguments.config.as_posix() in destinations


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_does_not_serve_strangers_unless_told(target: str, outside: None) -> None:
    settings = load_settings(
        CONFIGS[0], host=parse_arguments(json.loads(STAGES[target].last("CMD"))).host
    )
    with pytest.raises(ConfigurationError, match="no key is asked for"):
        check_exposure(settings)
    assert not any("LOGSTEER_INSECURE" in line for line in STAGES[target].every("ENV"))


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_takes_a_key_unless_the_user_says_otherwise(service: str) -> None:
    assert SERVICES[service]["environment"]["LOGSTEER_INSECURE"] is None, "as the user sets it"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_publishes_and_mounts_what_its_image_uses(service: str) -> None:
    stage = STAGES[SERVICES[service]["build"]["target"]]
    for port in SERVICES[service]["ports"]:
        address, _, inside = drop_variables(port).rpartition(":")
        assert inside == stage.last("EXPOSE")
        assert address.startswith("127.0.0.1:")
    arguments = parse_arguments(json.loads(stage.last("CMD")))
    volumes = SERVICES[service]["volumes"]
    (config,) = [volume for volume in volumes if isinstance(volume, dict)]
    assert config["target"] == arguments.config.as_posix()
    assert ROOT / config["source"] in CONFIGS
    (cache,) = [volume for volume in volumes if isinstance(volume, str)]
    name, _, target = cache.partition(":")
    assert name in COMPOSE["volumes"]
    assert [target] == json.loads(stage.last("VOLUME"))


@pytest.mark.parametrize("target", TARGETS)
def test_the_health_check_asks_a_path_that_the_server_has(target: str, outside: None) -> None:
    app = create_app(load_settings(CONFIGS[0]))
    assert read_health_url(target)[1] in app.openapi()["paths"]


@pytest.mark.parametrize(("status", "exit_status"), [(200, 0), (503, 1)])
@pytest.mark.parametrize("target", TARGETS)
def test_the_health_check_fails_unless_the_answer_is_200(
    target: str, status: int, exit_status: int
) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == read_health_url(target)[1] else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        code = read_health_command(target)[-1]
        code = code.replace(str(read_health_url(target)[0]), str(server.server_port))
        proxies = {"http_proxy": "http://127.0.0.1:9"}
        done = subprocess.run([sys.executable, "-I", "-c", code], env=proxies, check=False)
        server.shutdown()
        thread.join()
    assert done.returncode == exit_status


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


def test_the_demo_model_lies_where_the_image_puts_it(outside: None) -> None:
    (model,) = load_settings(ROOT / "deploy/models.cpu.yaml").models
    places = {destination: source for _, source, destination in list_copies()}
    assert (ROOT / places[model.path] / "config.json").is_file()


@pytest.mark.parametrize("target", TARGETS)
def test_stores_lie_in_the_volume(
    target: str, outside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = re.search(r"HOME=(\S+)", STAGES[target].last("ENV"))
    assert home
    monkeypatch.setenv("HOME", home[1])
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    (volume,) = json.loads(STAGES[target].last("VOLUME"))
    for config in CONFIGS:
        assert load_settings(config).store_path.is_relative_to(volume)

"""The manifests of deploy/ray against Ray's own schema, the settings, and the image.

That rayservice.yaml fits KubeRay's CustomResourceDefinition is not tested: no package has that.
"""

import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="SKIPPED BECAUSE RAY IS ABSENT: install the extra `ray`",
    ),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]

SERVICE = yaml.safe_load((ROOT / "deploy/ray/rayservice.yaml").read_text())
COMPOSE = yaml.safe_load((ROOT / "deploy/ray/compose.yml").read_text())
CONFIGURATIONS = {
    "serve.yaml": yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text()),
    "rayservice.yaml": yaml.safe_load(SERVICE["spec"]["serveConfigV2"]),
}
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
PODS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]


def read_environment(service: str) -> dict[str, Any]:
    """The variables of a service of the compose file."""
    return dict(COMPOSE["services"][service]["environment"])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_is_one_that_serve_deploy_takes(name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    from logsteer_server.cluster import ClusterArguments

    (application,) = ServeDeploySchema.model_validate(CONFIGURATIONS[name]).applications
    assert isinstance(application.args, dict)
    arguments = ClusterArguments.model_validate(application.args)
    assert arguments.config == Path("/etc/logsteer/models.yaml")
    assert application.route_prefix == "/"
    assert CONFIGURATIONS[name]["http_options"]["host"] == read_environment("head")["LOGSTEER_HOST"]
    module, _, function = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    # Ray's schema takes fields that it does not know, and leaves them out.
    known = set(ServeDeploySchema.model_fields)
    assert set(CONFIGURATIONS[name]) <= known
    assert set(CONFIGURATIONS[name]["applications"][0]) <= set(type(application).model_fields)


def test_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "server/pyproject.toml").read_text())["project"]
    (pinned,) = (p for p in project["optional-dependencies"]["ray"] if p.startswith("ray["))
    assert pinned.endswith(f"=={CLUSTER['rayVersion']}")
    images = {pod["template"]["spec"]["containers"][0]["image"] for pod in PODS}
    assert images == {f"logsteer-ray:{project['version']}"}
    # uv installs an extra that does not exist without a word.
    assert "--editable 'server[ray]'" in (ROOT / "deploy/image/ray.sh").read_text()


def test_rays_ports_ask_for_a_token() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token"}
    for name in ("head", "node-1", "node-2", "deploy"):
        given = read_environment(name)
        assert given["RAY_AUTH_MODE"] == "token"
        assert given["RAY_AUTH_TOKEN"].startswith("${LOGSTEER_RAY_TOKEN:?"), "none is known"

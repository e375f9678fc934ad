"""The manifests of deploy/ray against Ray's own schema, the settings, and the image.

That rayservice.yaml fits KubeRay's CustomResourceDefinition is not tested: no package has that.
"""

import importlib.util
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.server.test_deployment import STAGES

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

    from logsteer_server.cluster.application import ClusterArguments

    (application,) = ServeDeploySchema.model_validate(CONFIGURATIONS[name]).applications
    assert isinstance(application.args, dict)
    arguments = ClusterArguments.model_validate(application.args)
    assert arguments.config == Path("/etc/logsteer/models.yaml")
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


def test_the_head_runs_nothing_and_its_state_outlives_it() -> None:
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert CLUSTER["gcsFaultToleranceOptions"]["backend"] == "rocksdb"
    head = COMPOSE["services"]["head"]
    assert "--num-cpus=0" in head["command"]
    environment = read_environment("head")
    assert environment["RAY_gcs_storage"] == "rocksdb"
    kept = environment["RAY_gcs_storage_path"]
    assert f"head:{kept}" in head["volumes"]
    made = f"--chown={STAGES['cpu'].last('USER')} /opt/state {kept}"
    assert any(copy.endswith(made) for copy in STAGES["ray"].every("COPY"))


def test_no_node_can_take_two_replicas_of_a_model() -> None:
    cpus = CONFIGURATIONS["serve.yaml"]["applications"][0]["args"]["cpus"]
    for name in ("node-1", "node-2"):
        (given,) = (w for w in COMPOSE["services"][name]["command"] if w.startswith("--num-cpus="))
        assert (
            cpus
            < int(given.removeprefix("--num-cpus=${LOGSTEER_NODE_CPUS:-").rstrip("}"))
            < 2 * cpus
        )


def test_nodes_and_pods_are_told_alike() -> None:
    for pod in PODS:
        variables = pod["template"]["spec"]["containers"][0]["env"]
        given = {v["name"]: v["value"] for v in variables if "value" in v}
        alike = {name for name in given if name.startswith("RAY_")}
        assert len(alike) == 3
        for name in alike | {"LOGSTEER_HOST"}:
            assert given[name] == read_environment("head")[name] == read_environment("node-1")[name]


def test_rays_ports_ask_for_a_token() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token"}
    for name in ("head", "node-1", "node-2", "deploy"):
        given = read_environment(name)
        assert given["RAY_AUTH_MODE"] == "token"
        assert given["RAY_AUTH_TOKEN"].startswith("${LOGSTEER_RAY_TOKEN:?"), "none is known"


def test_pods_may_no_more_than_the_others() -> None:
    for pod in PODS:
        assert pod["template"]["spec"]["automountServiceAccountToken"] is False
        (container,) = pod["template"]["spec"]["containers"]
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_pods_are_the_user_of_the_image() -> None:
    user, _, group = STAGES["cpu"].last("USER").partition(":")
    for pod in PODS:
        context = pod["template"]["spec"]["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == (int(user), int(group))
        assert context["fsGroup"] == int(group), "volumes are writable"


def test_the_image_without_a_command_is_a_cluster_of_one_machine() -> None:
    stage = STAGES["ray"]
    assert stage.base == "${VARIANT}"
    assert json.loads(stage.last("ENTRYPOINT")) == []
    program, flag, module, *_ = json.loads(stage.last("CMD"))
    assert (program, flag) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None

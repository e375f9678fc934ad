"""An engine whose ranks are on several nodes: settings, environment, arguments, files, messages."""

import asyncio
import os
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from pydantic import ValidationError

from logsteer.errors import APIError
from logsteer_server.contract.batches import ScoreJobs
from logsteer_server.contract.engine import EngineSpec, RankNode
from logsteer_server.contract.jobs import GenerateJob, Job, JobFailure, ScoreJob
from logsteer_server.contract.parameters import Adapter
from logsteer_server.engines import process
from logsteer_server.engines.exchanged_files import NOT_SHARED, refuse_absent
from logsteer_server.engines.vllm.config import engine_args, set_environment
from logsteer_server.engines.vllm.rank_files import RankFiles
from logsteer_server.settings import ConfigurationError, ModelSettings

NODE = RankNode(2, 1, "127.0.0.1", ("127.0.0.1", 29_600))
SPEC = EngineSpec("m", "vllm", "p", tensor_parallel=4, pipeline_parallel=2, node=NODE)
IDS = np.arange(4, dtype=np.int32)
VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment of the test's own; what is set in it ends with the test."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return monkeypatch


def make_model(**fields: Any) -> ModelSettings:
    return ModelSettings(id="m", path="p", **fields)


class TestSettings:
    def test_nodes_divide_the_ranks(self) -> None:
        assert make_model(tensor_parallel=2, pipeline_parallel=3, nodes_per_replica=6)
        with pytest.raises(ValidationError, match=r"must divide .* which is 4"):
            make_model(tensor_parallel=4, nodes_per_replica=3)
        with pytest.raises(ValidationError, match=r"must divide .* which is 1"):
            make_model(nodes_per_replica=2)

    def test_they_take_an_engine_with_ranks(self) -> None:
        with pytest.raises(ValidationError, match="takes engine vllm"):
            make_model(engine="transformer_lens", pipeline_parallel=2, nodes_per_replica=2)

    def test_one_machine_has_all_ranks(self) -> None:
        spec = make_model(tensor_parallel=2, nodes_per_replica=2).to_spec(Path())
        assert spec.node is None
        assert spec.local_ranks == 2
        args = engine_args(spec, "p", on_cpu=True, limit=100)
        assert not {"nnodes", "node_rank", "master_addr", "master_port"} & args.keys()


class TestEngine:
    def test_vllm_is_told_its_node_and_where_to_meet(self) -> None:
        args = engine_args(SPEC, "p", on_cpu=True, limit=100)
        assert (args["nnodes"], args["node_rank"]) == (2, 1)
        assert (args["master_addr"], args["master_port"]) == ("127.0.0.1", 29_600)
        assert args["distributed_executor_backend"] == "mp"

    def test_ranks_listen_at_their_nodes_address(self, environment: pytest.MonkeyPatch) -> None:
        environment.setenv("NCCL_SOCKET_IFNAME", "ib0")
        environment.delenv("GLOO_SOCKET_IFNAME", raising=False)
        set_environment(SPEC)
        assert os.environ["VLLM_HOST_IP"] == "127.0.0.1"
        own = psutil.net_if_addrs()[os.environ["GLOO_SOCKET_IFNAME"]]
        assert "127.0.0.1" in {each.address for each in own}
        assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"

    @pytest.mark.parametrize(
        ("given", "wanted"), [("4,5,6,7,8", "4,5,6,7"), (None, "0,1,2,3"), ("", "")]
    )
    def test_no_device_beyond_a_nodes_ranks_is_seen(
        self, environment: pytest.MonkeyPatch, given: str | None, wanted: str
    ) -> None:
        environment.delenv(VISIBLE, raising=False)
        if given is not None:
            environment.setenv(VISIBLE, given)
        set_environment(SPEC)
        assert os.environ[VISIBLE] == wanted

    @pytest.mark.parametrize(("number", "wanted"), [(0, "VllmEngine"), (1, "VllmFollower")])
    def test_other_nodes_run_ranks_alone(
        self, monkeypatch: pytest.MonkeyPatch, number: int, wanted: str
    ) -> None:
        made = []
        for name in ("VllmEngine", "VllmFollower"):
            where = "follower" if name == "VllmFollower" else "engine"
            path = f"logsteer_server.engines.vllm.{where}.{name}"
            monkeypatch.setattr(path, lambda _, name=name: made.append(name))
        node = RankNode(2, number, "127.0.0.1", ("127.0.0.1", 1))
        process.build_engine(EngineSpec("m", "vllm", "p", tensor_parallel=2, node=node))
        assert made == [wanted]


class Workers:
    """Ranks on two nodes, the second of which sees files below some directories alone."""

    def __init__(self, *seen: str) -> None:
        self._seen = seen
        self.asked = 0

    def call(self, _method: str, paths: Sequence[str]) -> list[bool]:
        self.asked += 1
        return [True, str(Path(paths[-1]).parent) in self._seen]


class TestFiles:
    def test_jobs_whose_files_a_node_lacks_are_refused(self) -> None:
        workers = Workers("/shared")
        files = RankFiles(workers.call, SPEC)
        for name in ("export", "reference"):
            shared: Any = {name: "/shared/a"}
            assert files.refuse(ScoreJob(IDS, IDS[1:], **shared)) is None
            own: Any = {name: "/own/a"}
            refused = files.refuse(ScoreJob(IDS, IDS[1:], **own))
            assert refused is not None
            assert refused.code == "unsupported_by_engine"
            assert "scratch_directory" in refused.detail
        assert workers.asked == 3, "a directory that is shared is asked about once"

    def test_a_file_with_a_path_on_each_node_is_asked_for_each_time(self) -> None:
        """One that is there says nothing of the next: each was fetched for itself."""
        workers = Workers("/second")
        files = RankFiles(workers.call, SPEC)
        for name in "aab":
            assert files.has_everywhere(f"/first/{name}", f"/second/{name}")
        assert workers.asked == 3
        assert not files.has_everywhere("/second/a", "/third/a")

    def test_jobs_whose_files_are_on_another_machine_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a").touch()
        plain = ScoreJob(IDS, IDS[1:])
        for name in ("export", "reference"):
            here: Any = {name: str(tmp_path / "a")}
            away: Any = {name: str(tmp_path / "b")}
            jobs: list[Job] = [plain, replace(plain, **here)]
            assert asyncio.run(refuse_absent(jobs)) is None
            assert asyncio.run(refuse_absent(ScoreJobs.of([replace(plain, **here)]))) is None
            assert asyncio.run(refuse_absent([*jobs, replace(plain, **away)])) is NOT_SHARED

    def test_other_jobs_and_engines_of_one_node_ask_nobody(self) -> None:
        workers = Workers()
        assert RankFiles(workers.call, SPEC).refuse(ScoreJob(IDS, IDS[1:])) is None
        assert RankFiles(workers.call, SPEC).refuse(GenerateJob(IDS, max_tokens=3)) is None
        one = RankFiles(workers.call, EngineSpec("m", "vllm", "p", tensor_parallel=2))
        assert one.refuse(ScoreJob(IDS, IDS[1:], export="/own/a")) is None
        assert workers.asked == 0


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments")  # in Ray's own code
class TestCluster:
    @pytest.fixture(autouse=True)
    def _ray(self) -> None:
        pytest.importorskip("ray", reason="SKIPPED BECAUSE RAY IS ABSENT: install the extra `ray`")

    def test_what_a_node_says_of_a_content_is_said_to_the_caller(self) -> None:
        from logsteer_server.cluster import calls, ranks

        class Actor:
            def __init__(self, answer: Any) -> None:
                self.hold, self._answer = self, answer

            async def remote(self, _content: Any) -> Any:
                if isinstance(self._answer, Exception):
                    raise self._answer
                return self._answer

        def hold(answer: Any) -> str:
            return asyncio.run(ranks._FollowerContents(Actor(answer)).hold(Adapter("p", "a")))

        assert hold("/there/a") == "/there/a"
        with pytest.raises(APIError, match="upload it again") as refused:
            hold(JobFailure("unknown_adapter", "deleted; upload it again"))
        assert refused.value.code == "unknown_adapter"
        with pytest.raises(APIError) as lost:
            hold(ConnectionError("the actor died"))
        assert lost.value.code == calls.BLAMELESS, "the job has not begun, and runs elsewhere"

    def test_each_node_has_its_part_of_the_replicas_resources(self) -> None:
        from logsteer_server.cluster.ranks import group_nodes

        assert group_nodes(1, 1.0, 4) == {}
        assert group_nodes(2, 3.0, 4) == {
            "placement_group_bundles": [{"CPU": 3.0, "GPU": 4}] * 2,
            "placement_group_strategy": "STRICT_SPREAD",
        }
        assert group_nodes(3, 1.0, 0)["placement_group_bundles"] == [{"CPU": 1.0}] * 3

    def test_an_actor_has_the_gpus_of_its_node(self, tmp_path: Path) -> None:
        from logsteer_server.cluster import application

        model = {"id": "m", "path": "p", "tensor_parallel": 4, "nodes_per_replica": 2}
        (tmp_path / "models.yaml").write_text(yaml.safe_dump({"models": [model], "api_key": "k"}))
        path = tmp_path / "models.yaml"
        arguments = application.ClusterArguments(config=path, gpus=True, cpus=3)
        settings = application.read_settings(arguments)
        made = application._deploy_model(settings.models[0], settings, arguments)
        config = made._bound_deployment._replica_config
        assert config.ray_actor_options["num_gpus"] == 2
        assert config.placement_group_bundles == [{"CPU": 3.0, "GPU": 2}] * 2
        with pytest.raises(ConfigurationError, match="set cpus"):
            application.read_settings(arguments.model_copy(update={"cpus": 0}))

    def test_what_serve_says_is_told_with_what_to_do(self) -> None:
        from logsteer_server.cluster.absence import Absence, find_cause

        def read(message: str, nodes: int = 1) -> tuple[str, bool]:
            found = find_cause(message, nodes) or Absence("")
            return found.detail, found.may_pass

        waits = "1 replicas that have taken more than 30s to be scheduled."
        assert read(waits, 2)[0].startswith("there are no 2 nodes with room")
        assert read(waits)[0].startswith("no node has room")
        failed = "The deployment failed to start 1 times. Error:\nray::X\n  File\n"
        assert read(f"{failed}RuntimeError: node 1: why", 2) == ("node 1: why", False)
        assert read(f"{failed}a.b.GivenUpError: last: why\n") == ("last: why", True)
        told, may_pass = read("RayActorError('The actor died unexpectedly before it ...')")
        assert ("memory" in told, may_pass) == (True, True)
        assert find_cause("", 2) is None

    def test_views_are_sent_as_bytes(self) -> None:
        from logsteer_server.cluster.bodies import CarriedBodies

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            for body in (b"one", memoryview(b"two")):
                await send({"type": "http.response.body", "body": body})

        sent = []

        async def send(message: Any) -> None:
            sent.append(pickle.dumps(message))

        asyncio.run(CarriedBodies(app)({}, None, send))
        assert [pickle.loads(message)["body"] for message in sent] == [b"one", b"two"]

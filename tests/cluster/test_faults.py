"""What takes minutes on Ray: changes, silence, a head that is gone, an end by kill -9, vLLM."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from tests.cluster.conftest import Cluster, load, needs_all, running
from tests.conftest import vllm_model
from tests.faults.processes import wait_for
from tests.held import HOLD, held

pytestmark = needs_all


def test_a_silent_replica_is_replaced_and_costs_no_score(cluster: Cluster) -> None:
    cluster.wait_until_ready()
    with held(cluster.hold_file), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cluster.score, HOLD)
        (victim,) = wait_for(cluster.find_busy)
        with load(cluster) as found:
            victim.send_signal(signal.SIGSTOP)
            wait_for(lambda: not victim.is_running(), 90)
            cluster.hold_file.unlink()
            assert waiting.result(60).status_code == 200
    assert set(found.statuses) == {200}
    cluster.wait_until_ready()
    assert "was lost: it did not answer" in cluster.read_card()["detail"]


def test_a_change_under_load_costs_nothing_and_leaves_others_alone(cluster: Cluster) -> None:
    cluster.wait_until_ready()
    (other,) = cluster.find_replicas("other")
    before = cluster.find_replicas()
    third = cluster.other | {"id": "third"}
    cluster.write(cluster.fake | {"max_model_len": 64}, cluster.other, third)
    with load(cluster) as found:
        told = cluster.client.post("/admin/reload", params={"wait_s": 120}).json()
        assert (told["replaced"], told["added"]) == (["fake"], ["third"])
        assert (told["unchanged"], told["pending"], told["failed"]) == (["other"], [], {})
        psutil.wait_procs(before, 60)
    assert set(found.statuses) == {200}
    assert cluster.read_card()["context_length"] == 64
    assert not any(own.is_running() for own in before)
    assert other.is_running()
    assert cluster.score(7, model="third").status_code == 200
    cluster.write(cluster.fake, cluster.other)
    told = cluster.client.post("/admin/reload", params={"wait_s": 120}).json()
    assert told["removed"] == ["third"]
    assert cluster.score(7, model="third").status_code == 404


def test_a_change_that_cannot_be_made_is_told(cluster: Cluster) -> None:
    cluster.wait_until_ready()
    cluster.config_path.write_text("models: [{id: 5}]")
    assert cluster.client.post("/admin/reload").status_code == 422
    cluster.write(cluster.fake | {"path": "/nowhere/at/all"}, cluster.other)
    with load(cluster) as found:
        told = cluster.client.post("/admin/reload", params={"wait_s": 120}).json()
    assert list(told["failed"]) == ["fake"]
    assert set(found.statuses) == {200}
    cluster.write(cluster.fake, cluster.other)
    cluster.client.post("/admin/reload", params={"wait_s": 120})
    cluster.wait_until_ready()


def test_requests_do_without_the_head_and_a_kill_leaves_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.wait_until_ready()
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    with load(cluster) as found:
        (head,) = [own for own in family if own.name() == "gcs_server"]
        head.kill()
    assert set(found.statuses) == {200}
    cluster.client.close()
    cluster.process.kill()
    cluster.process.wait()
    # Ray's agents notice it last: about a minute later.
    _, left = psutil.wait_procs(family, 180)
    assert not [own for own in left if own.status() != psutil.STATUS_ZOMBIE]


def test_vllm_answers_as_on_one_machine(tmp_path: Path) -> None:
    model = vllm_model("demo")
    with running(Cluster(tmp_path, model)) as cluster:
        body = {"items": [{"context": "The capital of France is", "targets": [" Paris"]}]}
        answer = httpx.post(
            f"{cluster.url}/logprob", json=body, headers=cluster.client.headers, timeout=60
        )
        assert answer.json()["results"][0]["targets"][0]["prob"] > 0.5

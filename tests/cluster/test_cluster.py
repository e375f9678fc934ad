"""The service on Ray: it answers as one machine does, keeps its bounds, and outlives a replica.

What takes minutes waits for CLUSTER=all: changes, silence, a head that is gone, an end by kill -9.
"""

import contextlib
import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgpack
import psutil
import pytest

from tests.cluster.conftest import BODY_BYTES, Cluster, load, needs_all, read_title, running
from tests.conftest import vllm_model
from tests.faults.processes import wait_for
from tests.held import HOLD, held

ITEM = {"context_ids": [5, 7], "target_ids": [[6], [8]]}


def ask(cluster: Cluster, path: str, **body: Any) -> dict[str, Any]:
    """An answer without what differs from call to call."""
    answer = cluster.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return {name: value for name, value in answer.json().items() if name not in ("id", "timing")}


def check_problem(answer: httpx.Response, status: int, code: str) -> str:
    """What a problem document says; its request's id is that of the header."""
    document = answer.json()
    assert (answer.status_code, document["code"]) == (status, code), answer.text
    assert document["request_id"] == answer.headers["x-request-id"]
    return str(document["detail"])


class TestRouting:
    def test_a_request_goes_to_the_model_that_it_names(self, cluster: Cluster) -> None:
        scores = {
            model: ask(cluster, "/logprob", model=model, items=[ITEM])["results"][0]["targets"]
            for model in ("fake", "other")
        }
        assert scores["fake"][0]["logprob"] != scores["other"][0]["logprob"]
        packed = msgpack.packb({"items": [ITEM], "pad": b"x" * 100, "model": "other"})
        kind = {"Content-Type": "application/msgpack"}
        answer = cluster.client.post("/logprob", content=packed, headers=kind)
        assert answer.status_code in (200, 422), answer.text  # `pad` is no field of a request
        assert cluster.read_card("other")["id"] == "other"
        info = cluster.client.get("/tokenizer_info", params={"model": "other"})
        assert info.status_code == 200, info.text

    def test_a_variant_goes_to_its_model(self, cluster: Cluster) -> None:
        put = cluster.client.put("/variants/kind", json={"model": "other", "description": "plain"})
        assert put.status_code == 200, put.text
        found = ask(cluster, "/logprob", model="kind", items=[ITEM])
        assert found["results"] == ask(cluster, "/logprob", model="other", items=[ITEM])["results"]
        assert cluster.client.get("/models/kind").json()["variant_of"] == "other"
        assert cluster.client.get("/v1/models/kind").json()["parent"] == "other"
        assert [one["id"] for one in cluster.client.get("/v1/models").json()["data"]][-1] == "kind"
        for path in ("/health", "/ping", "/version", "/get_world_size?model=kind"):
            assert cluster.client.get(path).status_code == 200, path
        assert cluster.client.post("/reset_prefix_cache").json() == {"success": True}
        told = cluster.client.post("/logprob", json={"model": "other+no:1", "items": [ITEM]})
        check_problem(told, 404, "unknown_vector")
        assert cluster.client.delete("/variants/kind").status_code == 200

    def test_what_names_no_model_is_refused_as_on_one_machine(self, cluster: Cluster) -> None:
        post = cluster.client.post
        told = check_problem(post("/logprob", json={"items": [ITEM]}), 422, "invalid_request")
        assert told == "Several models are resident; name one of them as model: fake, other."
        body = {"model": "none", "items": [ITEM]}
        check_problem(post("/logprob", json=body), 404, "unknown_model")
        check_problem(cluster.client.get("/models/none"), 404, "unknown_model")
        for content in (b"{", b"[1]", b'{"model": 5}', b'{"model": "fake"', b"[" * 50_000):
            answer = post("/logprob", content=content, headers={"Content-Type": "application/json"})
            check_problem(answer, 422, "invalid_request")
        check_problem(cluster.client.get("/nowhere"), 404, "not_found")
        check_problem(cluster.client.get("/logprob"), 405, "method_not_allowed")

    def test_without_a_key_nothing_is_told(self, cluster: Cluster) -> None:
        for method, path in (("GET", "/models"), ("POST", "/logprob"), ("POST", "/admin/reload")):
            answer = httpx.request(method, cluster.url + path, timeout=60)
            check_problem(answer, 401, "unauthorized")

    def test_lists_are_of_all_replicas(self, cluster: Cluster) -> None:
        models = cluster.client.get("/models").json()["models"]
        assert [(own["id"], len(own["replicas"])) for own in models] == [("fake", 2), ("other", 1)]
        listed = cluster.client.get("/v1/models").json()["data"]
        assert [own["id"] for own in listed] == ["fake", "other"]
        page = cluster.client.get("/metrics").text
        assert len(set(re.findall(r'^logsteer_model_ready\{process="([\d.:]+)"', page, re.M))) == 3

    def test_a_model_is_drained_and_loaded_in_all_its_replicas(self, cluster: Cluster) -> None:
        post, wait = cluster.client.post, {"wait_s": 30}
        assert post("/models/fake/drain", params=wait).json()["state"] == "draining"
        for _ in range(4):
            check_problem(cluster.score(7), 503, "model_loading")
        assert cluster.score(7, model="other").status_code == 200
        card = post("/models/fake/load", params=wait).json()
        assert (card["state"], len(card["replicas"])) == ("ready", 2)
        assert {cluster.score(7).status_code for _ in range(4)} == {200}
        check_problem(post("/models/none/drain"), 404, "unknown_model")
        check_problem(post("/models/fake/load", params={"wait_s": -1}), 422, "invalid_request")

    def test_vectors_are_shared_and_streams_arrive(self, cluster: Cluster) -> None:
        import numpy as np
        from safetensors.numpy import save

        content = save({"0": np.ones(16, np.float32)})
        put = cluster.client.put("/vectors/one", content=iter([content[:50], content[50:]]))
        assert put.status_code == 200, put.text
        for _ in range(4):  # by either model's replicas
            assert cluster.client.get("/vectors/one").status_code == 200
        body = {"model": "fake", "prompts": ["The"], "max_tokens": 3, "stream": True}
        with cluster.client.stream("POST", "/generate", json=body) as answer:
            events = [line for line in answer.iter_lines() if line.startswith("event: ")]
        assert events == ["event: start", *["event: piece"] * 3, "event: result"]

    def test_who_hangs_up_ends_the_work(self, cluster: Cluster) -> None:
        body = {"model": "fake", "items": [{"context_ids": [HOLD], "target_ids": [[6]]}]}
        url, headers = f"{cluster.url}/logprob", cluster.client.headers
        with held(cluster.hold_file), ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, url, json=body, timeout=10, headers=headers)
            wait_for(cluster.find_busy)
            assert isinstance(asked.exception(), httpx.ReadTimeout)
            wait_for(lambda: not cluster.find_busy())


class TestBounds:
    def test_headers_and_bodies_are_bounded(self, cluster: Cluster) -> None:
        body = {"model": "fake", "items": [ITEM], "pad": "x" * BODY_BYTES}
        check_problem(cluster.client.post("/logprob", json=body), 413, "payload_too_large")
        upload = cluster.client.put("/vectors/big", content=iter([b"x" * 2**20] * 6))
        check_problem(upload, 413, "payload_too_large")

    def test_what_a_request_is_comes_through(self, cluster: Cluster) -> None:
        """Its id, long uploads, msgpack both ways, and when to try again."""
        import numpy as np
        from safetensors.numpy import load as load_tensors
        from safetensors.numpy import save

        answer = cluster.client.get("/models", headers={"X-Request-Id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]
        content = save({"0": np.arange(2**20, dtype=np.float32)})
        pieces = [content[start : start + 2**16] for start in range(0, len(content), 2**16)]
        assert cluster.client.put("/vectors/long", content=iter(pieces)).status_code == 200
        shown = cluster.client.get("/vectors/long/content", params={"format": "safetensors"})
        assert np.array_equal(*load_tensors(shown.content).values(), np.arange(2**20))
        kinds = {"Content-Type": "application/json", "Accept": "application/msgpack"}
        body = {"model": "fake", "items": [ITEM]}
        packed = cluster.client.post("/logprob", json=body, headers=kinds)
        assert msgpack.unpackb(packed.content)["model"] == "fake"


class TestLosses:
    def test_a_killed_replica_costs_what_it_had(self, cluster: Cluster) -> None:
        quiet = cluster.score(1).json()["results"]
        with ThreadPoolExecutor(1) as pool, held(cluster.hold_file):
            waiting = pool.submit(cluster.score, HOLD)
            (victim,) = wait_for(cluster.find_busy)
            with load(cluster, quiet) as found:
                victim.kill()
                cluster.hold_file.unlink()
                lost = waiting.result(60)
            told = check_problem(lost, 503, "engine_restarting")
        assert "died" in told
        assert lost.headers["retry-after"]
        assert set(found.codes) <= {"engine_restarting"}
        cluster.wait_until_ready()

    def test_requests_and_streams_end_with_engine_restarting(self, cluster: Cluster) -> None:
        (text,) = ask(cluster, "/detokenize", model="fake", token_ids=[[HOLD]])["texts"]
        pairs = [{"positive": text, "negative": "The"}]
        training = {"model": "fake", "name": "new", "layers": [0], "pairs": pairs}
        stream = {"model": "fake", "prompt_ids": [[HOLD]], "max_tokens": 2, "stream": True}
        with held(cluster.hold_file), ThreadPoolExecutor(2) as pool:
            trained = pool.submit(cluster.client.post, "/vectors/train", json=training)
            wait_for(lambda: len(cluster.find_busy()) == 1)
            streamed = pool.submit(cluster.client.post, "/generate", json=stream)
            wait_for(lambda: sum(cluster.count("requests_in_flight").values()) == 2)
            for own in cluster.find_replicas():
                own.kill()
            told = check_problem(trained.result(60), 503, "engine_restarting")
            *_, name, data = streamed.result(60).text.strip().splitlines()
        assert "was lost" in told
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["code"] == "engine_restarting"


# ------------------------------------------------------------------ what takes minutes


@needs_all
def test_a_silent_replica_is_replaced_and_costs_what_it_had(cluster: Cluster) -> None:
    cluster.wait_until_ready()
    quiet = cluster.score(1).json()["results"]
    with held(cluster.hold_file), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cluster.score, HOLD)
        (victim,) = wait_for(cluster.find_busy)
        with load(cluster, quiet) as found:
            victim.send_signal(signal.SIGSTOP)
            wait_for(lambda: not victim.is_running(), 90)
            cluster.hold_file.unlink()
            check_problem(waiting.result(60), 503, "engine_restarting")
    assert set(found.codes) <= {"engine_restarting", "model_loading"}
    cluster.wait_until_ready()


@needs_all
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


@needs_all
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


@needs_all
def test_requests_do_without_the_head_and_a_kill_leaves_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nodes=1)
    cluster.wait_until_ready()
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    (head,) = [own for own in family if own.name() == "gcs_server"]
    proxies = wait_for(lambda: len(own := cluster.find("ray::ProxyActor")) == 2 and own)
    head.kill()
    # The head's goes with it: later than what started it, and no longer below this process.
    wait_for(lambda: len([own for own in proxies if read_title(own)]) == 1, 60)
    cluster.client.close()  # its connection may have been to the head's proxy
    with load(cluster) as found:
        pass
    assert set(found.statuses) == {200}
    cluster.process.kill()
    cluster.process.wait()
    # Ray's agents notice it last: about a minute later.
    _, left = psutil.wait_procs(family, 180)
    assert not [own for own in left if own.status() != psutil.STATUS_ZOMBIE]


def check_ports(cluster: Cluster) -> None:
    """Nothing is open to other machines but Serve's ports, and nothing works without the token."""
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    listening = [
        (own, place.laddr)
        for own in family
        for place in own.net_connections("inet")
        if place.status == psutil.CONN_LISTEN
    ]
    local = ("127.0.0.1", "::ffff:127.0.0.1", "::1")
    is_open = [(own, at) for own, at in listening if at.ip not in local]
    # Serve's own, of each of its actors of ours.
    assert len(is_open) <= len(cluster.find("ray::ServeReplica"))
    refused = 0
    for port in {at.port for _, at in listening}:
        for path in ("/api/jobs/", "/api/job_agent/jobs/"):
            try:
                job = {"entrypoint": "touch /dev/null"}
                answer = httpx.post(f"http://127.0.0.1:{port}{path}", json=job, timeout=5)
            except httpx.TransportError:
                continue  # no HTTP
            assert answer.status_code in (401, 403, 404, 405), (port, answer.text)
            refused += answer.status_code in (401, 403)
    assert refused, "the job API is there, and asks for the token"
    for _, at in is_open:
        with grpc.insecure_channel(f"127.0.0.1:{at.port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=10)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


@needs_all
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_end_has_a_deadline_whatever_ended_before(tmp_path: Path, number: int) -> None:
    """A service manager's SIGTERM reaches all processes at once, and Ray's may end first."""
    cluster = Cluster(tmp_path, nodes=0)
    cluster.wait_until_ready()
    check_ports(cluster)
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    for own in family if number == signal.SIGTERM else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            own.terminate()
    cluster.process.send_signal(number)
    ended = 0 if number == signal.SIGTERM else -number
    assert cluster.process.wait(90) == ended, "drain_s and 30 s are its bound"
    # After a kill, Ray's agents notice it last: about a minute later.
    _, left = psutil.wait_procs(family, 180)
    assert not left, [read_title(own) for own in left]
    cluster.client.close()


@needs_all
def test_vllm_answers_as_on_one_machine(tmp_path: Path) -> None:
    model = vllm_model("demo")
    with running(Cluster(tmp_path, model, nodes=0)) as cluster:
        body = {"items": [{"context": "The capital of France is", "targets": [" Paris"]}]}
        answer = httpx.post(
            f"{cluster.url}/logprob", json=body, headers=cluster.client.headers, timeout=60
        )
        assert answer.json()["results"][0]["targets"][0]["prob"] > 0.5

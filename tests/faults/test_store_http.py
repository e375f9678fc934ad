"""Stores over HTTP under faults: uploads that do not end, floods of one key, slow readers.

And two servers, each with a directory of its own, that share one store behind a URL.
"""

import concurrent.futures
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import obstore
import pytest
from fastapi.testclient import TestClient
from safetensors.numpy import save

from logsteer_server.app import create_app
from logsteer_server.settings import Settings
from logsteer_server.stores import objects as objects_module
from logsteer_server.stores import upkeep
from logsteer_server.stores.layer_vectors import LayerVectors
from logsteer_server.stores.objects import Objects
from tests.buckets import HOST, Bucket, open_bucket
from tests.conftest import Server, ServerFactory, fake_model
from tests.faults.keys import add_key, connect, serve
from tests.faults.processes import (
    forget_peak,
    open_request,
    read_memory,
    read_metric,
    wait_for,
)

VECTOR = LayerVectors({1: np.arange(1, 17)}).content
ROOM = 4096
MIB = 2**20
LARGE = 32 * MIB
"""Bytes of a vector's numbers, where memory is looked at."""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Server, httpx.Client]]:
    """A server where a key may store little, and its client."""
    token = add_key(tmp_path / "keys.json", "ann", "score", "write")
    config = {
        "models": [fake_model()], "key_file": str(tmp_path / "keys.json"), "max_key_bytes": ROOM,
        "store_directory": str(tmp_path / "store"),
    }  # fmt: skip
    with serve(config, tmp_path / "server") as server, connect(server, token) as http:
        yield server, http


def test_a_key_stores_no_more_than_its_quota_whatever_is_begun(
    small: tuple[Server, httpx.Client], tmp_path: Path
) -> None:
    server, http = small
    refused = http.put("/vectors/b", content=bytes(ROOM + 1))
    assert (refused.status_code, "max_key_bytes" in refused.text) == (413, True), refused.text
    assert http.get("/vectors").json()["max_bytes"] == ROOM
    first, second = (LayerVectors({1: np.full(700, n)}).content for n in (1, 2))  # 2.8 of 4 KiB
    line, key = "PUT /vectors/first", f"Authorization: {http.headers['authorization']}"
    with open_request(server, line, first[:100], len(first), key) as begun:
        wait_for(lambda: list((tmp_path / "store" / "uploads").glob("*.part")))
        assert http.put("/vectors/second", content=second).status_code == 200
        begun.sendall(first[100:])
        assert begun.recv(12) == b"HTTP/1.1 413"
    assert [one["name"] for one in http.get("/vectors").json()["vectors"]] == ["second"]


@pytest.fixture(scope="module")
def large(start_server: ServerFactory) -> Server:
    """A server with a vector of 32 MiB, and a small one."""
    model = fake_model(reads_files=True)  # so that it looks at adapters and overrides
    server = start_server({"models": [model], "max_pending_bytes": 768 * MIB})
    numbers = np.random.default_rng(1).normal(size=(LARGE // 4 // 2**20, 2**20))
    content = LayerVectors(dict(enumerate(numbers, start=1))).content
    for name, data in (("large", content), ("small", VECTOR)):
        answer = httpx.put(f"{server.url}/vectors/{name}", content=data, timeout=120)
        assert answer.status_code == 200, answer.text
    return server


def test_a_sum_of_many_parts_takes_the_room_of_three(large: Server) -> None:
    """64 parts took 64 vectors' room, and more: 5.6 GB."""
    parts = [{"name": "large", "weight": 1.0 + n} for n in range(64)]
    forget_peak(large)
    before = read_memory(large, "VmRSS")
    url = f"{large.url}/vectors/sum/combine"
    answer = httpx.post(url, json={"vectors": parts, "overwrite": True}, timeout=300)
    assert answer.status_code == 200, answer.text
    assert read_memory(large, "VmHWM") - before < 5 * LARGE
    too_large = {"vectors": parts, "orthogonal_to": ["large"] * 64, "overwrite": True}
    answer = httpx.post(url, json=too_large, timeout=60)
    assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")


@pytest.mark.full
def test_many_sums_of_one_caller_keep_nobody_waiting(large: Server) -> None:
    """16 of them left `GET /vectors` of another without an answer for 300 s."""
    parts = [{"name": "large"}] * 64

    def combine(number: int) -> int:
        url = f"{large.url}/vectors/flood{number}/combine"
        headers = {"X-Request-Timeout": "5"}
        try:
            body = {"vectors": parts}
            return httpx.post(url, json=body, headers=headers, timeout=120).status_code
        except httpx.ReadTimeout:
            return 0

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(combine, number) for number in range(16)]
        wait_for(lambda: read_metric(large, "requests_in_flight") > 16)
        assert httpx.get(f"{large.url}/vectors", timeout=60).status_code == 200
        assert not all(call.done() for call in calls), "it was answered after them"
        statuses = {call.result() for call in calls}
    assert statuses <= {200, 429, 504}
    assert statuses & {429, 504}, "all were done at once: none had to wait"


@pytest.mark.full
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_slow_readers_of_a_file_hold_no_memory(large: Server, form: str) -> None:
    """Eight of them held 5.9 GB."""
    before = read_memory(large, "VmRSS")
    with ExitStack() as stack:
        streams = [
            stack.enter_context(
                httpx.stream("GET", f"{large.url}/vectors/large/content?format={form}", timeout=120)
            )
            for _ in range(8)
        ]
        heads = [next(stream.iter_raw(1024)) for stream in streams]
        assert len({head[:64] for head in heads}) == 1
        assert int(streams[0].headers["content-length"]) > LARGE
        assert read_memory(large, "VmRSS") - before < 4 * LARGE


def test_json_that_is_nested_deeply_is_refused(large: Server) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    header = len(deep).to_bytes(8, "little") + deep
    config = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6}).encode()
    weights = save({"a": np.ones(3, np.float32)})
    answers: list[Any] = [
        httpx.put(f"{large.url}/vectors/deep?format=safetensors", content=header),
        httpx.put(f"{large.url}/overrides/deep", content=header),
    ]
    forms = [
        {"config": deep, "weights": weights}, {"config": config, "weights": header},
        {"config": config[:-1] + b', "x": ' + deep + b"}", "weights": weights},
    ]  # fmt: skip
    answers += [httpx.put(f"{large.url}/adapters/deep", files=files) for files in forms]
    for answer in answers:
        assert answer.status_code == 422, answer.text


# ------------------------------------------------------------------ a shared store


ITEM = {"context_ids": [5, 7], "target_ids": [[6]]}
PROBED = {"items": [ITEM], "probes": [{"name": "north"}]}
"""Uses a vector: the fake engine cannot be steered, but read."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(objects_module, "REST_S", 0.1)
    monkeypatch.setattr(upkeep, "PROBE_EVERY_S", 0.1)
    with open_bucket() as bucket:
        yield bucket


@pytest.fixture
def pair(bucket: Bucket, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The two servers, whose engines take adapters and overrides; settings by parameter."""
    with ExitStack() as stack:
        found = []
        for name in "ab":
            settings = Settings.model_validate(
                {
                    "models": [fake_model(reads_files=True)],
                    "store_directory": tmp_path / name / "own",
                    "cache_bytes": 0,
                }
                | bucket.settings
                | getattr(request, "param", {})
            )
            client = TestClient(create_app(settings), base_url="http://localhost")
            found.append(stack.enter_context(client))
        for client in found:
            wait_for(lambda client=client: client.get("/readyz").status_code == 200, 60)
        yield found


def vector(seed: int) -> bytes:
    return LayerVectors({1: np.arange(seed, seed + 16)}).content


def put_adapter(client: httpx.Client, name: str, seed: int, **query: str) -> Any:
    rows = np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    weights = save({f"{prefix}_A.weight": rows, f"{prefix}_B.weight": rows.T.copy()})
    config = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj"], "use_rslora": False, "modules_to_save": None,
    }  # fmt: skip
    files = {"config": json.dumps(config).encode(), "weights": weights}
    answer = client.put(f"/adapters/{name}", files=files, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def score(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/logprob", json={"items": [ITEM], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def read_logprob(found: dict[str, Any]) -> float:
    return float(found["results"][0]["targets"][0]["logprob"])


@pytest.mark.full
def test_a_store_that_is_away_fails_what_needs_it_and_nothing_else(
    pair: list[TestClient], bucket: Bucket
) -> None:
    first, second = pair
    first.put("/vectors/north", content=vector(1))
    put_adapter(first, "lora", 1)
    expected = score(first, adapter="lora")
    assert second.get("/readyz").json()["store"] == "answers"
    bucket.stop()
    wait_for(lambda: second.get("/readyz").json()["store"] == "away", 60)
    assert second.get("/readyz").status_code == 200
    assert read_logprob(score(second)) == read_logprob(score(first))
    for answer in (
        second.post("/logprob", json=PROBED),
        second.post("/logprob", json={"items": [ITEM], "adapter": "lora"}),
        second.put("/vectors/south", content=vector(2)),
        second.get("/vectors"),
        second.delete("/vectors/north"),
    ):
        problem = answer.json()
        assert (answer.status_code, problem["code"], problem["retryable"]) == (
            429, "overloaded", True,
        ), problem  # fmt: skip
        assert "Retry-After" in answer.headers
    bucket.start()
    wait_for(lambda: second.get("/readyz").json()["store"] == "answers", 60)
    assert read_logprob(score(second, adapter="lora")) == read_logprob(expected)


@pytest.mark.full
def test_a_store_that_hangs_stops_nobody_who_needs_none(
    pair: list[TestClient], bucket: Bucket
) -> None:
    first, _ = pair
    bucket.stop()
    # It takes calls, and says nothing.
    with socket.create_server((HOST, bucket.port), backlog=128), ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(first.get, "/vectors/other") for _ in range(8)]
        score(first)
        assert not any(own.done() for own in waiting), "nobody was waiting meanwhile"
        assert {own.result().status_code for own in waiting} == {429}
    bucket.start()


@pytest.mark.full
@pytest.mark.parametrize("pair", [{"store_grace_s": 1.0}], indirect=True)
def test_what_has_no_name_goes_by_itself(pair: list[TestClient], bucket: Bucket) -> None:
    first, second = pair
    first.put("/vectors/north", content=vector(1))
    objects = Objects(
        Path("unused"), bucket.settings["store_url"], bucket.settings["store_options"]
    )
    left = f"vectors/contents/{'0' * 64}-7.safetensors"
    store = objects._store
    obstore.put(store, left, b"of a server that was killed")
    wait_for(lambda: left not in [entry.place for entry in objects.list("vectors")], 60)
    assert second.post("/logprob", json=PROBED).status_code == 200

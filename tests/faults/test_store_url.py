"""Two servers, each with a directory of its own, that share one store behind a URL."""

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
from tests.conftest import fake_model
from tests.faults.processes import wait_for

pytestmark = pytest.mark.full

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


def test_what_one_stores_the_other_uses_replaces_and_deletes(pair: list[TestClient]) -> None:
    first, second = pair
    for turn, (writer, reader) in enumerate([(first, second), (second, first)]):
        again = {"overwrite": "true"}
        card = writer.put("/vectors/north", content=vector(turn + 1), params=again).json()
        assert reader.post("/logprob", json=PROBED).status_code == 200
        found = reader.get("/vectors/north/content")
        assert (found.headers["etag"], found.content) == (f'"{card["sha256"]}"', vector(turn + 1))
        adapter = put_adapter(writer, "lora", turn, **again)
        used = score(reader, adapter="lora")
        assert used["adapter"] == {"name": "lora", "sha256": adapter["sha256"]}
        assert read_logprob(used) == read_logprob(score(writer, adapter="lora"))
        assert read_logprob(used) != read_logprob(score(reader))
    direction = save({"w": np.ones(3, np.float32)})
    override = first.put("/overrides/step", content=direction).json()
    told = score(second, override={"name": "step", "eta": 1e-3})["override"]
    assert told["sha256"] == override["sha256"]
    listed = [client.get("/adapters").json() for client in pair]
    assert listed[0] == listed[1]
    assert second.delete("/adapters/lora").status_code == 200
    answer = first.post("/logprob", json={"items": [ITEM], "adapter": "lora"})
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_adapter")


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


def test_an_adapter_that_does_not_fit_leaves_nothing(
    pair: list[TestClient], tmp_path: Path
) -> None:
    first, _ = pair
    weights = save({"a": np.ones(3)})
    answer = first.put(
        "/adapters/lora", files={"config": b'{"peft_type": "LORA", "r": 4}', "weights": weights}
    )
    assert answer.status_code == 422, answer.text
    assert first.get("/adapters").json()["bytes"] == 0
    assert list((tmp_path / "a" / "own" / "uploads").iterdir()) == []

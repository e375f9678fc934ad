"""Two servers, each with a directory of its own, that share one store behind a URL."""

import concurrent.futures
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from safetensors.numpy import save

from logsteer_server.app import create_app
from logsteer_server.settings import Settings
from logsteer_server.stores import bucket as bucket_module
from logsteer_server.stores import bucket_upkeep
from logsteer_server.stores.layer_vectors import LayerVectors
from tests.conftest import fake_model
from tests.faults.processes import wait_for
from tests.server.shared_store.object_store import ObjectStore

URL = "objects://bucket/logsteer"
ITEM = {"context_ids": [5, 7], "target_ids": [[6]]}
PROBED = {"items": [ITEM], "probes": [{"name": "north"}]}
"""Uses a vector: the fake engine cannot be steered, but read."""


@pytest.fixture(autouse=True)
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ObjectStore.forget()
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(bucket_module, "REST_S", 0.1)
    monkeypatch.setattr(bucket_upkeep, "PROBE_EVERY_S", 0.0)
    yield
    ObjectStore.forget()


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[TestClient]]:
    """The two servers, whose engines take adapters and overrides; settings by parameter."""
    with ExitStack() as stack:
        found = []
        for name in "ab":
            settings = Settings.model_validate(
                {
                    "models": [fake_model(reads_files=True)],
                    "directory": tmp_path / name,
                    "store_directory": "own",
                    "store_url": URL,
                    "cache_bytes": 0,
                }
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
    found: dict[str, Any] = answer.json()
    return found


def read_logprob(found: dict[str, Any]) -> float:
    return float(found["results"][0]["targets"][0]["logprob"])


def test_what_one_stores_the_other_uses_replaces_and_deletes(pair: list[TestClient]) -> None:
    first, second = pair
    for turn, (writer, reader) in enumerate([(first, second), (second, first)]):
        card = writer.put("/vectors/north", content=vector(turn + 1)).json()
        assert reader.post("/logprob", json=PROBED).status_code == 200
        found = reader.get("/vectors/north/content")
        assert (found.headers["etag"], found.content) == (f'"{card["sha256"]}"', vector(turn + 1))
        adapter = put_adapter(writer, "lora", turn)
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


def test_a_store_that_is_away_fails_what_needs_it_and_nothing_else(pair: list[TestClient]) -> None:
    first, second = pair
    first.put("/vectors/north", content=vector(1))
    put_adapter(first, "lora", 1)
    expected = score(first, adapter="lora")
    assert first.post("/logprob", json=PROBED).status_code == 200
    assert second.get("/readyz").json()["store"] == "answers"
    ObjectStore.faults.away = True
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
    # The first one knows the names, and has the contents.
    assert read_logprob(score(first, adapter="lora")) == read_logprob(expected)
    assert first.post("/logprob", json=PROBED).status_code == 200
    ObjectStore.faults.away = False
    wait_for(lambda: second.get("/readyz").json()["store"] == "answers", 60)
    assert read_logprob(score(second, adapter="lora")) == read_logprob(expected)


@pytest.mark.parametrize("pair", [{"store_timeout_s": 3.0, "store_retries": 0}], indirect=True)
def test_a_store_that_hangs_stops_nobody_who_needs_none(pair: list[TestClient]) -> None:
    first, _ = pair
    first.put("/vectors/north", content=vector(1))
    ObjectStore.faults.hanging_s = 60.0
    for _ in range(3):
        calls = len(ObjectStore.faults.calls)
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            waiting = [pool.submit(first.get, "/vectors/other") for _ in range(16)]
            wait_for(lambda: len(ObjectStore.faults.calls) > calls)  # noqa: B023
            score(first)
            was_first = not any(own.done() for own in waiting)
            assert {own.result().status_code for own in waiting} == {429}
        if was_first:  # else the machine may have been busy for longer than they wait
            break
    assert was_first, "it was answered before those were"


@pytest.mark.parametrize("pair", [{"store_grace_s": 1.0}], indirect=True)
def test_waste_goes_by_itself(pair: list[TestClient]) -> None:
    first, second = pair
    first.put("/vectors/north", content=vector(1))
    waste = f"bucket/logsteer/vectors/contents/{'0' * 64}/{'0' * 28}.safetensors"
    ObjectStore.files = {**ObjectStore.files, waste: b"of a server that was killed"}
    wait_for(lambda: waste not in ObjectStore.files, 60)
    assert second.post("/logprob", json=PROBED).status_code == 200


def test_an_adapter_that_does_not_fit_leaves_nothing(
    pair: list[TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = pair
    before = dict(ObjectStore.files)
    ObjectStore.faults.turns = 9  # so that the engine's machine cannot fetch it
    answer = first.put(
        "/adapters/lora",
        files={"config": b'{"peft_type": "LORA", "r": 4}', "weights": save({"a": np.ones(3)})},
    )
    assert answer.status_code == 422, answer.text
    ObjectStore.faults.turns = 0
    assert ObjectStore.files == before

"""Adapters and vectors that one server stores behind a URL, on the vLLM of another."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest

from logsteer import Client
from logsteer.errors import NotFoundError
from logsteer_server.stores.layer_vectors import LayerVectors
from tests.buckets import open_bucket
from tests.conftest import DEMO_MODEL, ServerFactory, fake_model, vllm_model
from tests.contract.directions import load_model, read_logprobs
from tests.contract.lora import merge_adapter, write_adapter
from tests.contract.tlens_cases import draw_ids

pytestmark = pytest.mark.engine

PER_TOKEN = 1e-4
CONTEXT = draw_ids(np.random.default_rng(1), 40).tolist()
TARGET = draw_ids(np.random.default_rng(2), 7).tolist()
IDS = np.array(CONTEXT + TARGET, np.int32)
ITEM = {"context_ids": CONTEXT, "target_ids": [TARGET]}
WIDTH = load_model(DEMO_MODEL).config.hidden_size


@pytest.fixture(scope="module")
def pair(start_server: ServerFactory) -> Iterator[list[Client]]:
    """A server that takes uploads, and one with vLLM; each has a directory of its own."""
    models = [
        fake_model("demo", reads_files=True),
        vllm_model("demo", adapter_slots=2, adapter_rank=8),
    ]
    with open_bucket() as bucket, ExitStack() as stack:
        shared = {**bucket.settings, "store_directory": "own"}
        urls = [start_server({"models": [model], **shared}).url for model in models]
        yield [stack.enter_context(Client(url, max_retries=0)) for url in urls]


def score(client: Client, **options: object) -> np.ndarray:
    target = client.logprob([ITEM], **options).results[0].targets[0]  # type: ignore[arg-type]
    return np.array(target.logprobs)


def test_an_adapter_of_another_server_changes_the_model(pair: list[Client], tmp_path: Path) -> None:
    uploader, scorer = pair
    for seed in range(3):  # of two slots one is given up
        directory = write_adapter(tmp_path / f"a{seed}", seed=seed)
        card = uploader.adapters.put("lora", directory, overwrite=True)
        merged = read_logprobs(merge_adapter(load_model(DEMO_MODEL), directory), IDS)
        answer = scorer.logprob([ITEM], adapter="lora")
        assert answer.adapter.sha256 == card.sha256
        found = np.array(answer.results[0].targets[0].logprobs)
        np.testing.assert_allclose(found, merged[len(CONTEXT) - 1 :], atol=PER_TOKEN)
    uploader.adapters.delete("lora")
    with pytest.raises(NotFoundError, match="none is there yet"):
        score(scorer, adapter="lora")


def test_an_adapter_goes_up_where_vllm_checks_it(pair: list[Client], tmp_path: Path) -> None:
    _, scorer = pair
    scorer.adapters.put("own", write_adapter(tmp_path / "own", seed=7))
    assert np.abs(score(scorer, adapter="own") - score(scorer)).max() > 0.01
    too_large = write_adapter(tmp_path / "large", seed=1, rank=64)
    files = {
        "config": (too_large / "adapter_config.json").read_bytes(),
        "weights": (too_large / "adapter_model.safetensors").read_bytes(),
    }
    answer = httpx.put(f"{scorer.base_url}/adapters/large", files=files, timeout=60)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_adapter"), answer.text
    assert [card.name for card in scorer.adapters.list().adapters] == ["own"]


def test_a_receipt_names_the_content_that_another_server_stored(pair: list[Client]) -> None:
    uploader, scorer = pair
    plain, seen = score(scorer), []
    for seed in range(2):
        numbers = np.random.default_rng(seed).normal(size=WIDTH)
        card = uploader.vectors.put("north", LayerVectors({1: numbers}).content, overwrite=True)
        steering = {"vectors": [{"name": "north", "scale": 2.0}]}
        answer = scorer.logprob([ITEM], steering=steering)
        assert [own.sha256 for own in answer.steering.vectors] == [card.sha256]
        seen.append(np.array(answer.results[0].targets[0].logprobs))
        by_content = {"vectors": [{"sha256": card.sha256, "scale": 2.0}]}
        np.testing.assert_allclose(score(scorer, steering=by_content), seen[-1], atol=PER_TOKEN)
    assert np.abs(seen[0] - plain).max() > 0.01
    assert np.abs(seen[0] - seen[1]).max() > 0.01

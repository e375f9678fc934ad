"""LongRoPE on real engines: texts up to the original length are turned by the short factors."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from logsteer import APIError, Client
from tests.conftest import VOCAB_SIZE, Server

pytestmark = pytest.mark.engine

ORIGINAL = 64
PER_TOKEN = 1e-4


@pytest.fixture
def client(longrope_server: Server) -> Iterator[Client]:
    with Client(longrope_server.url, max_retries=0, timeout=300) as found:
        yield found


@pytest.mark.parametrize(("model", "limit"), [("vllm", ORIGINAL - 1), ("tlens", ORIGINAL)])
def test_the_short_factors_hold_up_to_the_original_length(
    client: Client, longrope_server: Server, model: str, limit: int
) -> None:
    card = client.model(model)
    assert card.context_length == limit
    ids = np.random.default_rng(0).integers(10, VOCAB_SIZE, ORIGINAL + 1).tolist()
    items = [
        {"context_ids": ids[:start], "target_ids": [ids[start : start + count]]}
        for start, count in ((1, limit), (3, 9), (limit - 5, 6))
    ]
    checkpoint = longrope_server.directory / "phi3"
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for item, scored in zip(items, client.logprob(items, model=model).results, strict=True):
        found = np.array(scored.targets[0].logprobs)
        (target,) = item["target_ids"]
        read = torch.tensor([[*item["context_ids"], *target[:-1]]])
        with torch.no_grad():
            rows = reference(read).logits[0, -len(target) :].log_softmax(-1)
        wanted = rows[torch.arange(len(target)), torch.tensor(target)].numpy()
        assert np.abs(found - wanted).max() < PER_TOKEN
    with pytest.raises(APIError, match=f"this model reads {limit}"):
        client.logprob([{"context_ids": ids * 2, "target_ids": [[5]]}], model=model)

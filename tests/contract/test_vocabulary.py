"""`vocabulary` of `/logprob`: whole rows of log-probabilities on both engines, a file or JSON."""

import json
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load

from logsteer import APIError, Client
from tests.contract.agreement import PER_TOKEN
from tests.contract.conftest import clients_of

pytestmark = pytest.mark.engine

CONTEXT = "The capital of France is"
ITEM = {"context": CONTEXT, "targets": [" Paris", " a big town", " Madrid"]}


client = clients_of("vllm", "tlens")


def test_rows_of_the_vocabulary_are_those_of_transformers(
    client: Client, reference: Any, tokenizer: Any
) -> None:
    """Steered or not; single tokens, which share a row, and several."""
    width = client.model("demo").hidden_size
    vector = {"data": {"2": [0.3, -0.3] * (width // 2)}}
    context = tokenizer(CONTEXT)["input_ids"]
    plain = {}
    for steering in (None, {"vectors": [vector]}):
        body = {"items": [ITEM], "model": "demo", "vocabulary": True, "steering": steering}
        accept = {"Accept": "application/vnd.safetensors"}
        answer = httpx.post(f"{client.base_url}/logprob", json=body, headers=accept, timeout=100)
        file = load(answer.content)
        header = int.from_bytes(answer.content[:8], "little")
        about = json.loads(answer.content[8 : 8 + header])["__metadata__"]["answer"]
        (result,) = json.loads(about)["results"]
        starts = file["row_starts"].tolist()
        assert len(starts) == 1 + len(ITEM["targets"])
        for target, begin, end in zip(result["targets"], starts, starts[1:], strict=False):
            rows_TV = file["vocabulary_logprobs"][begin:end]
            ids = target["token_ids"]
            own = rows_TV[np.arange(len(ids)), ids]
            assert own == pytest.approx(np.array(target["logprobs"]), abs=PER_TOKEN)
            if steering is None:
                with torch.no_grad():
                    logits_TV = reference(torch.tensor([[*context, *ids]])).logits[0]
                expected_TV = logits_TV[len(context) - 1 : -1].log_softmax(-1).numpy()
                assert np.abs(rows_TV - expected_TV).max() < PER_TOKEN
                plain[target["target"]] = rows_TV
            else:
                assert np.abs(rows_TV - plain[target["target"]]).max() > 0.01
                assert np.exp(rows_TV.astype(float)).sum(1) == pytest.approx(1, abs=1e-4)


def test_json_has_them_too_and_what_does_not_fit_is_refused(client: Client) -> None:
    found = client.logprob([ITEM], vocabulary=True).results[0].targets[1]
    assert [
        row[token] for row, token in zip(found.vocabulary_logprobs, found.token_ids, strict=True)
    ] == pytest.approx(found.logprobs, abs=PER_TOKEN)
    with pytest.raises(APIError, match=r"arrays would take about .* max_activation_bytes"):
        client.logprob([ITEM] * 2000, vocabulary=True)
    with pytest.raises(APIError, match="space: as_given"):
        client.logprob([ITEM], vocabulary=True, space="both")
    accept = {"Accept": "application/vnd.safetensors"}
    body = {"items": [ITEM], "model": "demo"}
    answer = httpx.post(f"{client.base_url}/logprob", json=body, headers=accept, timeout=100)
    assert (answer.status_code, answer.json()["param"]) == (422, "vocabulary")

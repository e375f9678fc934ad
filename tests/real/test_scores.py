"""Scores of SmolLM2 on both engines, held against transformers in float64."""

import functools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from logsteer import Client
from tests.trained import convert_smollm2, needs_smollm2

pytestmark = [pytest.mark.engine, needs_smollm2]

TEXTS = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "When Mary and John went to the store, John gave a drink to Mary.",
    "Water boils at one hundred degrees; ice melts at zero. 水は百度で沸騰する。",
    "def add(a, b):\n    return a + b\n\n\nprint(add(2, 3))  # prints 5\n",
]


@functools.cache
def score_in_transformers(dtype: torch.dtype) -> NDArray[np.float64]:
    """Return the log-probabilities of the texts' tokens after the first, one after another."""
    path = convert_smollm2()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    scores = []
    with torch.inference_mode():
        for text in TEXTS:
            ids = torch.tensor(tokenizer(text).input_ids)
            log_p_TV = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
            scores.append(log_p_TV[range(len(ids) - 1), ids[1:]].numpy())
    return np.concatenate(scores)


@pytest.mark.parametrize("engine", ["vllm", "tlens"])
def test_scores_are_those_of_float64(real_client: Client, engine: str) -> None:
    exact = score_in_transformers(torch.float64)
    answer = real_client.perplexity(TEXTS, tokens=True, model=engine)
    assert answer.provenance.dequantised_from == ("Q4_1" if engine == "tlens" else None)
    scores = [value for text in answer.results if text.tokens for value in text.tokens.logprobs]
    own = np.abs(np.array(scores) - exact)
    theirs = np.abs(score_in_transformers(torch.float32) - exact)
    print(
        f"{engine}: {own.max():.1e} nats a token, {own.mean():.1e} on average; "
        f"transformers {theirs.max():.1e}, {theirs.mean():.1e}"
    )
    assert own.max() < 1e-4

"""Requests at the edges of the schemas: `INPUTS=5000` sends so many to each engine."""

import os
from typing import Any

import httpx
import pytest

from tests.conftest import Server
from tests.faults.edge_values import attack

pytestmark = pytest.mark.engine

EXAMPLES = int(os.environ.get("INPUTS", "100"))
PROMPT = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 2}
ITEM = {"context_ids": [1, 5, 9, 30], "target_ids": [[7, 8]]}
ONES = {"data": {"1": [1.0] * 128}}
KILLERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", PROMPT | {"logprobs": 21}),
    ("/v1/completions", PROMPT | {"logprobs": 1000, "echo": True}),
    ("/v1/completions", PROMPT | {"top_k": 2**63}),
    ("/generate", {"model": "demo", "prompts": ["a"], "top_k": 2**63}),
    ("/generate", {"model": "demo", "prompts": ["a"], "max_tokens": 2**63}),
    ("/logprob", {"model": "demo", "items": [ITEM], "policy": {"top_k": 2**63}}),
    ("/logprob", {
        "model": "demo", "items": [ITEM],
        "steering": {"vectors": [ONES], "positions": {"slices": [[0, 2**63]]}},
    }),
    ("/steer", {
        "model": "demo", "prompts": ["a"],
        "steering": {"vectors": [ONES | {"op": "clamp", "params": {"min": 1e308}}]},
    }),
    ("/steer", {
        "model": "demo", "prompts": ["Once upon a time"],
        "steering": {"vectors": [ONES | {"op": "clamp", "params": {"min": 1e18}}]},
    }),
    ("/steer", {
        "model": "demo", "prompts": ["Once upon a time"],
        "steering": {"vectors": [ONES | {"scale": 1e18, "unit": "residual_norm"}] * 2},
    }),
]  # fmt: skip
"""Requests that ended an engine, or poisoned it."""


def test_no_request_that_the_schemas_allow_ends_vllm(vllm_server: Server) -> None:
    kill(vllm_server)
    check(vllm_server)


def test_no_request_that_the_schemas_allow_ends_transformer_lens(tlens_server: Server) -> None:
    kill(tlens_server)
    check(tlens_server)


def kill(server: Server) -> None:
    """Send what ended engines; whatever is asked for that there is comes back."""
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for path, body in KILLERS:
            answer = client.post(path, json=body)
            assert answer.status_code in (200, 400, 422), (path, body, answer.text)
            if wanted := body.get("logprobs"):
                tops = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
                assert len(tops[-1]) > 0.8 * wanted  # several tokens may have one text
        overflows = client.post(*KILLERS[-1][:1], json=KILLERS[-1][1]).json()
        assert overflows["code"] == "non_finite"


def check(server: Server) -> None:
    found = attack(server.url, EXAMPLES, "demo")
    answered = sum(count for key, count in found.items() if key.endswith(" 200"))
    assert answered > EXAMPLES / 3, "most requests come no further than the schemas"

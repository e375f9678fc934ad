"""Bad input on every engine: a problem document that says what to do, and never a 500."""

import json
from typing import Any

import httpx
import pytest

from logsteer import Client
from logsteer.schemas import Problem
from tests.conftest import VOCAB_SIZE

ITEM = {"context": "Once upon", "targets": [" a"]}
HUGE = 10 * 2**20


def post(client: Client, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        client.base_url + path,
        content=content,
        headers={"content-type": "application/json"} | headers,
        timeout=120,
    )


def with_item(**fields: Any) -> dict[str, Any]:
    return {"items": [fields]}


CASES: list[tuple[str, str, Any, int, str, str]] = [
    ("no items", "/logprob", {"items": []}, 422, "invalid_request", "items"),
    ("no targets", "/logprob", with_item(context="a", targets=[]), 422, "invalid_request", "targets"),
    ("missing targets", "/logprob", with_item(context="a"), 422, "invalid_request", "takes targets"),
    ("empty target", "/logprob", with_item(context="a", targets=[""]), 422, "invalid_request", "empty"),
    ("empty ids", "/logprob", with_item(context_ids=[1], target_ids=[[]]), 422, "invalid_request", "empty"),
    ("two contexts", "/logprob", with_item(context="a", context_ids=[1], targets=["b"]), 422, "invalid_request", "exactly one"),
    ("text after ids", "/logprob", with_item(context_ids=[1], targets=["b"]), 422, "invalid_request", "target_ids"),
    ("id too large", "/logprob", with_item(context_ids=[1], target_ids=[[VOCAB_SIZE]]), 422, "invalid_request", "vocabulary"),
    ("id of a context too large", "/logprob", with_item(context_ids=[VOCAB_SIZE], target_ids=[[1]]), 422, "invalid_request", "vocabulary"),
    ("id of a prompt too large", "/generate", {"prompt_ids": [[VOCAB_SIZE]], "max_tokens": 1}, 422, "invalid_request", f"{VOCAB_SIZE - 1}"),
    ("id to read too large", "/activations", {"items": [{"token_ids": [VOCAB_SIZE]}], "layers": [0]}, 422, "invalid_request", f"{VOCAB_SIZE - 1}"),
    ("id negative", "/logprob", with_item(context_ids=[-1], target_ids=[[1]]), 422, "invalid_request", "must be 0 or more"),
    ("id not whole", "/logprob", with_item(context_ids=[1.5], target_ids=[[1]]), 422, "invalid_request", "a whole number"),
    ("too long", "/logprob", with_item(context="cat " * 3000, targets=["b"]), 422, "context_too_long", "truncate_left"),
    ("10 MB of text", "/logprob", with_item(context="x" * HUGE, targets=["b"]), 413, "payload_too_large", "/perplexity/stream"),
    ("unknown field", "/logprob", {"items": [ITEM], "boundry": "joint"}, 422, "invalid_request", "boundry"),
    ("wrong type", "/logprob", {"items": "a"}, 422, "invalid_request", "must be a list"),
    ("a number as text", "/logprob", with_item(context=5, targets=["b"]), 422, "invalid_request", "must be a text"),
    ("unknown column", "/logprob", {"items": [ITEM], "columns": ["logits"]}, 422, "invalid_request", "'entropy'"),
    ("column twice", "/logprob", {"items": [ITEM], "columns": ["rank", "rank"]}, 422, "invalid_request", "twice"),
    ("both spaces of ids", "/logprob", {"space": "both", **with_item(context_ids=[1], target_ids=[[1]])}, 422, "invalid_request", "as_given"),
    ("a space alone", "/logprob", {"space": "both", **with_item(context="a", targets=[" "])}, 422, "boundary_empty", "space alone"),
    ("nothing before", "/logprob", {"bos": "never", **with_item(context="", targets=["b"])}, 422, "boundary_empty", "bos: always"),
    ("unknown model", "/logprob", {"model": "gpt", "items": [ITEM]}, 404, "unknown_model", "resident"),
    ("bad role", "/logprob", with_item(messages=[{"role": "wizard", "content": "x"}], targets=["b"]), 422, "invalid_request", "'assistant'"),
    ("broken JSON", "/logprob", b'{"items": [', 422, "invalid_request", "not valid JSON"),
    ("not JSON at all", "/logprob", b"\xff\xfe", 422, "invalid_request", "not valid JSON"),
    ("a lone surrogate", "/logprob", b'{"items": [{"context": "\\ud800", "targets": ["b"]}]}', 422, "invalid_request", "not valid JSON"),
    ("NaN", "/logprob", b'{"items": NaN}', 422, "invalid_request", "not valid JSON"),
    ("empty body", "/logprob", b"", 422, "invalid_request", "is empty; send JSON"),
    ("no texts", "/perplexity", {"texts": []}, 422, "invalid_request", "texts"),
    ("a stray stride", "/perplexity", {"texts": ["a"], "protocol": "rolling", "stride": 4}, 422, "invalid_request", "sliding"),
    ("unknown protocol", "/perplexity", {"texts": ["a"], "protocol": "magic"}, 422, "invalid_request", "'llamacpp'"),
    ("unknown reference", "/perplexity", {"texts": ["a"], "reference": "gpt"}, 404, "unknown_model", "gpt"),
    ("no such query", "/perplexity/stream?strid=3", b"text", 422, "invalid_request", "strid"),
    ("ids to decode", "/detokenize", {"token_ids": [[1], [VOCAB_SIZE]]}, 422, "invalid_request", "vocabulary"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "code", "hint"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])  # fmt: skip
def test_bad_input_is_explained(
    client: Client, path: str, body: Any, status: int, code: str, hint: str
) -> None:
    if "model" not in path and isinstance(body, dict) and path != "/perplexity/stream":
        body = {"model": client.models().models[0].id, **body}
    response = post(client, path, body)
    problem = Problem.model_validate_json(response.content)
    assert (response.status_code, problem.code) == (status, code), problem.detail
    assert hint in problem.detail
    assert response.headers["content-type"] == "application/problem+json"
    assert problem.request_id == response.headers["x-request-id"]
    assert problem.retryable is False


def test_wrong_method_path_and_content_type(client: Client) -> None:
    base = client.base_url
    for response, status, code, hint in (
        (httpx.get(f"{base}/logprob"), 405, "method_not_allowed", "POST"),
        (httpx.get(f"{base}/logprobs"), 404, "not_found", "/docs"),
        (httpx.get(f"{base}/models/gpt"), 404, "unknown_model", "gpt"),
        (httpx.post(f"{base}/logprob", data={"a": "b"}), 422, "invalid_request", "Content-Type"),
    ):
        problem = Problem.model_validate_json(response.content)
        assert (response.status_code, problem.status, problem.code) == (status, status, code)
        assert hint in problem.detail


def test_the_service_still_answers(client: Client) -> None:
    """Runs last in this file: nothing above has reached an engine or hurt it."""
    assert client.ready().ready
    assert all(card.restarts == 0 for card in client.models().models)
    assert client.logprob([ITEM]).results[0].targets[0].num_tokens == 1

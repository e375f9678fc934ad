"""`logsteer.lm_eval` under an adapter: what is asked of the server, and what a run refuses."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from logsteer import Client, LogsteerError, NotFoundError

from .documents import MODELS, PROVENANCE
from .scripted import problem

# The harness and its packages warn of one another.
pytestmark = pytest.mark.filterwarnings("ignore")

CARD = {
    "name": "lora",
    "sha256": "ab" * 32,
    "model": "demo",
    "weights_digest": "w",
    "rank": 8,
    "alpha": 16.0,
    "modules": ["q_proj"],
    "tensors": 2,
    "norm": 1.5,
    "bytes": 400,
    "created": "2026-01-02T03:04:05.678Z",
}
USED = {"name": "lora", "sha256": "ab" * 32}
REPLACED = {"name": "lora", "sha256": "cd" * 32}
MOOD = {"vectors": [{"sha256": "ef" * 32}]}
SETTING = {"until": ["."], "max_gen_toks": 4}


class Service:
    """Answers what the harness's model asks for, under an adapter; `bodies` by path."""

    def __init__(self) -> None:
        self.used: dict[str, str] | None = USED
        self.logprob: float | None = -1.5
        self.bodies: dict[str, Any] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/adapters/nobody":
            return problem("unknown_adapter", 404)
        self.bodies[path] = json.loads(request.content or b"null")
        return httpx.Response(200, json=self._answer(path, self.bodies[path]))

    def _answer(self, path: str, body: Any) -> Any:
        if path == "/tokenize":
            encoded = [list(text.encode()) for text in body["texts"]]
            return {"results": [{"token_ids": ids} for ids in encoded]}
        if path == "/logprob":
            targets = [{"logprob": self.logprob, "is_greedy": True}]
            return {"results": [{"targets": targets}], "adapter": self.used}
        if path == "/v1/completions":
            choice = {"index": 0, "text": " glad.", "finish_reason": "stop"}
            more = {"id": "r", "object": "text_completion", "created": 1, "model": "demo"}
            return {"choices": [choice], "adapter": self.used, **more}
        if path == "/models":
            return {"models": [{**MODELS["models"][0], "provenance": PROVENANCE}]}
        return {"/adapters/lora": CARD}[path]


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def make(service: Service, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes the harness's model on the service."""
    from logsteer.lm_eval import model

    transport = httpx.MockTransport(service)
    monkeypatch.setattr(
        model, "Client", lambda url, **more: Client(url, transport=transport, **more)
    )
    return model.LogsteerLM


def score(model: Any) -> Any:
    return model.loglikelihood([SimpleNamespace(args=("I am", " glad"))], disable_tqdm=True)


def generate(model: Any) -> Any:
    return model.generate_until([SimpleNamespace(args=("I am", SETTING))], disable_tqdm=True)


def test_every_request_about_the_model_names_the_adapter(
    service: Service, make: Callable[..., Any]
) -> None:
    model = make(adapter="lora")
    assert score(model) == [(-1.5, True)]
    assert generate(model) == [" glad"]
    assert service.bodies["/logprob"]["adapter"] == "lora"
    assert service.bodies["/v1/completions"]["adapter"] == "lora"
    assert "adapter" not in service.bodies["/tokenize"]
    assert "steering" not in service.bodies["/logprob"]


def test_the_record_of_a_run_tells_adapters_and_steering(
    service: Service, make: Callable[..., Any]
) -> None:
    model = make(adapter="lora", steering=MOOD)
    info = model.get_model_info()
    assert info["adapter"] == USED
    assert info["steering"]["vectors"][0]["sha256"] == "ef" * 32
    score(model)
    assert service.bodies["/logprob"].keys() >= {"adapter", "steering"}
    service.used = None
    model = make()
    assert score(model) == [(-1.5, True)]
    assert model.get_model_info().keys() == {"model_provenance"}
    assert "adapter" not in service.bodies["/logprob"]


@pytest.mark.parametrize("ask", [score, generate])
@pytest.mark.parametrize(("used", "named"), [(REPLACED, "of content cdcdcd"), (None, "none")])
def test_a_run_has_one_adapter(
    service: Service, make: Callable[..., Any], ask: Callable[..., Any], used: Any, named: str
) -> None:
    model = make(adapter="lora")
    ask(model)
    service.used = used
    with pytest.raises(LogsteerError, match=f"adapter lora was abababababab.*{named}"):
        ask(model)


def test_what_is_not_finite_is_no_score(service: Service, make: Callable[..., Any]) -> None:
    service.logprob = None
    with pytest.raises(LogsteerError, match=r"not finite.* glad"):
        score(make())


def test_an_unknown_adapter_is_told_at_once(make: Callable[..., Any]) -> None:
    with pytest.raises(NotFoundError, match="unknown_adapter"):
        make(adapter="nobody")

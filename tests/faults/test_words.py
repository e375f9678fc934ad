"""What errors and answers say, and what they must not: keys, and paths of this machine."""

import json
import time
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from logsteer.errors import api_error
from logsteer_server.api.problems import add_handlers, hide_paths
from logsteer_server.app import RequestIds
from logsteer_server.models.model import name_model
from logsteer_server.settings import ConfigurationError, Settings, load_settings
from tests.conftest import DEMO_MODEL, ROOT, Server, fake_model

KEY = "s3cr3t-s3cr3t-s3cr3t"

CONFIGURATIONS = {
    "no models": f"api_key: {KEY}\n",
    "a key that is a list": f"models: [{{id: a, path: b}}]\napi_key: [{KEY}]\n",
    "a wrong neighbour": f"models: [{{id: a, path: b, colour: red}}]\napi_key: {KEY}\nport: -1\n",
    "models that are none": f"models: {KEY}\napi_key: {KEY}\n",
    "a token among engine_args": f"models: [{{id: '?', path: b, engine_args: {{t: {KEY}}}}}]\n",
    "a quote too few": f"models: [{{id: a, path: b}}]\napi_key: '{KEY}\n",
    "a colon too many": f"models: [{{id: a, path: b}}]\napi_key: {KEY}: {KEY}\n",
    "a tab": f"models: [{{id: a, path: b}}]\napi_key:\t@{KEY}\n",
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_errors_of_a_configuration_say_no_key(tmp_path: Path, case: str) -> None:
    config = tmp_path / "models.yaml"
    config.write_text(CONFIGURATIONS[case])
    with pytest.raises(ConfigurationError) as caught:
        load_settings(config)
    assert KEY[:6] not in str(caught.value)
    assert str(config) in str(caught.value), "the caller is the operator, who needs to know where"


def test_a_key_in_the_environment_is_said_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGSTEER_API_KEY", KEY)
    monkeypatch.setenv("LOGSTEER_MODELS", f"[{KEY}")
    with pytest.raises(ConfigurationError) as caught:
        load_settings(None)
    assert KEY[:6] not in str(caught.value)
    monkeypatch.delenv("LOGSTEER_MODELS")
    settings = Settings(models=[{"id": "a", "path": "b"}])
    assert settings.api_key == KEY
    assert KEY not in repr(settings)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/srv/models/llama: no such directory; give one", "llama: no such directory; give one"),
        ("cannot open '/var/lib/x/y.safetensors' (full)", "cannot open 'y.safetensors' (full)"),
        ("see https://example.org/a/b and /docs", "see https://example.org/a/b and /docs"),
        ("POST /models/a/selftest shows more.", "POST /models/a/selftest shows more."),
        ("1/2 of them, and/or more", "1/2 of them, and/or more"),
        ("no path", "no path"),
    ],
)
def test_paths_are_hidden_and_addresses_are_not(text: str, shown: str) -> None:
    assert hide_paths(text) == shown


def test_a_model_is_named_by_its_id_or_its_directory() -> None:
    assert name_model("/srv/models/llama") == "llama"
    assert name_model("meta/llama") == "meta/llama"


def test_a_fault_says_no_path_and_the_log_does(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    app.add_middleware(RequestIds)
    add_handlers(app)

    @app.get("/fault")
    @app.get("/v1/fault")
    async def fault() -> None:
        raise api_error("internal", "[Errno 5] Input/output error: '/srv/data/secret/x.bin'")

    client = TestClient(app)
    for path in ("/fault", "/v1/fault"):
        caplog.clear()
        answer = client.get(path, headers={"X-Request-Id": "abc"})
        assert answer.status_code == 500
        assert "/srv" not in answer.text
        assert "x.bin" in answer.text
        assert "abc" in caplog.text
        assert "/srv/data/secret/x.bin" in caplog.text


def test_answers_say_no_path(fake_server: Server) -> None:
    with httpx.Client(base_url=fake_server.url, timeout=60) as http:
        body = {"items": [{"context": "once upon", "targets": [" a time"]}]}
        answer = http.post("/logprob", json=body)
        assert answer.json()["provenance"]["model_path"] == DEMO_MODEL.name
        for text in (answer.text, http.get("/models").text, http.get("/models/fake").text):
            assert str(ROOT) not in text


def test_a_model_that_failed_says_no_path(tmp_path: Path) -> None:
    missing = tmp_path / "somewhere" / "no-model"
    model = fake_model("broken") | {"path": str(missing), "required": False}
    (tmp_path / "server").mkdir()
    server = Server.start({"models": [model]}, tmp_path / "server")
    try:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            while (card := http.get("/models/broken").json())["state"] != "failed":
                time.sleep(0.05)
            body = {"model": "broken", "texts": ["a"]}
            texts = [json.dumps(card), http.post("/tokenize", json=body).text]
        assert "no-model" in card["detail"]
        for text in texts:
            assert str(tmp_path) not in text
        assert str(missing) in server.output, "the operator sees it"
    finally:
        server.stop()

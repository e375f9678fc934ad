"""What errors and answers say, at what length, and what they must not: keys."""

from pathlib import Path

import httpx
import pytest

from logsteer_server.models.model import name_model
from logsteer_server.settings import ConfigurationError, Settings, load_settings
from tests.conftest import DEMO_MODEL, ROOT, Server

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


def test_a_model_is_named_by_its_id_or_its_directory() -> None:
    assert name_model("/srv/models/llama") == "llama"
    assert name_model("meta/llama") == "meta/llama"


@pytest.mark.parametrize("path", ["/logprob", "/v1/completions"])
def test_a_name_of_megabytes_is_cut(fake_server: Server, path: str) -> None:
    """What looked for a field like it held the event loop for 1.4 s."""
    name = "item" * 250_000
    for body in ({name: 1}, {"items": [{name: 1}]}, {"model": name, "items": [], "prompt": "a"}):
        answer = httpx.post(f"{fake_server.url}{path}", json=body, timeout=60)
        assert 400 <= answer.status_code < 500
        assert len(answer.content) < 10_000


def test_answers_say_no_path(fake_server: Server) -> None:
    with httpx.Client(base_url=fake_server.url, timeout=60) as http:
        body = {"items": [{"context": "once upon", "targets": [" a time"]}]}
        answer = http.post("/logprob", json=body)
        assert answer.json()["provenance"]["model_path"] == DEMO_MODEL.name
        for text in (answer.text, http.get("/models").text, http.get("/models/fake").text):
            assert str(ROOT) not in text

"""Configuration: the file, the environment above it, arguments above both, and clear errors."""

import socket
from pathlib import Path

import pytest

from logsteer_server.__main__ import main
from logsteer_server.settings import ConfigurationError, load_settings, name_model

MINIMAL = "models:\n  - {id: a, path: here}\n"


def write(directory: Path, text: str) -> Path:
    path = directory / "models.yaml"
    path.write_text(text)
    return path


def test_later_sources_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(tmp_path, MINIMAL + "port: 1\nmax_items: 5\n")
    assert load_settings(config).port == 1
    monkeypatch.setenv("LOGSTEER_PORT", "2")
    assert (load_settings(config).port, load_settings(config).max_items) == (2, 5)
    assert load_settings(config, port=3).port == 3


def test_a_dotenv_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("LOGSTEER_API_KEY=secret\n")
    monkeypatch.chdir(tmp_path)
    assert load_settings(write(tmp_path, MINIMAL)).api_key == "secret"


def test_a_relative_path_is_meant_beside_the_file_where_it_exists(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, MINIMAL))
    assert settings.models[0].to_spec(settings.directory).path == "here"
    (tmp_path / "here").mkdir()
    assert settings.models[0].to_spec(settings.directory).path == str(tmp_path / "here")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("models: []\n", "no model"),
        ("- a\n", "mapping"),
        ("models: [\n", "cannot be read"),
        (MINIMAL + "modles: 1\n", "modles"),
        ("models:\n  - {id: a, path: x, tensor_paralel: 2}\n", "tensor_paralel"),
        ("models:\n  - {id: a, path: x}\n  - {id: a, path: y}\n", "must differ"),
        ("models:\n  - {id: 'a b', path: x}\n", "letter or digit"),
        (MINIMAL + "limits_url: localhost\n", "redis://"),
        (MINIMAL + "port: 99999\n", "65535"),
        ("models:\n  - {id: a, path: x, dtype: float64}\n", "transformer_lens"),
    ],
)
def test_errors_say_what_is_wrong(tmp_path: Path, text: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=hint):
        load_settings(write(tmp_path, text))


def test_check_validates_and_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(write(tmp_path, MINIMAL)), "--check"]) == 0
    assert "a (vllm)" in capsys.readouterr().out
    assert main(["--config", str(tmp_path / "none.yaml"), "--check"]) == 2
    assert "none.yaml" in capsys.readouterr().err
    assert main(["/no/such"]) == 2
    assert "/no/such: no such directory" in capsys.readouterr().err


def test_wrong_usage_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--confg"])
    assert capsys.readouterr().err == (
        "error: unknown: --confg\ndid you mean --config? See logsteer-server --help\n"
    )


@pytest.mark.parametrize(
    ("name", "model_id"),
    [("Qwen/Qwen3-8B", "Qwen3-8B"), ("demo/model", "model"), ("./_a b", "ab"), ("/", "model")],
)
def test_a_model_without_a_file(name: str, model_id: str) -> None:
    (model,) = load_settings(None, name_model(name, "transformer_lens"), port=3).models
    assert (model.id, model.path, model.engine) == (model_id, name, "transformer_lens")


def test_the_demo_without_a_file() -> None:
    (model,) = load_settings(None, name_model("demo", "transformer_lens")).models
    assert model.memory is None  # which that engine refuses
    (model,) = load_settings(None, name_model("demo")).models
    assert (Path(model.path) / "model.safetensors").is_file()
    with pytest.raises(ConfigurationError, match="serve MODEL or --demo"):
        load_settings(None, name_model(None))


def test_a_port_in_use_is_an_error_of_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--config", "demo/models.yaml", "--port", str(port)]) == 2

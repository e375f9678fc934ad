"""Configuration: the file, the environment above it, arguments above both, and clear errors.

And the pages of reference that are written from it and from the schemas.
"""

import socket
from pathlib import Path

import pytest

from docs.reference import main as write_reference
from docs.reference import spell, write_endpoints, write_errors, write_settings
from logsteer._endpoints import ENDPOINTS
from logsteer.errors import KINDS
from logsteer_server.__main__ import main
from logsteer_server.engines.needs import find_checkpoint
from logsteer_server.engines.weights import locate_model
from logsteer_server.serving import parse_arguments, read_named
from logsteer_server.settings import (
    MODEL_TOPICS,
    SERVER_TOPICS,
    ConfigurationError,
    ModelSettings,
    Settings,
    load_settings,
    name_models,
)

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
        (MINIMAL + "variants: [{name: v, model: b}]\n", "variant v: no model b"),
        (MINIMAL + "variants: [{name: a, steering: 'm:1'}]\n", "the name is taken"),
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
    (model,) = load_settings(
        None, name_models([name], {"engine": "transformer_lens"}), port=3
    ).models
    assert (model.id, model.path, model.engine) == (model_id, name, "transformer_lens")


def test_the_demo_without_a_file() -> None:
    (model,) = load_settings(None, name_models(["demo"], {"engine": "transformer_lens"})).models
    assert model.memory is None  # which that engine refuses
    (model,) = load_settings(None, name_models(["demo"])).models
    assert (Path(model.path) / "model.safetensors").is_file()
    with pytest.raises(ConfigurationError, match="serve MODEL or --demo"):
        load_settings(None, name_models([]))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--dtype float32 --engine transformer_lens", {"dtype": "float32"}),
        ("-tp 2 -pp 2 -dp 2", {"tensor_parallel": 2, "pipeline_parallel": 2, "replicas": 2}),
        ("--tensor-parallel-size 2 --pipeline-parallel-size 3", {"tensor_parallel": 2}),
        ("--max-model-len 64 --served-model-name llama", {"max_model_len": 64, "id": "llama"}),
        ("--gpu-memory-utilization 0.5 --quantization fp8", {"memory": 0.5, "quantization": "fp8"}),
        ("--memory 1GiB --enforce-eager", {"memory": "1GiB", "compile": False}),
        ("--enable-lora", {"adapter_slots": 1}),
        ("--max-loras 4 --enable-lora --max-lora-rank 8", {"adapter_slots": 4, "adapter_rank": 8}),
        ("--hooks resid_pre,mlp_out --no-compile", {"hooks": ["resid_pre", "mlp_out"]}),
        ("--devices cpu", {"devices": "cpu"}),
        ("--devices 0,1 -tp 2 --engine transformer_lens", {"devices": [0, 1]}),
        ("--revision v1", {"path": "org/model@v1", "id": "model"}),
        (
            "--tokenizer t --trust-remote-code --engine-arg max-num-seqs=16",
            {"engine_args": {"tokenizer": "t", "trust_remote_code": True, "max_num_seqs": 16}},
        ),
    ],
)
def test_settings_are_flags_under_both_names(flags: str, expected: dict[str, object]) -> None:
    settings = read_named(parse_arguments(["org/model", *flags.split(), "--api-key", "12"]))
    assert settings.api_key == "12"
    found = settings.models[0].model_dump()
    assert {name: found[name] for name in expected} == expected


def test_every_setting_is_a_flag_and_models_share_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    page = capsys.readouterr().out
    for name in {*Settings.model_fields, *ModelSettings.model_fields} - {
        "models",
        "path",
        "variants",
    }:
        assert f"--{name.replace('_', '-').removesuffix('s')}" in page
    settings = read_named(parse_arguments(["a/one", "b/two", "--dtype", "float16"]))
    assert [(m.id, m.dtype) for m in settings.models] == [("one", "float16"), ("two", "float16")]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("m --max-num-seqs 16", "--engine-arg max_num_seqs=VALUE"),
        ("m --speculative-config x", "positions of drafted tokens"),
        ("m --chat-template x", "chat_template.jinja"),
        ("--model m", "give MODEL without a flag"),
        ("m --dtyp float32", "did you mean --dtype?"),
        ("m --compile false", "--no-compile"),
        ("m --port 99999", "65535"),
        ("m --api-key a --key-file b", "api_key and key_file"),
        ("--config demo/models.yaml --dtype float32", "set them under `models:`"),
        ("a b --served-model-name c", "must differ"),
    ],
)
def test_a_flag_that_is_not_taken_says_what_is(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ConfigurationError)) as raised:
        read_named(parse_arguments(flags.split()))
    assert words in capsys.readouterr().err + str(raised.value)


def test_a_revision_of_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--model"
    for name, commit in {"main": "a" * 40, "v1": "b" * 40}.items():
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    for find in (locate_model, find_checkpoint):
        assert find("org/model@v1").name == "b" * 40
        assert find(f"org/model@{'a' * 40}").name == "a" * 40


def test_a_port_in_use_is_an_error_of_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--config", "demo/models.yaml", "--port", str(port)]) == 2


# ------------------------------------------------------------------ the reference


def test_every_setting_stands_in_its_page_with_a_description() -> None:
    page = write_settings()
    for kind, topics in ((Settings, SERVER_TOPICS), (ModelSettings, MODEL_TOPICS)):
        assert sorted(" ".join(topics.values()).split()) == sorted(kind.model_fields)
        for name, field in kind.model_fields.items():
            assert f"| `{name}` |" in page
            assert field.description, name


def test_every_problem_code_and_every_endpoint_have_a_line() -> None:
    errors, page = write_errors(), write_endpoints()
    rows = [line for line in errors.splitlines() if line.startswith("| `")]
    for code, kind in KINDS.items():
        (row,) = [row for row in rows if f"`{code}`" in row]
        assert f" | {kind.status} | " in row
    shared = page.split("\n## POST")[0]
    for endpoint in ENDPOINTS.values():
        assert f"{endpoint.method} {endpoint.path}" in page
        for field in endpoint.request.model_fields if endpoint.request else ():
            section = page.split(f"{endpoint.method} {endpoint.path}\n")[-1].split("\n## ")[0]
            assert f"| `{field}` |" in shared or f"`{field}`" in section, (endpoint.path, field)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 65535}, "integer ≥ 1 ≤ 65,535"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string"),
        ({"type": "array", "items": {"$ref": "#/$defs/Pair"}}, "list of `Pair`"),
        ({"enum": ["auto", "never"]}, "`auto`, `never`"),
    ],
)
def test_types_in_words(schema: dict[str, object], words: str) -> None:
    assert spell(schema) == words


def test_a_field_of_two_meanings_is_shared_by_its_most_frequent_one() -> None:
    shared, *sections = write_endpoints().split("\n## POST ")
    (generate,) = [section for section in sections if section.startswith("/generate\n")]
    assert '| `columns` | list of `Column` = `["logprob", "rank"]` |' in shared
    assert "- `columns` (list of `Column`): Columns of each generated token" in generate


def test_a_page_that_is_stale_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_reference([str(tmp_path)]) == 0
    assert write_reference([str(tmp_path), "--check"]) == 0
    (tmp_path / "errors.md").write_text("old")
    assert write_reference([str(tmp_path), "--check"]) == 1
    assert "errors.md" in capsys.readouterr().err

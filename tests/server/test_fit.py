"""What a model needs of a machine: counted, told by `--check`, and looked at before a change."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import save_file

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.engines.needs import (
    CPU_CACHE_BYTES,
    PROCESS_BYTES,
    choose_dtype,
    estimate,
)
from logsteer_server.models import fit
from logsteer_server.models.fit import (
    check_files,
    check_fit,
    describe_fit,
    list_gpus,
    measure_memory,
)
from logsteer_server.serving import examine_machine
from logsteer_server.settings import ModelSettings, Settings
from tests.buckets import open_bucket
from tests.conftest import DEMO_MODEL

CONFIG = {
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
    "max_position_embeddings": 512, "torch_dtype": "float32",
}  # fmt: skip
GIB = 2**30


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {"a": np.zeros((100, 64), np.float16), "b": np.zeros(10, np.int8)}
    save_file(tensors, tmp_path / "model-1.safetensors")
    save_file({"c": np.zeros((7, 3), np.float32)}, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def settings_of(*models: dict[str, Any], **fields: Any) -> Settings:
    return Settings(models=[ModelSettings(**model) for model in models], port=0, **fields)


class TestNeeds:
    @pytest.mark.parametrize(
        ("dtype", "weights", "item"),
        [("auto", (6400 + 21) * 4 + 10, 4), ("bfloat16", (6400 + 21) * 2 + 10, 2)],
    )  # fmt: skip
    def test_weights_are_counted_in_the_dtype_that_they_run_in(
        self, checkpoint: Path, dtype: str, weights: int, item: int
    ) -> None:
        needs = estimate(EngineSpec("m", "vllm", str(checkpoint), dtype=dtype))
        assert needs.weights_bytes == weights
        assert needs.token_bytes == 2 * 3 * 2 * 16 * item
        assert needs.cache_bytes == CPU_CACHE_BYTES

    @pytest.mark.parametrize(
        ("config", "dtype"),
        [({"dtype": "float32"}, "float32"), ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
         ({"text_config": {"dtype": "float64"}}, "float64"), ({"dtype": None}, "float32")],
    )  # fmt: skip
    def test_a_model_runs_in_what_its_checkpoint_says(
        self, checkpoint: Path, config: dict[str, Any], dtype: str
    ) -> None:
        (checkpoint / "config.json").write_text(json.dumps(config))
        assert choose_dtype("auto", checkpoint) == dtype

    def test_settings_count(self, checkpoint: Path) -> None:
        spec = EngineSpec("m", "vllm", str(checkpoint), memory="256MiB", max_model_len=64)
        assert estimate(spec).cache_bytes == 256 * 2**20
        assert estimate(EngineSpec("m", "transformer_lens", str(checkpoint))).cache_bytes == 0
        fake = estimate(EngineSpec("m", "fake", str(checkpoint)))
        assert fake.num_bytes == PROCESS_BYTES["fake"]

    def test_what_cannot_be_told_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no such directory"):
            estimate(EngineSpec("m", "vllm", "./nowhere"))
        with pytest.raises(ValueError, match="not on this machine"):
            estimate(EngineSpec("m", "vllm", "nobody/has-this"))
        with pytest.raises(ValueError, match="cannot be read"):
            estimate(EngineSpec("m", "vllm", str(tmp_path)))
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        with pytest.raises(ValueError, match="no weights"):
            estimate(EngineSpec("m", "vllm", str(tmp_path)))
        (tmp_path / "a.safetensors").write_bytes(b"\xff" * 100)
        with pytest.raises(ValueError, match="not a safetensors file"):
            estimate(EngineSpec("m", "vllm", str(tmp_path)))

    def test_a_hub_id_is_found_where_it_was_downloaded(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        repository = tmp_path / "models--org--name"
        snapshot = repository / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        for file in checkpoint.glob("model*.safetensors"):
            (snapshot / file.name).write_bytes(file.read_bytes())
        (snapshot / "config.json").write_text(json.dumps(CONFIG))
        assert estimate(EngineSpec("m", "vllm", "org/name")).weights_bytes > 0
        assert estimate(EngineSpec("m", "vllm", "org/name@abc")).weights_bytes > 0
        with pytest.raises(ValueError, match="not on this machine"):
            estimate(EngineSpec("m", "vllm", "org/name@def"))


def test_lines_of_nvidia_smi_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program := tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\nprintf '0, 143771\\n1, [N/A]\\nno GPU\\n'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus() == {0: 143771 * 2**20}


def test_memory_is_that_of_the_machine() -> None:
    total, free = measure_memory()
    assert 2**28 < free < total


class TestCheck:
    """What `--check` says beside that the configuration is valid."""

    def look(self, settings: Settings) -> list[str]:
        return [line for line in examine_machine(settings) if line.startswith("warning: ")]

    def test_what_the_machine_lacks_is_a_warning(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = {"id": "m", "path": str(checkpoint), "memory": "64MiB"}
        assert self.look(settings_of(model)) == []
        (told,) = self.look(settings_of(model | {"memory": "9000GiB"}))
        assert told.startswith("warning: model m: it takes about 966")
        (told,) = self.look(settings_of(model | {"path": "./nowhere"}))
        assert "no such directory" in told
        (told,) = self.look(settings_of(model, cache_bytes=9000 * GIB))
        assert told.startswith("warning: memory: about 900")
        monkeypatch.setattr(fit, "list_gpus", lambda: {0: 140 * GIB})
        assert self.look(settings_of(model | {"memory": 0.9})) == []
        (told,) = self.look(settings_of(model | {"devices": [0, 7], "tensor_parallel": 2}))
        assert told == "warning: model m: of devices [0, 7] only 1 are here"

    def test_a_port_that_is_taken_is_a_warning(self, checkpoint: Path) -> None:
        settings = settings_of({"id": "m", "path": str(checkpoint), "engine": "fake"})
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            (told,) = self.look(settings.model_copy(update={"port": port}))
        assert f"cannot listen on 127.0.0.1:{port}" in told and "choose another --port" in told

    def test_a_bucket_that_does_not_answer_is_a_warning(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        model = {"id": "m", "path": str(checkpoint), "engine": "fake"}
        with open_bucket() as bucket:
            settings = settings_of(model, store_directory=tmp_path, **bucket.settings)
            assert self.look(settings) == []
            bucket.stop()
            (told,) = self.look(settings)
        assert "error sending request" in told


WINDOWS = CONFIG | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (WINDOWS | {"max_window_layers": 1}, "sliding windows in all layers or none"),
        (WINDOWS | {"layer_types": ["full_attention", "sliding_attention"]}, "max_window_layers"),
        (CONFIG | {"model_type": "gpt_neo"}, "vLLM has no GPT-Neo"),
        (CONFIG | {"torch_dtype": "float64"}, "set dtype: float32; or serve"),
        (WINDOWS | {"max_window_layers": 3}, None),
        (WINDOWS | {"max_window_layers": 0}, None),
        (WINDOWS | {"max_window_layers": 1, "use_sliding_window": False}, None),
    ],
)
def test_what_vllm_does_not_compute_is_said_with_the_way_out(
    checkpoint: Path, config: dict[str, Any], words: str | None
) -> None:
    (checkpoint / "config.json").write_text(json.dumps(config))
    for engine in ("vllm", "transformer_lens"):
        told = "\n".join(
            describe_fit(settings_of({"id": "m", "path": str(checkpoint), "engine": engine}))
        )
        assert ("(--engine transformer_lens)" in told) is (words is not None and engine == "vllm")
        assert engine != "vllm" or (words or "model m: float32") in told


def test_check_needs_no_engine(checkpoint: Path, tmp_path: Path) -> None:
    config = tmp_path / "models.yaml"
    model = {"id": "m", "path": str(checkpoint), "memory": "64MiB"}
    config.write_text(json.dumps({"models": [model], "port": 0}))
    code = (
        "import sys; from logsteer_server.__main__ import main; "
        f"status = main(['--check', '--config', {str(config)!r}]); "
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "model m: float32, weights" in done.stdout


class TestLoadable:
    """What is known of a model before it is loaded."""

    def check(
        self, new: dict[str, Any], monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int] = ()
    ) -> None:
        monkeypatch.setattr(fit, "measure_memory", lambda: (16 * GIB, 8 * GIB))
        monkeypatch.setattr(fit, "list_gpus", lambda: dict(enumerate(sizes)))
        one = {"id": "m", "path": str(DEMO_MODEL), "memory": "4GiB"}
        check_fit(ModelSettings(**one | new), settings_of(one))

    @pytest.mark.parametrize("new", [{"memory": "9GiB"}, {"memory": "5GiB", "replicas": 2}])
    def test_memory_has_to_do_for_all_replicas(
        self, new: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.check({"memory": "5GiB"}, monkeypatch)
        with pytest.raises(ValueError, match="bytes of memory, and 8589934592 are free"):
            self.check(new, monkeypatch)

    @pytest.mark.parametrize(
        ("file", "text", "why"),
        [
            ("", None, "no such directory"),
            ("config.json", "{", "config.json cannot be read"),
            ("model.safetensors", None, "has no weights"),
        ],
    )
    def test_files_that_cannot_be_read_are_named(
        self, tmp_path: Path, file: str, text: str | None, why: str
    ) -> None:
        copy = Path(shutil.copytree(DEMO_MODEL, tmp_path / "copy"))
        model = ModelSettings(id="m", path=str(copy))
        settings = settings_of({"id": "m", "path": str(copy)})
        check_files(model, settings)
        if not file:
            shutil.rmtree(copy)
        elif text is None:
            (copy / file).unlink()
        else:
            (copy / file).write_text(text)
        with pytest.raises(ValueError, match=why):
            check_files(model, settings)

    def test_a_hub_id_that_is_not_here_is_not_checked(self) -> None:
        one = {"id": "m", "path": "no/such@v1"}
        check_files(ModelSettings(**one), settings_of(one))

    def test_weights_have_to_fit_into_the_gpus_that_are_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = ModelSettings(id="m", path=str(DEMO_MODEL)).to_spec(DEMO_MODEL)
        whole = fit.estimate(spec).weights_bytes
        half = whole // 2
        for new, sizes, why in (
            ({"devices": "cpu"}, [1], None),
            ({}, [whole], None),
            ({}, [whole - 1], "of each GPU"),
            ({"tensor_parallel": 2}, [half, half], None),
            ({"tensor_parallel": 2}, [half, half - 1], "of each GPU"),
            ({"devices": [1]}, [1, whole], None),
            ({"devices": [0]}, [1, whole], "of each GPU"),
            ({"devices": [0, 7], "tensor_parallel": 2}, [whole, whole], "only 1 are here"),
        ):
            with nullcontext() if why is None else pytest.raises(ValueError, match=why):
                self.check(new, monkeypatch, sizes)

"""A GGUF file as a model: what is written of it, and what `--check` says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.engines.gguf import convert
from logsteer_server.engines.needs import estimate
from logsteer_server.engines.weights import locate_model
from logsteer_server.models.fit import describe_fit
from logsteer_server.settings import ModelSettings, Settings
from logsteer_server.text.tokenizer import TextCodec

WIDTH, TOKENS = 32, ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz ", "ab"]
TEMPLATE = "{{ messages[0].content }}"


def write_gguf(file: Path, architecture: str = "llama", **fields: Any) -> dict[str, np.ndarray]:
    """A model of one layer, whose matrices are quantised; returns its tensors by name."""
    draw = np.random.default_rng(0)
    writer = GGUFWriter(file, architecture)
    writer.add_name("tiny")
    for name, number in {
        "block_count": 1, "context_length": 64, "embedding_length": WIDTH,
        "feed_forward_length": WIDTH, "attention.head_count": 1, "attention.head_count_kv": 1,
    }.items():  # fmt: skip
        writer.add_uint32(f"{architecture}.{name}", number)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    if (add_bos := fields.get("add_bos")) is not None:
        writer.add_add_bos_token(add_bos)
    matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    tensors = {f"blk.0.{name}.weight": (WIDTH, WIDTH) for name in matrices}
    tensors["token_embd.weight"] = (len(TOKENS), WIDTH)
    kind, found = GGMLQuantizationType.Q8_0, {}
    for name, shape in tensors.items():
        packed = quantize(draw.normal(size=shape).astype(np.float32), kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        found[name] = dequantize(packed, kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "logsteer" / "gguf"


def check(file: Path) -> str:
    model = ModelSettings(id="m", path=str(file))
    return "\n".join(describe_fit(Settings(models=[model], port=0)))


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_file_is_a_checkpoint_with_its_own_rules(
    cache: Path, tmp_path: Path, add_bos: bool
) -> None:
    file = tmp_path / "tiny.gguf"
    tensors = write_gguf(file, add_bos=add_bos)
    spec = EngineSpec("m", "vllm", str(file))
    before, told = estimate(spec), check(file)
    assert f"tiny.gguf (Q8_0) is dequantised at the first start, once, in {cache}" in told
    directory = locate_model(str(file))
    assert directory.parent == cache and [*cache.iterdir()] == [directory]
    weights = load_file(directory / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert np.array_equal(weights["model.embed_tokens.weight"], tensors["token_embd.weight"])
    up = tensors["blk.0.ffn_up.weight"]
    assert np.array_equal(weights["model.layers.0.mlp.up_proj.weight"], up)
    codec = TextCodec.load(str(directory))
    assert codec.encode_ids(["ab"]) == [[len(TOKENS) - 1]]
    assert codec.bos_ids("auto") == [1] * add_bos
    assert codec.describe()["chat_template"] == TEMPLATE
    assert estimate(spec) == before and "lies dequantised" in check(file)
    changed = (directory / "config.json").stat().st_mtime_ns
    assert convert(file) == directory
    assert (directory / "config.json").stat().st_mtime_ns == changed, "written once"


def test_what_transformers_does_not_read_is_said(tmp_path: Path) -> None:
    file = tmp_path / "other.gguf"
    write_gguf(file, "unheard-of")
    assert "no GGUF file of architecture unheard-of; serve" in check(file)

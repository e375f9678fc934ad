"""Files of vectors: other programs' are read, ours are read by them, and traps are refused."""

import io
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from logsteer.errors import APIError
from logsteer_server.stores.formats.gguf_file import parse_gguf, render_gguf
from logsteer_server.stores.formats.vector_file import read_file, write_file
from logsteer_server.stores.layer_vectors import LayerVectors, Readout
from tests.refusals import refused

FILES = Path(__file__).parent / "vector_files"
RANDOM = np.random.default_rng(0)
NUMBERS = {layer: RANDOM.standard_normal(8).astype(np.float32) for layer in (3, 2, 1)}
VECTORS = LayerVectors(NUMBERS)


def refuse(data: bytes, reason: str, form: Any = None) -> None:
    with refused("invalid_vector", reason):
        read_file(data, form)


def save_torch(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def save_tensors(**tensors: torch.Tensor) -> bytes:
    return safetensors.torch.save(tensors)


@pytest.mark.parametrize(
    ("name", "form", "vectors", "hint"),
    [
        ("repeng.gguf", "gguf", VECTORS, "llama"),
    ],
)
def test_files_of_other_programs(
    name: str, form: str, vectors: LayerVectors, hint: str | None
) -> None:
    read = read_file((FILES / name).read_bytes())
    assert (read.format, read.vectors, read.model_hint) == (form, vectors, hint)


def test_ours_comes_back() -> None:
    for form in ("safetensors", "gguf"):
        data = write_file(VECTORS, form, "llama")  # type: ignore[arg-type]
        assert read_file(data).vectors == VECTORS
        assert read_file(data, form).format == form  # type: ignore[arg-type]
    attention = LayerVectors({0: NUMBERS[1]}, "attn.hook_z")
    assert read_file(write_file(attention, "safetensors", None)).vectors == attention


TOLD = LayerVectors(NUMBERS, readouts={2: Readout("relu", 1.5, -0.25, 0.5)})


def test_readouts_come_back() -> None:
    for form in ("safetensors", "gguf"):
        read = read_file(write_file(TOLD, form, "llama"))  # type: ignore[arg-type]
        assert read.vectors == TOLD
        assert read.vectors.readouts == {2: Readout("relu", 1.5, -0.25, 0.5)}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no JSON", "map layers to readouts"),
        ("[]", "map layers to readouts"),
        ("[" * 10_000, "map layers to readouts"),
        ('{"2": 1}', "map layers to readouts"),
        ('{"two": {"kind": "relu", "slope": 1, "bias": 0}}', "map layers to readouts"),
        ('{"2": {"kind": "relu", "slope": 1}}', "map layers to readouts"),
        ('{"2": {"kind": "relu", "slope": 1, "bias": 0, "more": 0}}', "map layers to readouts"),
        ('{"2": {"kind": "relu", "slope": NaN, "bias": 0}}', "map layers to readouts"),
        ('{"2": {"kind": ["relu"], "slope": 1, "bias": 0}}', "map layers to readouts"),
        ('{"9": {"kind": "relu", "slope": 1, "bias": 0}}', "a readout for layer 9"),
    ],
)
def test_files_with_readouts_that_cannot_be_used_are_refused(text: str, reason: str) -> None:
    tensors = {str(layer): torch.tensor(numbers) for layer, numbers in NUMBERS.items()}
    refuse(safetensors.torch.save(tensors, {"logsteer.readouts": text, "else": "x"}), reason)
    refuse(render_gguf(NUMBERS, "llama", {"logsteer.readouts": text}), reason)


def test_metadata_of_others_is_passed_over() -> None:
    tensors = {str(layer): torch.tensor(numbers) for layer, numbers in NUMBERS.items()}
    assert read_file(safetensors.torch.save(tensors, {"format": "pt"})).vectors == VECTORS


def test_torch_reads_our_safetensors() -> None:
    tensors = safetensors.torch.load(write_file(VECTORS, "safetensors", None))
    assert tensors.keys() == {f"blocks.{layer}.hook_resid_post" for layer in (1, 2, 3)}
    assert torch.equal(tensors["blocks.2.hook_resid_post"], torch.tensor(NUMBERS[2]))


def test_our_gguf_is_byte_for_byte_what_repeng_writes() -> None:
    assert write_file(VECTORS, "gguf", "llama") == (FILES / "repeng.gguf").read_bytes()
    assert parse_gguf(WHOLE)[1]["controlvector.layer_count"] == 2


def test_what_a_control_vector_cannot_hold_is_refused() -> None:
    with pytest.raises(APIError, match="layer 0, which llama"):
        write_file(LayerVectors({0: NUMBERS[1], 1: NUMBERS[1]}), "gguf", None)
    with pytest.raises(APIError, match="it is for attn_out"):
        write_file(LayerVectors({1: NUMBERS[1]}, "attn_out"), "gguf", None)
    # repeng can write layer 0, and means block 0.
    assert read_file(render_gguf({0: NUMBERS[1]}, "x")).vectors == LayerVectors({0: NUMBERS[1]})


@pytest.mark.parametrize(
    ("name", "layer", "hook"),
    [
        ("7", 7, "resid_post"),
        ("layer.7", 7, "resid_post"),
        ("layers.7", 7, "resid_post"),
        ("layer_7", 7, "resid_post"),
        ("model.layers.7", 7, "resid_post"),
        ("transformer.h.7", 7, "resid_post"),
        ("direction.7", 7, "resid_post"),
        ("blocks.7", 7, "resid_post"),
        ("blocks.7.hook_resid_post", 7, "resid_post"),
        ("blocks.7.hook_out", 7, "resid_post"),
        ("blocks.7.hook_mlp_out", 7, "mlp_out"),
        ("blocks.7.attn.hook_z", 7, "attn.hook_z"),
    ],
)
def test_names_of_tensors(name: str, layer: int, hook: str) -> None:
    read = read_file(save_tensors(**{name: torch.ones(4)}))
    assert read.vectors == LayerVectors({layer: np.ones(4)}, hook)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_of_numbers(dtype: torch.dtype) -> None:
    numbers = torch.tensor([[1.5, -0.25, 3.0]], dtype=dtype)  # a leading axis of length 1
    expected = LayerVectors({1: np.array([1.5, -0.25, 3.0])})
    assert read_file(save_tensors(**{"1": numbers})).vectors == expected


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"1": torch.ones(2), "2": torch.ones(3)}, "layer 1 has 2 numbers and layer 2 has 3"),
        ({"1": torch.tensor([float("nan")])}, "NaN"),
        ({"1": torch.tensor([1e300], dtype=torch.float64)}, "beyond float32"),
        ({"1": torch.ones(2, dtype=torch.int64)}, "type I64; F64"),
        ({"1": torch.ones(2, 2)}, r"shape \[2, 2\]"),
        ({"1": torch.tensor(1.0)}, r"shape \[\]"),
        ({"1": torch.ones(2), "layer.1": torch.ones(2)}, "layer 1 is there twice"),
        ({"weights": torch.ones(2)}, "'weights' names no layer"),
        ({"../../etc/passwd": torch.ones(2)}, "names no layer"),
        ({"-1": torch.ones(2)}, "names no layer"),
        ({"999999": torch.ones(2)}, "layer 999999 is outside"),
        ({"blocks.1.resid": torch.ones(2)}, "names no layer"),
        ({"blocks.1.hook_a": torch.ones(2), "blocks.2.hook_b": torch.ones(2)}, "several hooks"),
        ({"1": torch.zeros(2)}, "every number is 0"),
        ({}, "no layers"),
    ],
)
def test_tensors_that_are_no_vectors(tensors: dict[str, torch.Tensor], reason: str) -> None:
    refuse(safetensors.torch.save(tensors), reason)


def test_safetensors_that_lie_about_their_size() -> None:
    header = {"1": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    text = json.dumps(header).encode()
    refuse(struct.pack("<Q", len(text)) + text + bytes(64), "cannot be read")
    refuse(struct.pack("<Q", 2**62) + b"{}", "cannot be read")
    whole = save_tensors(**{"1": torch.ones(64)})
    refuse(whole[:-1], "cannot be read")
    refuse(whole + b"more", "cannot be read")


@pytest.mark.parametrize("data", [b"hello, world", b"x", b"\x00" * 64, b"<html><body>no</body>"])
def test_what_is_no_file_of_vectors(data: bytes) -> None:
    refuse(data, "neither safetensors nor GGUF")


def patch_gguf(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data and len(old) == len(new)
    return data.replace(old, new, 1)


WHOLE = render_gguf({1: NUMBERS[1], 2: NUMBERS[2]}, "llama")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GGUF", "ends too early"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648; little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "announces 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "1152921504606846976 fields"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "9223372036854775808 bytes"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 0, 2**50), "'a' has type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77), "'a' has type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(8), "no layers"),
        (WHOLE[:-1], "ends too early"),
        (patch_gguf(WHOLE, b"\rcontrolvector"[1:], b"llama-unknown"), "so it is a model"),
        (patch_gguf(WHOLE, b"direction.1", b"direction.2"), "there twice"),
        (patch_gguf(WHOLE, b"direction.1", b"direction.x"), "names no layer"),
        (
            patch_gguf(WHOLE, struct.pack("<IQIQ", 1, 8, 0, 0), struct.pack("<IQIQ", 1, 8, 2, 0)),
            "ggml type 2",
        ),
        (
            patch_gguf(
                WHOLE, struct.pack("<IQIQ", 1, 8, 0, 0), struct.pack("<IQIQ", 1, 2**62, 0, 0)
            ),
            "ends too early",
        ),
        (
            patch_gguf(
                WHOLE, struct.pack("<IQIQ", 1, 8, 0, 0), struct.pack("<IQIQ", 1, 8, 0, 2**62)
            ),
            "ends too early",
        ),
    ],
)
def test_gguf_that_is_broken_or_lies(data: bytes, reason: str) -> None:
    refuse(data, reason, "gguf")


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255), st.integers(0, 64))
def test_a_gguf_with_a_wrong_byte_is_read_or_refused(place: int, byte: int, cut: int) -> None:
    data = bytearray(WHOLE)
    data[place] = byte
    try:
        read_file(bytes(data[: len(data) - cut]), "gguf")
    except APIError as error:
        assert error.code == "invalid_vector"


class Exploit:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("form", [None, "pt"])
def test_what_torch_saved_is_not_read_here(tmp_path: Path, form: Any) -> None:
    mark = tmp_path / "run"
    for data in (
        (FILES / "layers.pt").read_bytes(), save_torch({1: Exploit(mark)}),
        pickle.dumps({1: Exploit(mark)}), b"PK\x03\x04" + bytes(99),
    ):  # fmt: skip
        refuse(data, "safetensors and GGUF. `logsteer vectors put NAME FILE.pt` converts", form)
    assert not mark.exists()

"""Shapes of matrices as the files of a checkpoint say them, packed or not."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from logsteer_server.engines.vllm.adapters import read_weight_shapes

OUTPUTS, INPUTS, GROUPS = 96, 64, 2
STATE = "a.weight.quant_state.bitsandbytes__nf4"


def write_state(state: bytes) -> dict[str, np.ndarray]:
    packed = np.zeros((OUTPUTS * INPUTS // 2, 1), np.uint8)
    return {"a.weight": packed, STATE: np.frombuffer(state, np.uint8)}


def pack(qweight: tuple[int, int], zeros: int) -> dict[str, np.ndarray]:
    return {
        "a.qweight": np.zeros(qweight, np.int32),
        "a.qzeros": np.zeros((GROUPS, zeros), np.int32),
        "a.scales": np.zeros((GROUPS, OUTPUTS), np.float16),
    }


@pytest.mark.parametrize(
    "tensors",
    [
        {"a.weight": np.zeros((OUTPUTS, INPUTS), np.float16)},
        {"a.weight": np.zeros((OUTPUTS, INPUTS), np.int8)},
        {
            "a.weight_packed": np.zeros((OUTPUTS, INPUTS // 8), np.int32),
            "a.weight_shape": np.array([OUTPUTS, INPUTS]),
        },
        pack((INPUTS * 4 // 32, OUTPUTS), OUTPUTS * 4 // 32),
        pack((INPUTS * 3 // 32, OUTPUTS), OUTPUTS * 3 // 32),
        pack((INPUTS, OUTPUTS * 4 // 32), OUTPUTS * 4 // 32),
        write_state(json.dumps({"shape": [OUTPUTS, INPUTS]}).encode()),
    ],
    ids=["float16", "int8", "compressed", "gptq", "gptq, 3 bits", "awq", "bitsandbytes"],
)
def test_a_matrix_has_its_outputs_and_inputs(
    tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_weight_shapes(tmp_path)["a.weight"] == [OUTPUTS, INPUTS]


def test_parts_may_be_in_several_files(tmp_path: Path) -> None:
    for name, tensor in pack((INPUTS, OUTPUTS // 8), OUTPUTS // 8).items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    assert read_weight_shapes(tmp_path)["a.weight"] == [OUTPUTS, INPUTS]


@pytest.mark.parametrize(
    "tensors",
    [
        write_state(b'{"shape": [96,'),
        write_state(b"{}"),
        {"a.qweight": np.zeros((INPUTS, OUTPUTS // 8), np.int32)},
        {"a.weight_packed": np.zeros((OUTPUTS, INPUTS // 2), np.uint8)},
    ],
)
def test_what_files_do_not_say_is_left_out(tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    assert "a.weight" not in read_weight_shapes(tmp_path)

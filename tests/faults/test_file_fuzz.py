"""Files and steering changed at random: `INPUTS=20000` has each reader read so many."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from logsteer.errors import APIError
from logsteer_server.stores.formats.vector_file import read_file
from tests.faults.file_fuzz import TARGETS, fuzz
from tests.refusals import refused

INPUTS = int(os.environ.get("INPUTS", "400"))


@pytest.mark.parametrize("name", TARGETS)
def test_files_are_taken_or_refused(name: str, tmp_path: Path) -> None:
    taken, refused = fuzz(name, INPUTS, tmp_path)
    assert taken, "some changes leave a file that can be read"
    assert name == "card" or refused > INPUTS / 4  # damage is no error there


# ------------------------------------------------------------------ what it has found


def with_shape(shape: list[int], data: bytes = b"") -> bytes:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}
    header = json.dumps({"1": entry}).encode()
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize("shape", [[1] * 70, [0, 2**62], [0, 2**63]])
def test_shapes_that_numpy_lacks_are_refused(shape: list[int]) -> None:
    data = bytes(4) if 0 not in shape else b""
    with refused("invalid_vector"):
        read_file(with_shape(shape, data), "safetensors")


def test_a_signalling_nan_is_refused_without_a_warning() -> None:
    numbers = np.array([0x7F800001, 0x3F800000], np.uint32).view(np.float32)
    with pytest.raises(APIError, match="NaN"):
        read_file(save({"1": numbers}))

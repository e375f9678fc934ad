"""Files of overrides: what they hold, what is refused; and a request's override, resolved."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from logsteer.errors import NotFoundError
from logsteer.schemas import ParameterOverride
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.contract.plan import Direction, Override
from logsteer_server.interventions.interventions import UNCHANGED, Interventions
from logsteer_server.interventions.references import resolve_override
from logsteer_server.stores.formats.tensor_file import (
    PIECE,
    TensorFileError,
    read_content,
    read_direction,
)
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.store import OVERRIDES, Store
from tests.refusals import refused
from tests.server.plan_steps import finish
from tests.server.steering_cases import INFO
from tests.server.store_cases import make_content, put_content

MIB = 2**20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    return tmp_path / "direction.safetensors"


def write(file: Path, tensors: dict[str, Any]) -> Path:
    file.write_bytes(save(tensors))
    return file


def test_a_content_is_shapes_and_a_norm(file: Path) -> None:
    rng = np.random.default_rng(1)
    tensors = {
        "a": rng.normal(size=(3, 4)).astype(np.float32),
        "b": rng.normal(size=5),
        "c": rng.normal(size=(2, 2)).astype(np.float16),
        "d": np.zeros((0, 3), np.float32),
        "e": np.ones(PIECE + 5, np.float16),
    }
    found = read_content(write(file, tensors))
    assert found.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    whole = np.concatenate([tensor.astype(np.float64).ravel() for tensor in tensors.values()])
    assert found.norm == pytest.approx(np.linalg.norm(whole))


def with_bfloat16(file: Path, bits: list[int]) -> Path:
    header = json.dumps(
        {"a": {"dtype": "BF16", "shape": [len(bits)], "data_offsets": [0, 2 * len(bits)]}}
    ).encode()
    numbers = np.array(bits, "<u2").tobytes()
    file.write_bytes(len(header).to_bytes(8, "little") + header + numbers)
    return file


def test_bfloat16_is_read(file: Path) -> None:
    assert read_content(with_bfloat16(file, [0x3F80, 0xC000])).norm == pytest.approx(5**0.5)
    with pytest.raises(TensorFileError, match="NaN or infinite"):
        read_content(with_bfloat16(file, [0x3F80, 0x7F80]))


LAST = np.zeros(PIECE + 2, np.float32)
LAST[-1] = np.nan
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (save({}), "no tensors"),
    "NaN": (save({"a": np.array([1, np.nan], np.float32)}), "a has a number that is NaN"),
    "infinite": (save({"a": np.array([np.inf])}), "NaN or infinite"),
    "NaN in the last piece": (save({"a": LAST}), "NaN or infinite"),
    "zeros": (save({"a": np.zeros(4, np.float32)}), "every number is 0"),
    "integers": (save({"a": np.ones(4, np.int32)}), "type I32"),
    "beyond float64": (save({"a": np.full(4, 1e200)}), "beyond float64"),
    "text": (b"hello, this is no tensor at all", "not a safetensors file"),
    "short": (b"abc", "cannot be read"),
    "cut": (make_content(1)[:-4], "cannot be read"),
    "more than announced": (make_content(1) + b"1234", "cannot be read"),
    "no JSON": ((5).to_bytes(8, "little") + b"hello", "cannot be read"),
    "nested": ((10**5).to_bytes(8, "little") + b"[" * 10**5, "nested too deeply"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_direction_is_refused(name: str, file: Path) -> None:
    data, reason = BAD[name]
    file.write_bytes(data)
    with refused("invalid_vector", reason):
        read_direction(file)


def test_an_override_is_resolved_and_told(tmp_path: Path) -> None:
    store = Store(OVERRIDES, Objects(tmp_path), MIB)
    card = put_content(store, "step", make_content(1))
    lacking: EngineInfo = replace(INFO, lacks={"override": "use transformer_lens"})
    given = ParameterOverride(name="step", eta=-1e-3)
    found = resolve_override(given, store, INFO)
    assert found.used == {"name": "step", "sha256": card.sha256, "eta": -1e-3, "cast": None}
    assert found.override == Override(
        Direction(str(store.look_up("step")[1].path), card.sha256), -1e-3
    )
    wide = resolve_override(given.model_copy(update={"cast": "float32"}), store, INFO)
    assert wide.used == found.used | {"cast": "float32"}
    assert wide.override == replace(found.override, cast="float32")
    job = ScoreJob(np.array([1], np.int32), np.array([2], np.int32))
    assert finish(Interventions(override=found).apply([job])) == [
        replace(job, override=found.override)
    ]
    assert finish(UNCHANGED.apply([job]))[0] is job
    assert resolve_override(None, store, INFO) is None
    with refused("unsupported_by_engine", "transformer_lens"):
        resolve_override(given, store, lacking)
    with pytest.raises(NotFoundError, match="'other'"):
        resolve_override(ParameterOverride(name="other", eta=0.0), store, INFO)

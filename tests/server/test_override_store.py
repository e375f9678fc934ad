"""The override store and its files: what is put in is there, whatever happens to the server."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from logsteer.errors import APIError, NotFoundError, PayloadTooLargeError
from logsteer.schemas import OverrideCard, ParameterOverride
from logsteer_server.contract.jobs import Direction, EngineInfo, Override, ScoreJob
from logsteer_server.interventions.changes import Changes
from logsteer_server.interventions.overrides import resolve_override
from logsteer_server.settings import ConfigurationError, ModelSettings, Settings
from logsteer_server.stores.files import OVERRIDES, FileStore
from logsteer_server.stores.overrides import read_direction
from logsteer_server.stores.tensorfile import PIECE, TensorFileError, read_content
from tests.server.steering_cases import INFO

MIB = 2**20


def make(seed: int, count: int = 100) -> bytes:
    numbers = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    return save({"weight": numbers, "bias": numbers[:3]})


def put(store: FileStore[OverrideCard], name: str, data: bytes) -> OverrideCard:
    incoming = store.receive()
    try:
        incoming.write(data[:7])
        incoming.write(data[7:])
        card = OverrideCard(
            name=name, sha256=incoming.finish(), model="a", weights_digest="b", tensors=2, moved=1,
            total=2, norm=1.0, bytes=incoming.size, created="now",
        )  # fmt: skip
        store.keep(incoming, card)
    finally:
        incoming.discard()
    return card


def files(store: FileStore[OverrideCard]) -> list[str]:
    found = [path for path in store.directory.rglob("*") if path.is_file() and path.name != "lock"]
    return sorted(str(path.relative_to(store.directory)) for path in found)


@pytest.fixture
def store(tmp_path: Path) -> FileStore[OverrideCard]:
    return FileStore(OVERRIDES, tmp_path / "overrides", MIB)


def test_what_is_put_comes_back_after_a_restart(store: FileStore[OverrideCard]) -> None:
    assert not store.directory.exists()
    card = put(store, "step", make(1))
    assert card.sha256 == hashlib.sha256(make(1)).hexdigest()
    again = FileStore(OVERRIDES, store.directory, MIB)
    found = again.find("step")
    assert found.sha256 == card.sha256
    assert Path(found.path).is_absolute()
    assert Path(found.path).read_bytes() == make(1)
    assert again.describe("step") == card
    assert again.list_all() == ([card], len(make(1)))


def test_a_content_goes_with_its_last_name(store: FileStore[OverrideCard]) -> None:
    first, second = put(store, "a", make(1)), put(store, "b", make(1))
    assert first.sha256 == second.sha256
    assert len(files(store)) == 3
    assert store.list_all()[1] == len(make(1))
    other = put(store, "a", make(2))
    assert store.find("b").sha256 == first.sha256
    assert store.delete("b") == first.sha256
    assert files(store) == [f"contents/{other.sha256}.safetensors", "names/a.json"]
    third = put(store, "a", make(3))
    assert files(store) == [f"contents/{third.sha256}.safetensors", "names/a.json"]
    store.delete("a")
    assert files(store) == []
    for call in (store.find, store.describe, store.delete):
        with pytest.raises(NotFoundError, match="none is there yet"):
            call("a")
    put(store, "c", make(1))
    with pytest.raises(NotFoundError, match="'a'; these are there: c"):
        store.find("a")


def test_a_full_store_takes_what_replaces_and_nothing_more(tmp_path: Path) -> None:
    size = len(make(1))
    store = FileStore(OVERRIDES, tmp_path, 2 * size)
    put(store, "a", make(1))
    put(store, "b", make(2))
    put(store, "b", make(3))
    put(store, "c", make(3))
    before = files(store)
    for name in ("d", "b"):  # c has b's content, so that replacing b frees nothing
        with pytest.raises(PayloadTooLargeError, match="override_store_bytes"):
            put(store, name, make(4))
    assert files(store) == before


def test_a_directory_that_cannot_serve_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = FileStore(OVERRIDES, tmp_path / "file" / "below", MIB)
    with pytest.raises(APIError, match="cannot be used") as caught:
        store.receive()
    assert caught.value.code == "internal"
    (tmp_path / "incoming" / "x.part").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="override_directory"):
        FileStore(OVERRIDES, tmp_path, MIB)


def test_a_damaged_card_is_told(store: FileStore[OverrideCard]) -> None:
    put(store, "a", make(1))
    (store.directory / "names" / "a.json").write_text("{")
    with pytest.raises(APIError, match=r"a\.json is damaged"):
        store.find("a")


WRITER = """
import sys
from pathlib import Path
from tests.server.test_override_store import make, put
from logsteer_server.stores.files import OVERRIDES, FileStore
store = FileStore(OVERRIDES, Path(sys.argv[1]), 2**30)
put(store, "a", make(1, 20_000))
print("ready", flush=True)
for number in range(100_000):
    put(store, "a", make(number % 2, 20_000))
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_server_leaves_a_whole_content(tmp_path: Path, seed: int) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE, env=environment, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    busy = FileStore(OVERRIDES, tmp_path, MIB)
    time.sleep(0.15 + 0.013 * seed)
    process.kill()
    process.wait()
    process.stdout.close()
    store = FileStore(OVERRIDES, tmp_path, MIB)
    found = store.find("a")
    assert hashlib.sha256(Path(found.path).read_bytes()).hexdigest() == found.sha256
    assert not list((tmp_path / "incoming").iterdir())
    put(store, "a", make(9))
    assert busy.find("a") == store.find("a")


def test_uploads_at_work_are_no_left_overs(store: FileStore[OverrideCard]) -> None:
    incoming = store.receive()
    incoming.write(make(1))
    FileStore(OVERRIDES, store.directory, MIB)
    assert incoming.path.exists()
    incoming.discard()
    assert files(store) == []


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "direction.safetensors"


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
    "text": (b"hello, this is no tensor at all", "no safetensors file"),
    "short": (b"abc", "cannot be read"),
    "cut": (make(1)[:-4], "cannot be read"),
    "more than announced": (make(1) + b"1234", "cannot be read"),
    "no JSON": ((5).to_bytes(8, "little") + b"hello", "cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_direction_is_refused(name: str, file: Path) -> None:
    data, reason = BAD[name]
    file.write_bytes(data)
    with pytest.raises(APIError, match=reason) as caught:
        read_direction(file)
    assert caught.value.code == "invalid_vector"


def test_an_override_is_resolved_and_told(store: FileStore[OverrideCard]) -> None:
    card = put(store, "step", make(1))
    info: EngineInfo = replace(INFO, features=("override",))
    given = ParameterOverride(name="step", eta=-1e-3)
    found = resolve_override(given, store, info)
    assert found is not None
    assert found.used == {"name": "step", "sha256": card.sha256, "eta": -1e-3}
    assert found.override == Override(Direction(store.find("step").path, card.sha256), -1e-3)
    job = ScoreJob(np.array([1], np.int32), np.array([2], np.int32))
    assert Changes(override=found).apply([job]) == [replace(job, override=found.override)]
    assert Changes().apply([job])[0] is job
    assert resolve_override(None, store, INFO) is None
    with pytest.raises(APIError, match="transformer_lens") as caught:
        resolve_override(given, store, INFO)
    assert caught.value.code == "unsupported_by_engine"
    with pytest.raises(NotFoundError, match="'other'"):
        resolve_override(ParameterOverride(name="other", eta=0.0), store, info)


def test_where_overrides_lie(tmp_path: Path) -> None:
    models = [ModelSettings(id="a", path="here")]
    beside = Settings(models=models, directory=tmp_path, vector_file=Path("v.sqlite"))
    assert beside.override_path == tmp_path / "overrides"
    own = Settings(models=models, directory=tmp_path, override_directory=Path("big"))
    assert own.override_path == tmp_path / "big"

"""Stored vectors and overrides: what comes back, what is refused, and a request resolved."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from logsteer.errors import APIError, NotFoundError
from logsteer.schemas import ParameterOverride
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.contract.plan import Direction, Override
from logsteer_server.interventions.interventions import UNCHANGED, Interventions
from logsteer_server.interventions.references import resolve_override
from logsteer_server.stores import vectors as vectors_module
from logsteer_server.stores.formats.tensor_file import (
    PIECE,
    TensorFileError,
    read_content,
    read_direction,
)
from logsteer_server.stores.layer_vectors import LayerVectors, Readout, parse_content, read_layer
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.store import OVERRIDES, VECTORS, Store
from logsteer_server.stores.vectors import VectorStore
from tests.refusals import refused
from tests.server.plan_steps import finish
from tests.server.steering_cases import INFO
from tests.server.store_cases import ABOUT, make_content, put_content

MIB = 2**20


def make(seed: int, width: int = 8, layers: tuple[int, ...] = (2, 10)) -> LayerVectors:
    random = np.random.default_rng(seed)
    return LayerVectors({layer: random.standard_normal(width) for layer in layers})


def open_store(root: Path, max_bytes: int = MIB) -> VectorStore:
    return VectorStore(Store(VECTORS, Objects(root), max_bytes))


@pytest.fixture
def store(tmp_path: Path) -> VectorStore:
    return open_store(tmp_path)


def test_the_content_address_is_pinned() -> None:
    """These bytes are an address that clients keep; a new safetensors must not move it."""
    vectors = LayerVectors({10: np.array([1.0, -0.0]), 2: np.array([0.5, 2.0])})
    assert vectors.sha256 == "923dab9d6485730d36e5c72fa59d0e9cc3bd7e314cbb9662624f286d003efb00"
    assert parse_content(vectors.content) == vectors


def test_the_address_depends_on_hook_and_numbers_alone() -> None:
    one = make(1)
    assert one == LayerVectors({10: one.layers[10], 2: one.layers[2].astype(np.float64)})
    assert one.sha256 != LayerVectors(one.layers, "attn_out").sha256
    assert one.sha256 != LayerVectors({2: one.layers[2]}).sha256
    zero = LayerVectors({0: np.array([0.0, 1.0])})
    assert zero.sha256 == LayerVectors({0: np.array([-0.0, 1.0])}).sha256


READOUTS = {10: Readout("relu", 1.5, -0.25, 0.5), 2: Readout("logistic", 2.0, -1.5)}


def test_readouts_are_part_of_the_content(store: VectorStore, tmp_path: Path) -> None:
    plain = make(1)
    told = LayerVectors(plain.layers, readouts=READOUTS)
    turned = LayerVectors(plain.layers, readouts=dict(reversed(READOUTS.items())))
    assert told.sha256 == turned.sha256 != plain.sha256
    assert told.sha256 == "abeda58ca20d547c7ca9b46a6d4285c85176d39537c3fa918c0e9386367dfe80"
    assert told != LayerVectors(plain.layers, readouts={2: READOUTS[2]}) != plain
    assert LayerVectors(plain.layers, readouts={}).sha256 == plain.sha256
    store.put("a", told, ABOUT)
    assert store.put("b", plain, ABOUT).readouts is None
    fresh = open_store(tmp_path)
    found = fresh.find("a")
    assert (found.name, found.vectors, found.vectors.readouts) == ("a", told, dict(READOUTS))
    assert fresh.find_content(plain.sha256).vectors == plain
    card = fresh.files.look_up("a")[0].model_dump()
    assert card["layers"] == [2, 10]
    assert card["norms"]["2"] == pytest.approx(np.linalg.norm(plain.layers[2]))
    assert card["readouts"] == {
        "2": {"kind": "logistic", "slope": 2.0, "bias": -1.5, "threshold": 0.0},
        "10": {"kind": "relu", "slope": 1.5, "bias": -0.25, "threshold": 0.5},
    }


@pytest.mark.parametrize(
    ("layer", "fields", "reason"),
    [
        (3, ("logistic", 1.0, 0.0), "a readout for layer 3, and no direction"),
        (7, ("logistic", 1.0, 0.0), "a readout for layer 7, and no direction"),
        (1, ("sigmoid", 1.0, 0.0), "kind is 'sigmoid', not logistic or relu"),
        (1, ("relu", np.nan, 0.0), "slope is nan"),
        (1, ("relu", 1.0, -np.inf), "bias is -inf"),
        (1, ("relu", 1.0, True), "bias is True"),
        (1, ("relu", 1.0, "0"), "bias is 0;"),
        (1, ("relu", 1.0, 10**400), "bias is 1000"),
        (1, ("relu", 1.0, 0.0, -1.0), "threshold is below 0"),
        (1, ("logistic", 1.0, 0.0, 1.0), "which only relu has"),
    ],
)
def test_readouts_that_cannot_be_used_are_refused(
    layer: int, fields: tuple[Any, ...], reason: str
) -> None:
    with refused("invalid_vector", reason):
        LayerVectors({1: np.ones(3), 7: np.zeros(3)}, readouts={layer: Readout(*fields)})


def test_vectors_are_copies_that_nobody_changes() -> None:
    numbers = np.ones(4, dtype=np.float32)
    vectors = LayerVectors({1: numbers})
    numbers[0] = 5
    assert vectors.layers[1][0] == 1
    with pytest.raises(ValueError, match="read-only"):
        vectors.layers[1][0] = 2
    with pytest.raises(TypeError):
        vectors.layers[2] = numbers  # type: ignore[index]


@pytest.mark.parametrize(
    ("layers", "hook", "reason"),
    [
        ({}, "resid_post", "no layers"),
        ({0: np.ones(3), 1: np.ones(4)}, "resid_post", "layer 0 has 3 numbers and layer 1 has 4"),
        ({0: np.array([1.0, np.nan])}, "resid_post", "layer 0 has 1 numbers that are NaN"),
        ({0: np.array([1.0, 1e39])}, "resid_post", "beyond float32; the first is number 1"),
        ({0: np.array([np.inf])}, "resid_post", "infinite"),
        ({0: np.zeros(3), 1: np.zeros(3)}, "resid_post", "every number is 0"),
        ({-1: np.ones(3)}, "resid_post", "layer -1 is outside"),
        ({4096: np.ones(3)}, "resid_post", "layer 4096 is outside"),
        ({0: np.ones((2, 3))}, "resid_post", r"shape \[2, 3\]"),
        ({0: np.ones(0)}, "resid_post", "0 numbers"),
        ({0: np.ones(2**20 + 1)}, "resid_post", "1048577 numbers"),
        ({0: np.ones(3)}, "../up", "not the name of an activation"),
    ],
)
def test_vectors_that_cannot_be_used_are_refused(layers: object, hook: str, reason: str) -> None:
    with refused("invalid_vector", reason):
        LayerVectors(layers, hook)  # type: ignore[arg-type]


def test_a_turned_bit_is_noticed(store: VectorStore) -> None:
    card = store.put("a", make(1), ABOUT)
    path = Path(store.files.look_up("a")[1].source)
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    for find, key in ((store.find, "a"), (store.find_content, card.sha256)):
        with pytest.raises(APIError, match="is damaged"):
            find(key)


def test_a_content_is_parsed_once(store: VectorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    card = store.put("a", make(1), ABOUT)
    first = store.find("a").vectors
    monkeypatch.setattr(vectors_module, "parse_content", lambda content: pytest.fail("read again"))
    assert store.find("a").vectors is first
    assert store.find_content(card.sha256).vectors is first
    store.put("b", make(1), ABOUT)
    assert store.find("b").vectors is first


def test_a_layer_is_read_alone(tmp_path: Path) -> None:
    vectors = make(1)
    path = tmp_path / "content"
    path.write_bytes(vectors.content)
    assert np.array_equal(read_layer(path, 10, "resid_post"), vectors.layers[10])
    for layer, hook in ((3, "resid_post"), (10, "attn_out")):
        with pytest.raises(ValueError, match=f"no layer {layer} of {hook}"):
            read_layer(path, layer, hook)


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
        Direction(store.look_up("step")[1].source, card.sha256), -1e-3
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

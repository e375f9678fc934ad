"""The store of vectors: what is put in comes back parsed, whatever happens to the server."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logsteer.errors import APIError
from logsteer_server.stores import vectors as vectors_module
from logsteer_server.stores.layer_vectors import LayerVectors, Readout, parse_content, read_layer
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.store import VECTORS, Store
from logsteer_server.stores.vectors import VectorStore
from tests.refusals import refused
from tests.server.store_cases import ABOUT

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
    path = store.files.look_up("a")[1].path
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

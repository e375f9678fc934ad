"""Readers of what others wrote: valid files, changed at random, are taken or refused.

Bits, integers, lengths, pieces and JSON headers are changed; a refusal is an APIError of 4xx.
`INPUTS=20000` has each reader read so many.
"""

import copy
import io
import json
import os
import random
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import save

from logsteer.errors import APIError
from logsteer.schemas import Steering, VectorCard
from logsteer_server.interventions.steering import resolve_steering
from logsteer_server.stores.formats import vector_file
from logsteer_server.stores.formats.gguf_file import render_gguf
from logsteer_server.stores.formats.tensor_file import join_files, read_adapter, read_direction
from logsteer_server.stores.formats.vector_file import read_file
from logsteer_server.stores.layer_vectors import (
    READOUTS,
    LayerVectors,
    Readout,
    parse_safetensors,
    render_readouts,
)
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.store import VECTORS, NameRecord, Store
from logsteer_server.stores.vectors import StoredVectors
from tests.refusals import refused
from tests.server.steering_cases import INFO

INPUTS = int(os.environ.get("INPUTS", "400"))
FILES = Path(__file__).parents[1] / "server" / "vector_files"
INTEGERS = [0, 1, 2, 7, 8, 32, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40,
            2**62, 2**63 - 1, 2**63, 2**64 - 1]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 3.5, -0.0, 1e308, -1e308, 5e-324, 1e39, 2**31, 2**63, 2**64,
    10**30, "", "a", "0", "-1", "é\u0000", "F32", "F64", "BF16", "I64", "F8_E4M3", "x" * 300, [],
    {}, [[]], [0], [1, 2], [2**63, 2**63], [-1, 4], {"a": 1}, "blocks.1.hook_resid_post", "1",
]  # fmt: skip


# ------------------------------------------------------------------ changes


def mutate(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Return a file changed at one to four places."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        place = rng.randrange(len(found) + 1)
        match rng.randrange(9):
            case 0 if found:
                found[place % len(found)] ^= 1 << rng.randrange(8)
            case 1 if found:
                found[place % len(found)] = rng.randrange(256)
            case 2:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice(INTEGERS) % 2 ** (8 * size)
                found[place : place + size] = number.to_bytes(size, "little")
            case 3:
                del found[place:]
            case 4:
                found += rng.randbytes(rng.choice((1, 8, 100)))
            case 5:
                del found[place : place + rng.choice((1, 4, 8, 64))]
            case 6:
                piece = found[place : place + rng.choice((1, 8, 64, 512))]
                found[place:place] = piece * rng.choice((1, 2, 50))
            case 7:
                other = rng.choice(others)
                start = rng.randrange(len(other) + 1)
                found[place : place + rng.choice((0, 8, 64))] = other[start : start + 200]
            case 8:
                near = max(0, place - 64)
                found[near:place] = rng.randbytes(place - near)
    return bytes(found)


def mutate_json(document: Any, rng: random.Random) -> Any:
    """Return a document with one value, key or length changed, at any depth."""
    places = list(_walk(document))
    if not places:
        return rng.choice(VALUES)
    parent, key = rng.choice(places)
    match rng.randrange(6):
        case 0 | 1 | 2:
            parent[key] = copy.deepcopy(rng.choice(VALUES))
        case 3:
            del parent[key]
        case 4 if isinstance(parent, dict):
            name = rng.choice(["", "a", "scale", "1", "shape", "dtype", "__metadata__", str(key)])
            parent[name + rng.choice(("", "x"))] = copy.deepcopy(parent[key])
        case 5 if isinstance(parent, list):
            parent.extend(copy.deepcopy(parent[key]) for _ in range(rng.choice((1, 70, 5000))))
        case _ if isinstance(parent[key], int | float) and parent[key] == parent[key]:
            parent[key] = rng.choice((-1, 2, 1e300, 0)) * parent[key] + rng.choice((0, 1, -1))
    return document


def _walk(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        entries = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, entry in entries[:200]:
            yield value, key
            yield from _walk(entry)


def mutate_safetensors(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Change the header as JSON in half of the cases, the bytes in the others."""
    if rng.random() < 0.5:
        return mutate(data, rng, others)
    size = int.from_bytes(data[:8], "little")
    header = mutate_json(json.loads(data[8 : 8 + size]), rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def mutate_text(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Change JSON as JSON in most cases, as bytes in the others."""
    if rng.random() < 0.2:
        return mutate(data, rng, others)
    document = json.loads(data)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        document = mutate_json(document, rng)
    return json.dumps(document).encode()


# ------------------------------------------------------------------ what is read

Mutate = Callable[[bytes, random.Random, list[bytes]], bytes]


@dataclass(frozen=True)
class Target:
    """One reader: the valid inputs, how they are changed, and what reads them.

    `read` returns where it takes an input; `refusals` are the errors by which it may refuse one.
    """

    corpus: Callable[[], list[bytes]]
    mutate: Mutate
    read: Callable[[bytes, Path], object]
    refusals: tuple[type[Exception], ...] = ()


def make_tensors() -> list[bytes]:
    rng = np.random.default_rng(1)
    numbers = rng.normal(size=(2, 8)).astype(np.float32)
    return [
        LayerVectors({1: numbers[0], 3: numbers[1]}).content,
        LayerVectors({1: numbers[0]}, readouts={1: Readout("relu", 2.0, -0.5, 0.25)}).content,
        save({"layer.1": numbers[0], "layer.2": numbers[1].astype(np.float16)}),
        save({"0": numbers[:1].astype(np.float64)}, {"format": "pt"}),
        save({"a": numbers, "b": np.zeros((0, 3), np.float32), "c": numbers[0]}),
    ]


def make_gguf() -> list[bytes]:
    numbers = np.arange(1, 9, dtype=np.float32)
    told = {READOUTS: render_readouts({1: Readout("logistic", 2.0, -0.5)})}
    whole = render_gguf({1: numbers, 2: -numbers}, "llama", told)
    return [
        render_gguf({1: numbers, 2: -numbers}, "llama"),
        whole,
        (FILES / "repeng.gguf").read_bytes(),
    ]


CONFIG = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none",
    "use_rslora": False, "fan_in_fan_out": False, "rank_pattern": {},
}  # fmt: skip


def make_adapters() -> list[bytes]:
    """Configuration and weights, each behind its length."""
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    rng = np.random.default_rng(2)
    weights = {}
    for layer in range(2):
        weights[name.format(layer, "A")] = rng.normal(size=(2, 8)).astype(np.float32)
        weights[name.format(layer, "B")] = rng.normal(size=(8, 2)).astype(np.float32)
    return [_join(json.dumps(CONFIG).encode(), save(weights, {"format": "pt"}))]


def _join(config: bytes, weights: bytes) -> bytes:
    return struct.pack("<I", len(config)) + config + weights


def mutate_adapter(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Change the configuration, the weights, or both."""
    size = struct.unpack("<I", data[:4])[0]
    config, weights = data[4 : 4 + size], data[4 + size :]
    which = rng.randrange(3)
    if which != 0:
        config = mutate_text(config, rng, others)
    if which != 1:
        weights = mutate_safetensors(weights, rng, others)
    return _join(config, weights)


def read_vectors(data: bytes, _place: Path) -> None:
    """Read a vector's file as an upload does."""
    try:
        name = vector_file.sniff_format(data)
    except APIError:
        name = "gguf" if b"direction" in data else "safetensors"
    read = vector_file.read_file(data, name)
    assert parse_safetensors(read.vectors.content) == read.vectors


def read_override(data: bytes, place: Path) -> None:
    path = place / "override"
    path.write_bytes(data)
    read_direction(path)


def read_adapter_files(data: bytes, place: Path) -> None:
    size = struct.unpack("<I", data[:4])[0]
    path = place / "adapter"
    with path.open("wb") as file:
        join_files(data[4 : 4 + size], io.BytesIO(data[4 + size :]), file.write)
    read_adapter(path)


def make_cards() -> list[bytes]:
    about = {"source": "upload", "format": "gguf"}
    card = VectorCard(
        name="a", sha256="0" * 64, hook="resid_post", layers=[1], width=3, norms={"1": 0.5},
        bytes=9, created="now", about=about,
    )  # fmt: skip
    content = f"{card.sha256}-7.safetensors"
    record = NameRecord[VectorCard](card=card, content=content, request="request")
    return [record.model_dump_json().encode()]


def read_card(data: bytes, place: Path) -> None:
    objects = Objects(place)
    objects.write(data, "vectors/names/a.json", create=False)
    record = Store(VECTORS, objects, 2**20)._read_record("a")
    assert record is None or (record.card.name == "a" and len(record.card.sha256) == 64)


STEERINGS: list[dict[str, Any]] = [
    {"vectors": [{"name": "happy", "scale": 4.0}], "positions": "all"},
    {"vectors": [{"sha256": "0" * 64, "op": "ablate", "layers": [1]}]},
    {"vectors": [{"data": {"1": [0.5] * 8, "2": [1.0] * 8}, "unit": "unit", "scale": -2.0}]},
    {"vectors": [{"data": {"1": "AACAPwAAgD8AAIA/AACAPwAAgD8AAIA/AACAPwAAgD8="}, "scale": 1}]},
    {"vectors": [{"name": "happy", "op": "clamp", "params": {"min": -1.0, "max": 2.0}}],
     "positions": {"slices": [[0, 5], [7, 9]]}},
    {"vectors": [{"name": "happy", "op": "rotate", "scale": 90.0, "hook": "resid_post"},
                 {"name": "happy", "op": "project", "unit": "residual_norm"},
                 {"name": "happy", "op": "replace", "unit": "unit"}], "positions": "completion"},
]  # fmt: skip


class OneVector:
    """A store that finds one vector under every name."""

    vectors = LayerVectors({1: np.arange(1, INFO.hidden_size + 1)})

    def find(self, name: str) -> StoredVectors:
        return StoredVectors(name, self.vectors.sha256, self.vectors)

    def find_content(self, sha256: str) -> StoredVectors:
        return StoredVectors(None, sha256, self.vectors)


def make_steerings() -> list[bytes]:
    texts = [json.dumps(steering) for steering in STEERINGS]
    # Vectors as wide as the engine's, whatever that is.
    wide = json.dumps([0.5] * INFO.hidden_size)
    return [text.replace(json.dumps([0.5] * 8), wide).encode() for text in texts]


def read_steering(data: bytes, _place: Path) -> None:
    steering = Steering.model_validate_json(data)
    resolved = resolve_steering(steering, OneVector(), INFO)
    for site in resolved.plan.sites:
        assert site.offset is None or np.isfinite(site.offset).all()
        assert all(np.isfinite(op.direction).all() for op in site.ops)
    resolved.plan.positions.count(20, 5)


TARGETS: dict[str, Target] = {
    "vector safetensors": Target(make_tensors, mutate_safetensors, read_vectors),
    "vector gguf": Target(make_gguf, mutate, read_vectors),
    "override": Target(make_tensors, mutate_safetensors, read_override),
    "adapter": Target(make_adapters, mutate_adapter, read_adapter_files),
    "card": Target(make_cards, mutate_text, read_card),
    # One whose mark has changed is another program's for all that can be told: it is left alone.
    "steering": Target(make_steerings, mutate_text, read_steering, (ValidationError,)),
}


def fuzz(name: str, count: int, place: Path) -> tuple[int, int]:
    """Read `count` changed inputs of a target; return how many were taken and refused.

    What is read last is `place / "input"`: that of a finding, which is any other error.
    """
    target, taken = TARGETS[name], 0
    corpus, rng = target.corpus(), random.Random(name)
    for _ in range(count):
        data = target.mutate(rng.choice(corpus), rng, corpus)
        (place / "input").write_bytes(data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                target.read(data, place)
            taken += 1
        except APIError as error:
            assert 400 <= error.status < 500, error
        except target.refusals:
            pass
    return taken, count - taken


@pytest.mark.parametrize("name", TARGETS)
def test_changed_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    taken, refused = fuzz(name, INPUTS, tmp_path)
    assert taken, "some changes leave a file that can be read"
    assert name == "card" or refused > INPUTS / 4  # damage is no error there


# ------------------------------------------------------------------ faults that it has found


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

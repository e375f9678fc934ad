"""What is stored as tensors, vectors and overrides; and what a request's steering comes to."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import save

from logsteer.errors import APIError
from logsteer.schemas import (
    ProbeRequest,
    Recommendation,
    Steering,
    SteeringCondition,
    VectorAbout,
    VectorCard,
)
from logsteer.schemas.steering import Steer, parse_layers
from logsteer_server.contract.jobs import GenerateJob, ScoreJob
from logsteer_server.contract.plan import (
    MAX_CONDITIONS,
    Condition,
    Positions,
    Readings,
    SteeringPlan,
)
from logsteer_server.interventions.interventions import Interventions, Stores
from logsteer_server.interventions.probes import (
    resolve_condition,
    resolve_probes,
    show_readings,
)
from logsteer_server.interventions.references import find_fitting
from logsteer_server.interventions.steering import ResolvedSteering, resolve_steering
from logsteer_server.stores import vectors as vectors_module
from logsteer_server.stores.formats.tensor_file import (
    PIECE,
    read_content,
    read_direction,
)
from logsteer_server.stores.layer_vectors import (
    LayerVectors,
    Readout,
    parse_readouts,
    parse_safetensors,
    read_layer,
)
from logsteer_server.stores.vectors import StoredVectors, VectorStore, open_vectors
from logsteer_server.tasks.sweep import plan_settings
from tests.refusals import refused
from tests.server.steering_cases import INFO, NoVectors
from tests.server.store_cases import ABOUT, make_content

MIB = 2**20


def make(seed: int, width: int = 8, layers: tuple[int, ...] = (2, 10)) -> LayerVectors:
    random = np.random.default_rng(seed)
    return LayerVectors({layer: random.standard_normal(width) for layer in layers})


@pytest.fixture
def store(tmp_path: Path) -> VectorStore:
    return open_vectors(tmp_path, MIB)


def test_the_content_address_is_pinned() -> None:
    """These bytes are an address that clients keep; a new safetensors must not move it."""
    vectors = LayerVectors({10: np.array([1.0, -0.0]), 2: np.array([0.5, 2.0])})
    assert vectors.sha256 == "923dab9d6485730d36e5c72fa59d0e9cc3bd7e314cbb9662624f286d003efb00"
    assert parse_safetensors(vectors.content) == vectors


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
    fresh = open_vectors(tmp_path)
    found = fresh.find("a")
    assert (found.name, found.vectors, found.vectors.readouts) == ("a", told, dict(READOUTS))
    assert fresh.find_content(plain.sha256).vectors == plain
    card = fresh.look_up("a")[0].model_dump()
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
        (1, ("sigmoid", 1.0, 0.0), "does not map layers to readouts"),
        (1, ("relu", np.nan, 0.0), "does not map layers to readouts"),
        (1, ("relu", 1.0, -np.inf), "does not map layers to readouts"),
        (1, ("relu", 1.0, True), "does not map layers to readouts"),
        (1, ("relu", 1.0, "0"), "does not map layers to readouts"),
        (1, ("relu", 1.0, 10**400), "does not map layers to readouts"),
        (1, ("relu", 1.0, 0.0, -1.0), "does not map layers to readouts"),
    ],
)
def test_readouts_that_cannot_be_used_are_refused(
    layer: int, fields: tuple[Any, ...], reason: str
) -> None:
    names = ("kind", "slope", "bias", "threshold")
    text = json.dumps({str(layer): dict(zip(names, fields, strict=False))})
    with refused("invalid_vector", reason):
        LayerVectors({1: np.ones(3), 7: np.zeros(3)}, readouts=parse_readouts(text))


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


def test_a_content_is_parsed_once(store: VectorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    card = store.put("a", make(1), ABOUT)
    first = store.find("a").vectors
    monkeypatch.setattr(
        vectors_module, "parse_safetensors", lambda content: pytest.fail("read again")
    )
    assert store.find("a").vectors is first
    assert store.find_content(card.sha256).vectors is first
    store.put("a", make(1), ABOUT.model_copy(update={"weights_digest": "theirs"}))
    assert store.find_content(card.sha256).weights_digest == "theirs"
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
    with pytest.raises(ValueError, match="NaN or infinite"):
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


# ------------------------------------------------------------------ steering, resolved


ONES = [1.0] * INFO.hidden_size
IDS = np.arange(10, dtype=np.int32)


def resolve(*vectors: dict[str, Any], positions: Any = "all") -> ResolvedSteering:
    given = [{"data": {"1": ONES}} | vector for vector in vectors]
    steering = Steering.model_validate({"vectors": given, "positions": positions})
    return resolve_steering(steering, NoVectors(), INFO)


def test_vectors_of_one_layer_are_one_offset() -> None:
    plan = resolve({"scale": 2.0}, {"scale": 0.5}, {"data": {"3": ONES}}).plan
    assert [(site.layer, site.ops) for site in plan.sites] == [(1, ()), (3, ())]
    np.testing.assert_array_equal(plan.sites[0].offset, np.full(24, 2.5, np.float32))


class OneTrained:
    """A store whose only vector has two layers, and what its training recommends, if anything."""

    def __init__(self, advice: Recommendation | None, weights_digest: str | None = None) -> None:
        vectors = LayerVectors({1: np.ones(24, np.float32), 3: np.ones(24, np.float32)})
        self._stored = StoredVectors("mood", vectors.sha256, vectors, advice, weights_digest)

    def find(self, name: str) -> StoredVectors:
        return self._stored

    find_content = find

    def find_feature(self, name: str, feature: int | str, *, reads: bool) -> StoredVectors:
        return self._stored


ADVICE = Recommendation(layer=3, scale=1.5, relative_norm=0.5, recommended_by="effect", reason="")


@pytest.mark.parametrize(
    ("given", "advice", "scale", "layers"),
    [
        ("mood", ADVICE, 1.5, [3]),
        ("mood:4", ADVICE, 4.0, [3]),
        ("mood@1", ADVICE, 1.5, [1]),
        ("mood:-2.5@1,3", ADVICE, -2.5, [1, 3]),
        ("mood", None, 1.0, [1, 3]),
        (["mood"], ADVICE, 1.5, [3]),
        (Steer("mood"), ADVICE, 1.5, [3]),
        (Steer("mood", op="ablate"), ADVICE, 1.0, [3]),
        (Steer("mood", unit="residual_norm"), ADVICE, 1.0, [3]),
        ({"vectors": ["mood"], "positions": "prompt"}, ADVICE, 1.5, [3]),
        ({"vectors": [{"name": "mood"}]}, ADVICE, 1.0, [1, 3]),
        ("mood@1:all", ADVICE, 1.0, [0, 1, 2, 3]),
        ("mood:0.5@3:all", None, 0.5, [0, 1, 2, 3]),
        (Steer("mood", 2.0, from_layer=1), ADVICE, 2.0, [0, 1, 2, 3]),
        ({"vectors": [{"name": "mood", "from_layer": 3, "layers": [0]}]}, ADVICE, 1.0, [0]),
    ],
)
def test_what_is_left_out_is_what_training_recommends(
    given: Any, advice: Recommendation | None, scale: float, layers: list[int]
) -> None:
    found = resolve_steering(Steering.model_validate(given), OneTrained(advice), INFO)
    assert [used.scale for used in found.vectors] == [scale]
    assert [site.layer for site in found.plan.sites] == layers


def test_a_direction_for_every_layer_is_ablated_and_one_of_the_vector_s() -> None:
    found = resolve_steering(Steering.model_validate("mood:0.5@3:all"), OneTrained(None), INFO)
    (op,) = {(op.per_component, op.direction.tobytes()) for s in found.plan.sites for op in s.ops}
    assert op[0] == 0.5
    with refused("invalid_vector", r"has layers \[1, 3\], not from_layer 2"):
        resolve_steering(Steering.model_validate("mood@2:all"), OneTrained(None), INFO)
    with pytest.raises(ValueError, match=":all takes one layer"):
        Steering.model_validate("mood@1-3:all")


@pytest.mark.parametrize(
    ("digest", "changes", "fits", "is_other"),
    [
        ("none", {}, True, False),
        ("another", {}, True, True),
        (None, {}, True, False),
        (None, {"width": 8}, False, False),
        (None, {"layers": [1, 9]}, False, False),
        (None, {"layers": [9]}, True, False),
        (None, {"hook": "attn_out"}, False, False),
        (None, {"hook": "resid_pre"}, True, False),
    ],
)
def test_vectors_that_fit_a_model(
    digest: str | None, changes: dict[str, Any], fits: bool, is_other: bool
) -> None:
    about = VectorAbout(source="training", weights_digest=digest)
    card = VectorCard(name="v", sha256="", hook="resid_post", layers=[1, 3], width=24, norms={},
                      bytes=0, created="", about=about)  # fmt: skip
    found = find_fitting([card.model_copy(update=changes)], INFO)
    assert [one.other_weights for one in found] == [is_other] * fits


def test_a_receipt_marks_a_vector_of_other_weights() -> None:
    for digest, is_other in ((INFO.weights_digest, False), ("another", True), (None, False)):
        source = OneTrained(None, digest)
        (used,) = resolve_steering(Steering.model_validate("mood"), source, INFO).vectors
        assert used.other_weights == is_other


def test_a_sweep_counts_a_scale_left_out_as_1() -> None:
    stores = Stores(OneTrained(ADVICE), None, None, None, None, None)  # type: ignore[arg-type]
    steering = Steering.model_validate("mood")
    _, swept = plan_settings(steering, [-3.0], None, Interventions(), stores, INFO)
    assert [used.scale for used in swept.interventions.steering.vectors] == [-3.0]


def test_base64_is_the_same_as_numbers() -> None:
    packed = base64.b64encode(np.array(ONES, "<f4").tobytes()).decode()
    text, numbers = resolve({"data": {"1": packed}}), resolve({})
    assert text.plan.digest(5) == numbers.plan.digest(5)
    assert text.vectors == numbers.vectors


def test_a_vector_of_one_layer_may_go_to_any() -> None:
    plan = resolve({"layers": [0, 2]}).plan
    assert [site.layer for site in plan.sites] == [0, 2]


def test_resid_pre_is_the_stream_that_leaves_the_block_before() -> None:
    (site,) = resolve({"hook": "resid_pre"}).plan.sites
    assert (site.layer, site.hook) == (0, "resid_post")


@pytest.mark.parametrize(
    ("vector", "code", "says"),
    [
        ({"data": {"4": ONES}}, "invalid_vector", "used at layer 4, the model's are 0 to 3"),
        ({"data": {"1": ONES[:5]}}, "invalid_vector", "5 numbers a layer"),
        ({"data": {"1": "!"}}, "invalid_vector", "base64"),
        ({"data": {"1": ONES, "2": ONES}, "layers": [3]}, "invalid_vector", r"not \[3\]"),
        ({"data": {"1": [0.0] * 24, "2": ONES}, "op": "ablate"}, "invalid_vector", "no direction"),
        ({"scale": 1e38}, "invalid_vector", "beyond what a model in float32"),
        ({"hook": "attn_out"}, "unsupported_by_engine", "steers resid_post, not attn_out"),
        ({"data": None, "name": "happy"}, "unknown_vector", "happy"),
    ],
)
def test_what_cannot_be_done_is_said(vector: dict[str, Any], code: str, says: str) -> None:
    with refused(code, says):
        resolve(vector)


@pytest.mark.parametrize(
    "vector",
    [
        {"name": "happy"},
        {"op": "clamp"},
        {"op": "clamp", "params": {"min": 2.0, "max": 1.0}},
        {"op": "add", "params": {"min": 2.0}},
        {"op": "rotate", "scale": 181.0},
        {"op": "ablate", "unit": "unit"},
        {"scale": float("nan")},
        {"layers": [1, 1]},
    ],
)
def test_objects_that_contradict_themselves_are_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        resolve(vector)


def digest(plan: SteeringPlan, kind: str, prompt_len: int) -> bytes:
    return SteeringPlan(plan.sites, Positions(kind)).digest(prompt_len)


def test_the_digest_knows_all_that_makes_a_difference() -> None:
    plans = [
        resolve({}).plan,
        resolve({"scale": 2.0}).plan,
        resolve({"layers": [2]}).plan,
        resolve({"op": "ablate"}).plan,
        resolve({"op": "rotate", "scale": 3.0}).plan,
        resolve({}, positions={"slices": [(0, 3)]}).plan,
        resolve({}, positions="prompt").plan,
    ]
    assert len({plan.digest(5) for plan in plans}) == len(plans)
    assert digest(plans[0], "prompt", 5) != digest(plans[0], "prompt", 6)
    assert digest(plans[0], "all", 5) == digest(plans[0], "all", 6)


def test_a_plan_that_reaches_no_token_is_an_error() -> None:
    steering = resolve({}, positions="completion")
    changes = Interventions(steering)
    one_token = ScoreJob(IDS, IDS[-1:])
    with pytest.raises(APIError, match="reaches no token"):
        changes.apply([one_token])
    with pytest.raises(APIError, match="reaches no token"):
        changes.apply([GenerateJob(IDS, 1)])
    with pytest.raises(APIError, match="reaches no token"):
        changes.apply([])  # an echo without log-probabilities
    longer = ScoreJob(IDS, IDS[-2:])
    assert [job.plan for job in changes.apply([one_token, longer])] == [steering.plan] * 2


@pytest.mark.parametrize("text", ["0-999999", "0-9999,0-9999", "1,2,2-1"])
def test_a_text_names_no_more_layers_than_models_have(text: str) -> None:
    """Ten kilobytes of `0-999999,` made a list of a billion layers."""
    with pytest.raises(ValueError, match="not a list of layers"):
        parse_layers(text)


@dataclass(frozen=True)
class OneStored:
    """A source with one vector, whatever it is called: threes at layer 1."""

    readout: Readout | None = None

    def find(self, name: str) -> StoredVectors:
        numbers = np.full(INFO.hidden_size, 3, dtype=np.float32)
        readouts = {} if self.readout is None else {1: self.readout}
        vectors = LayerVectors({1: numbers}, readouts=readouts)
        return StoredVectors(name, vectors.sha256, vectors)

    find_content = find


def resolve_when(
    readout: Readout | None = None, read: str = "projection", **bounds: Any
) -> Condition:
    given = {"probe": {"name": "v", "read": read}} | bounds
    condition = SteeringCondition.model_validate(given)
    return resolve_condition(condition, 0, OneStored(readout), INFO)[1]


@pytest.mark.parametrize(
    ("fields", "above", "below"),
    [
        ({"read": "probability", "above": 0.5}, -2.0, np.inf),
        ({"read": "probability", "above": 0.5, "below": 1.0}, -2.0, np.inf),
        ({"read": "probability", "above": 0.0, "below": 0.5}, -np.inf, -2.0),
    ],
)
def test_thresholds_of_a_probability(fields: dict[str, Any], above: float, below: float) -> None:
    found = resolve_when(Readout("logistic", 0.5, 1.0), **fields)
    assert (found.above, found.below) == (above, below)
    turned = resolve_when(Readout("logistic", -0.5, -1.0), **fields)
    assert (turned.above, turned.below) == ((-np.inf, -2.0) if above == -2.0 else (-2.0, np.inf))


@pytest.mark.parametrize(
    ("bounds", "above", "below"),
    [
        ({"above": 0.0}, 0.5, np.inf),
        ({"above": 3.0}, 1.25, np.inf),
        ({"below": 3.0}, -np.inf, 1.25),
        ({"below": 0.5}, -np.inf, 0.5),
        ({"above": 2.0, "below": 3.0}, 0.75, 1.25),
    ],
)
def test_thresholds_of_an_activation(bounds: dict[str, float], above: float, below: float) -> None:
    """z = 2 c + 0.5 where that is above 1.5, else 0: above 1.5 is c above 0.5."""
    readout = Readout("relu", 2.0, 0.5, 1.5)
    found = resolve_when(readout, read="activation", **bounds)
    assert (found.above, found.below) == (above, below)


def test_a_layer_is_read_along_one_array_however_often_it_is_named() -> None:
    asked = [ProbeRequest.model_validate({"name": "v", "layers": [0, 1, 2]})]
    found = resolve_probes(asked, OneStored(), INFO)
    assert len({id(one.probe.direction) for one in found}) == 1
    assert np.linalg.norm(found[0].probe.direction) == pytest.approx(1)


def test_more_probes_than_there_is_room_for_are_refused_before_they_are_made() -> None:
    asked = [ProbeRequest.model_validate({"name": "v", "layers": [0, 1, 2]})] * 2
    assert len(resolve_probes(asked, OneStored(), replace(INFO, max_probes=6))) == 6
    with refused("unsupported_by_engine", "may have 5 probes"):
        resolve_probes(asked, OneStored(), replace(INFO, max_probes=5))


def test_as_many_conditions_as_engines_keep_and_no_more() -> None:
    when = {"probe": {"data": {"1": ONES}}, "above": 0.0}
    vector = {"data": {"1": ONES}, "when": when}
    most = Steering.model_validate({"vectors": [vector] * MAX_CONDITIONS})
    plan = resolve_steering(most, NoVectors(), INFO).plan
    assert len(plan.conditions) == MAX_CONDITIONS
    more = Steering.model_validate({"vectors": [vector] * (MAX_CONDITIONS + 1)})
    with pytest.raises(APIError, match="at most 31 conditions"):
        resolve_steering(more, NoVectors(), INFO)


def test_readings_that_are_no_numbers_are_flagged() -> None:
    asked = [ProbeRequest.model_validate({"name": "v", "read": "cosine"})]
    probes = resolve_probes(asked, OneStored(), INFO)
    values = np.array([[[1.0, 2.0, 1.0, 2.0]], [[0.0, 0.0, 0.0, 0.0]]], dtype=np.float32)
    (fine,) = show_readings(probes, Readings(4, values[:1]), 4, False)["probes"]
    (lost,) = show_readings(probes, Readings(4, values), 4, False)["probes"]
    assert (fine["flags"], lost["flags"]) == ([], ["non_finite"])

"""Features of SAELens' autoencoders as vectors and probes, against its encoder's formulas."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save_file

from logsteer import LogsteerError
from logsteer.extras.sae import SaeConfig, SaeFeature, extract_feature
from logsteer.extras.tensors import TensorFile
from logsteer_server.stores.formats.vector_file import read_file

WIDTH, SIZE, FEATURE = 6, 9, 4
Tensors = dict[str, np.ndarray]
RANDOM = np.random.default_rng(0)
BASE: Tensors = {
    "W_enc": RANDOM.standard_normal((WIDTH, SIZE)),
    "W_dec": RANDOM.standard_normal((SIZE, WIDTH)),
    "b_enc": RANDOM.standard_normal(SIZE),
    "b_dec": RANDOM.standard_normal(WIDTH),
}
THRESHOLD = {"threshold": np.linspace(-0.5, 1.1, SIZE)}
GATED = {name: RANDOM.standard_normal(SIZE) for name in ("b_gate", "b_mag", "r_mag")}
PRE = {"architecture": "standard", "hook_name": "blocks.3.hook_resid_pre"}


def save(
    directory: Path, config: dict[str, Any] | None = None, **changes: np.ndarray | None
) -> Path:
    """Write an autoencoder as SAELens does; None leaves a tensor out."""
    tensors: dict[str, np.ndarray | None] = {**BASE, **changes}
    kept = {name: np.float32(value) for name, value in tensors.items() if value is not None}
    directory.mkdir(exist_ok=True)
    save_file(kept, directory / "sae_weights.safetensors")
    sizes = {"d_in": WIDTH, "d_sae": SIZE}
    (directory / "cfg.json").write_text(json.dumps({**sizes, **PRE, **(config or {})}))
    return directory


def encode(x_ND: np.ndarray, tensors: Tensors, config: dict[str, Any], scale: float) -> np.ndarray:
    """The activations [N, features] by the formulas of SAELens' encoders."""
    centred_ND = scale * x_ND - tensors["b_dec"] * config.get("apply_b_dec_to_input", True)
    product = centred_ND @ tensors["W_enc"]
    if config["architecture"] == "gated":
        gate = product + tensors["b_gate"] > 0
        return gate * np.maximum(centred_ND @ (tensors["W_enc"] * np.exp(tensors["r_mag"]))
                                 + tensors["b_mag"], 0)  # fmt: skip
    z = product + tensors["b_enc"]
    floor = tensors.get("threshold", np.zeros(SIZE))
    return np.maximum(z, 0) * (z > np.maximum(floor, 0))


def read_feature(
    directory: Path, feature: int, layer: int | None = None, activation_scale: float | None = None
) -> SaeFeature:
    """Extract one feature as the server does."""
    path = directory / "cfg.json"
    config = SaeConfig.parse(path.read_bytes(), path)
    place, scale = config.choose_place(layer), config.choose_scale(activation_scale)
    tensors = TensorFile(np.fromfile(directory / "sae_weights.safetensors", np.uint8))
    return extract_feature(tensors, config, feature, place, scale)


def read_out(found: SaeFeature, x_ND: np.ndarray) -> np.ndarray:
    """The activations that a server would give, from the stored probe and its readout."""
    stored = read_file(found.probe).vectors
    ((layer, readout),) = stored.readouts.items()
    probe_D = stored.layers[layer].astype(float)
    z = readout.slope * (x_ND @ probe_D) / np.linalg.norm(probe_D) + readout.bias
    return np.where(z > readout.threshold, z, 0)


@pytest.mark.parametrize("feature", range(SIZE))
@pytest.mark.parametrize(
    ("config", "changes", "scale"),
    [
        ({"architecture": "standard"}, {}, None),
        ({"architecture": "standard", "apply_b_dec_to_input": False}, {}, None),
        ({"architecture": "jumprelu"}, THRESHOLD, None),
        ({"architecture": "gated"}, {**GATED, "b_enc": None}, None),
        (
            {"architecture": "jumprelu", "normalize_activations": "expected_average_only_in"},
            THRESHOLD,
            0.25,
        ),
    ],
)
def test_a_readout_gives_the_encoder_s_activation(
    tmp_path: Path, feature: int, config: dict[str, Any], changes: Any, scale: float | None
) -> None:
    found = read_feature(save(tmp_path, config, **changes), feature, activation_scale=scale)
    x_ND = 3 / (scale or 1.0) * np.random.default_rng(1).standard_normal((400, WIDTH))
    tensors = {name: np.float32(value) for name, value in {**BASE, **changes}.items()
               if value is not None}  # fmt: skip
    expected = encode(x_ND, tensors, config, scale or 1.0)[:, feature]
    given = read_out(found, x_ND)
    assert 0 < np.count_nonzero(expected) < 400
    assert np.allclose(given, expected, atol=1e-5)
    vector = read_file(found.vector).vectors
    assert (list(vector.layers), vector.hook) == ([2], "resid_post")
    assert np.allclose(vector.layers[2], BASE["W_dec"][feature] / (scale or 1.0), atol=1e-6)
    assert not vector.readouts


@pytest.mark.parametrize(
    "config",
    [
        {"architecture": "topk", "k": 3},
        {"architecture": "batchtopk"},
        {"activation_fn_str": "topk"},
        {"normalize_activations": "layer_norm"},
        {"normalize_activations": "constant_norm_rescale"},
    ],
)
def test_what_a_projection_does_not_say_has_no_readout(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    stored = read_file(read_feature(save(tmp_path, config), FEATURE).probe).vectors
    assert not stored.readouts
    assert np.allclose(stored.layers[2], BASE["W_enc"][:, FEATURE], atol=1e-6)


@pytest.mark.parametrize(
    ("config", "layer", "place"),
    [
        ({"hook_name": "blocks.5.hook_resid_post"}, None, (5, "resid_post")),
        ({"hook_name": "blocks.0.hook_resid_pre"}, None, (0, "resid_pre")),
        ({"hook_name": "blocks.5.hook_mlp_out"}, 4, (4, "mlp_out")),
        ({"hook_name": "blocks.5.attn.hook_z"}, None, (5, "attn.hook_z")),
        ({"hook_name": None, "hook_point": "blocks.2.hook_resid_pre"}, None, (1, "resid_post")),
        (
            {"hook_name": "blocks.{layer}.hook_resid_post", "hook_point_layer": 7},
            None,
            (7, "resid_post"),
        ),
        (
            {"hook_name": None, "metadata": {"hook_name": "blocks.6.hook_out"}},
            None,
            (6, "resid_post"),
        ),
        ({"hook_name": "model.layers.11"}, None, (11, "resid_post")),
        ({"hook_name": "some.module"}, 3, (3, "resid_post")),
        ({"hook_name": None}, 3, (3, "resid_post")),
        # Another layer of the same hook: the stream that enters block 9 leaves block 8.
        ({}, 9, (8, "resid_post")),
        ({}, 0, (0, "resid_pre")),
        ({"hook_name": "blocks.{layer}.hook_resid_pre", "hook_layer": "x"}, 9, (8, "resid_post")),
        ({"hook_name": "blocks.0.hook_resid_pre"}, 3, (2, "resid_post")),
    ],
)
def test_places(
    tmp_path: Path, config: dict[str, Any], layer: int | None, place: tuple[int, str]
) -> None:
    found = read_feature(save(tmp_path, config), FEATURE, layer=layer)
    stored = read_file(found.probe).vectors
    assert (list(stored.layers), stored.hook) == ([place[0]], place[1])
    assert list(stored.readouts) == [place[0]]


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F64"])
def test_types_of_weights(tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    kinds = {"F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
    tensors = {name: torch.tensor(value).to(kinds[dtype]) for name, value in BASE.items()}
    save(tmp_path)
    save_torch(tensors, tmp_path / "sae_weights.safetensors")
    found = read_feature(tmp_path, FEATURE)
    (written,) = load(found.vector).values()
    assert np.array_equal(written, tensors["W_dec"][FEATURE].float().numpy())
    (readout,) = read_file(found.probe).vectors.readouts.values()
    given = read_out(found, np.zeros((1, WIDTH)))
    assert np.allclose(given, max(readout.bias, 0), atol=1e-6)


def test_scales_of_the_decoder_are_in_the_vector(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, SIZE)
    config: dict[str, Any] = {"finetuning_scaling_factor": True}
    found = read_feature(save(tmp_path, config, finetuning_scaling_factor=factors), FEATURE)
    (written,) = load(found.vector).values()
    assert np.allclose(written, factors[FEATURE] * BASE["W_dec"][FEATURE], atol=1e-6)
    config = {"architecture": "topk", "rescale_acts_by_decoder_norm": True}
    (written,) = load(read_feature(save(tmp_path, config), FEATURE).vector).values()
    assert np.linalg.norm(written) == pytest.approx(1, abs=1e-6)


NAN = np.where(np.arange(SIZE) == FEATURE, np.nan, 0.0)
SCALED = {"normalize_activations": "expected_average_only_in"}


@pytest.mark.parametrize(
    ("config", "changes", "options", "reason"),
    [
        ({}, {}, {"feature": SIZE}, "there is no feature 9: this autoencoder has 0 to 8"),
        ({}, {}, {"feature": -1}, "there is no feature -1"),
        ({"architecture": "transcoder"}, {}, {}, "'transcoder' is not known; standard, jumprelu"),
        ({"activation_fn": "tanh-relu"}, {}, {}, "'standard with tanh-relu' is not known"),
        ({"normalize_activations": "zscore"}, {}, {}, "'zscore' is not known; none"),
        (SCALED, {}, {}, "--activation-scale"),
        (SCALED, {}, {"activation_scale": 0.0}, "give a number above 0"),
        ({}, {}, {"activation_scale": 2.0}, "no activation scale: leave it out"),
        ({"hook_name": "odd"}, {}, {}, "'odd' is not known; give --layer"),
        ({"hook_name": None}, {}, {}, "names no hook: give --layer"),
        *(
            (
                {"hook_name": "blocks.{layer}.hook_out", "hook_layer": layer},
                {},
                {},
                f"hook_layer {layer!r} is not a layer.*; give --layer",
            )
            for layer in ("x", -1, True, 2.5)
        ),
        ({}, {}, {"layer": -1}, "layer -1: layers are counted from 0"),
        ({"hook_head_index": 2}, {}, {}, "a single head"),
        ({"d_in": 7}, {}, {}, "cfg.json has d_in 7"),
        ({}, {"W_enc": np.ones((WIDTH, 3))}, {}, r"W_enc has shape \[6, 3\]"),
        ({}, {"b_dec": np.ones(3)}, {}, r"b_dec has shape \[3\]"),
        ({}, {"W_dec": np.ones(3)}, {}, r"not \[features, width\]"),
        ({}, {"W_dec": np.zeros((SIZE, WIDTH))}, {}, "W_dec row of zeros"),
        ({}, {"b_enc": NAN}, {}, "beyond float32, or NaN"),
        ({}, {"b_enc": None}, {}, "has no tensor b_enc"),
        ({"architecture": "jumprelu"}, {}, {}, "has no tensor threshold"),
        ({"architecture": "gated"}, {**GATED, "r_mag": np.full(SIZE, 1e4)}, {}, "beyond float32"),
    ],
)
def test_autoencoders_that_are_refused(
    tmp_path: Path, config: Any, changes: Any, options: Any, reason: str
) -> None:
    save(tmp_path, config, **changes)
    with pytest.raises((LogsteerError, ValueError), match=reason):
        read_feature(tmp_path, **{"feature": FEATURE, **options})


def test_files_that_are_refused(tmp_path: Path) -> None:
    weights = save(tmp_path) / "sae_weights.safetensors"
    whole = weights.read_bytes()
    for content, reason in (
        (b"no tensors at all", "is not a safetensors file"),
        (b"\x02" + bytes(7) + b"[]", "is not a safetensors file"),
        (whole[:-4], "not all numbers"),
        (whole.replace(b'"F32"', b'"I32"'), "in type I32; F64, F32"),
    ):
        weights.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            read_feature(tmp_path, FEATURE)
    for text, reason in (("{", "no JSON"), ("[]", "no JSON object")):
        (tmp_path / "cfg.json").write_text(text)
        with pytest.raises(LogsteerError, match=reason):
            read_feature(tmp_path, FEATURE)

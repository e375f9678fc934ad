"""Sparse autoencoders: SAELens' files and encoders, the store, features of tokens."""

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from logsteer import APIError, Client, InvalidRequestError
from logsteer.errors import NotFoundError
from logsteer.schemas.steering import parse_vector
from logsteer_server.numerics import sae
from logsteer_server.stores.formats.sae_file import SAE_KEY, SaeFile, check_sae, join_sae
from tests.conftest import Server
from tests.refusals import refused

WIDTH, SIZE, K = 16, 40, 5
Tensors = dict[str, Tensor]
SCALED = "expected_average_only_in"
LABELS = {"3": "dogs", "7": "cats", "9": "cats"}


def draw(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    """Weights of every architecture, by SAELens' names."""
    torch.manual_seed(seed)
    sizes: dict[str, tuple[int, ...]] = {
        "W_enc": (WIDTH, SIZE), "W_dec": (SIZE, WIDTH), "b_dec": (WIDTH,),
        **dict.fromkeys(("b_enc", "b_gate", "b_mag", "r_mag", "threshold"), (SIZE,)),
    }  # fmt: skip
    found = {name: 0.3 * torch.randn(shape) for name, shape in sizes.items()}
    found["W_enc"] += found["W_dec"].T
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def save_sae(directory: Path, config: dict[str, Any], tensors: Tensors | None = None) -> Path:
    """What SAELens' `save_model` writes, with labels beside it."""
    directory.mkdir(exist_ok=True)
    save_file(tensors or draw(), directory / "sae_weights.safetensors")
    hook = {"metadata": {"hook_name": "blocks.2.hook_resid_pre", "model_name": "demo"}}
    config = {"architecture": "standard", "d_in": WIDTH, "d_sae": SIZE, **hook, **config}
    (directory / "cfg.json").write_text(json.dumps(config))
    (directory / "labels.json").write_text(json.dumps(LABELS))
    return directory


def join(directory: Path, labels: bytes | None = None, **fields: Any) -> Path:
    """The file that the store has."""
    config, place = (directory / "cfg.json").read_bytes(), {"layer": None, "activation_scale": None}
    joined = directory / "joined.safetensors"
    with joined.open("wb") as file:
        weights = BytesIO((directory / "sae_weights.safetensors").read_bytes())
        join_sae(config, labels, place | fields, weights, file.write)
    return joined


def encode(x_TD: Tensor, w: Tensors, config: dict[str, Any]) -> Tensor:
    """The activations [T, features] as SAELens 6.54 computes them.

    Its `SAE.process_sae_in`, and `encode` of `StandardSAE`, `JumpReLUSAE`, `TopKSAE`, `GatedSAE`.
    """
    w = {name: tensor.float() for name, tensor in w.items()}
    normalization = config.get("normalize_activations", "none")
    if normalization == "constant_norm_rescale":
        x_TD = x_TD * (WIDTH**0.5 / x_TD.norm(dim=-1, keepdim=True))
    elif normalization == "layer_norm":
        x_TD = x_TD - x_TD.mean(dim=-1, keepdim=True)
        x_TD = x_TD / (x_TD.std(dim=-1, keepdim=True) + 1e-5)
    x_TD = x_TD - w["b_dec"] * config.get("apply_b_dec_to_input", True)
    match config["architecture"]:
        case "gated":
            gate = (x_TD @ w["W_enc"] + w["b_gate"] > 0).float()
            return gate * (x_TD @ (w["W_enc"] * w["r_mag"].exp()) + w["b_mag"]).relu()
        case "topk":
            z = x_TD @ w["W_enc"] + w["b_enc"]
            if config.get("rescale_acts_by_decoder_norm"):
                z = z * w["W_dec"].norm(dim=-1)
            top = z.topk(config["k"], dim=-1)
            return torch.zeros_like(z).scatter(-1, top.indices, top.values.relu())
        case "jumprelu":
            z = x_TD @ w["W_enc"] + w["b_enc"]
            return z.relu() * (z > w["threshold"])
        case _:
            return (x_TD @ w["W_enc"] + w["b_enc"]).relu()


CONFIGS: dict[str, dict[str, Any]] = {
    "standard": {},
    "uncentred": {"apply_b_dec_to_input": False},
    "jumprelu": {"architecture": "jumprelu"},
    "topk": {"architecture": "topk", "k": K},
    "rescaled": {"architecture": "topk", "k": K, "rescale_acts_by_decoder_norm": True},
    "gated": {"architecture": "gated"},
    "layer_norm": {"architecture": "jumprelu", "normalize_activations": "layer_norm"},
    "rescale": {"architecture": "topk", "k": K, "normalize_activations": "constant_norm_rescale"},
}


@pytest.mark.parametrize("top", [3, SIZE])
@pytest.mark.parametrize("name", CONFIGS)
def test_features_are_the_largest_of_saelens_activations(
    name: str, top: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fits into memory at once: here 9 features and 7 tokens of them."""
    monkeypatch.setattr(sae, "BLOCK_BYTES", 4 * WIDTH * 9)
    config = {"architecture": "standard", **CONFIGS[name]}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weights = draw(dtype=dtype)
        file = check_sae(join(save_sae(tmp_path / str(dtype), config, weights)))
        x_TD = 3 * torch.randn((50, WIDTH), generator=torch.Generator().manual_seed(1))
        expected_TF = encode(x_TD, weights, config)
        ids_TK, found_TK = file.encoder.encode(x_TD.numpy(), top)
        count = min(top, config.get("k", SIZE))
        assert ids_TK.shape == found_TK.shape == (50, count)
        largest_TK = expected_TF.topk(count, dim=-1).values.numpy()
        assert np.abs(found_TK - largest_TK).max() < 1e-5
        assert (ids_TK == sae.NO_FEATURE).sum() == (largest_TK == 0).sum()
        same = np.take_along_axis(expected_TF.numpy(), ids_TK.clip(0).astype(np.int64), 1)
        assert np.abs(np.where(ids_TK >= 0, same, 0) - found_TK).max() < 1e-5
    assert 0 < (expected_TF > 0).sum() < expected_TF.numel()


def test_a_scale_multiplies_what_is_encoded(tmp_path: Path) -> None:
    config = {"normalize_activations": SCALED}
    file = SaeFile(join(save_sae(tmp_path, config), activation_scale=0.25))
    plain = SaeFile(join(save_sae(tmp_path / "plain", {})))
    x_TD = np.random.default_rng(0).normal(size=(5, WIDTH)).astype(np.float32)
    found, expected = file.encoder.encode(4 * x_TD, 8), plain.encoder.encode(x_TD, 8)
    assert (found[0] == expected[0]).all()
    assert found[1] == pytest.approx(expected[1], abs=1e-5)


STREAM = "blocks.3.hook_resid_pre"


def open_sae(directory: Path, config: dict[str, Any], **changes: Any) -> SaeFile:
    """The file of an autoencoder whose weights are `draw`'s, but for these."""
    fields = {name: changes.pop(name) for name in ("layer", "activation_scale") if name in changes}
    tensors = {name: one for name, one in {**draw(), **changes}.items() if one is not None}
    config = {"hook_name": STREAM, "architecture": "standard", **config}
    return check_sae(join(save_sae(directory, config, tensors), **fields))


@pytest.mark.parametrize("name", ["standard", "uncentred", "jumprelu", "gated", "scaled"])
def test_a_readout_gives_the_encoder_s_activation(tmp_path: Path, name: str) -> None:
    config, scale = CONFIGS.get(name, {"normalize_activations": SCALED}), 1.0
    fields = {"activation_scale": (scale := 0.25)} if name == "scaled" else {}
    file = open_sae(tmp_path, config, **fields)
    x_ND = 3 / scale * torch.randn((400, WIDTH), generator=torch.Generator().manual_seed(1))
    expected_NF = encode(scale * x_ND, draw(), {"architecture": "standard", **config})
    for feature in range(SIZE):
        probe = file.read_vectors(feature, reads=True)
        ((layer, probe_D),), readout = probe.layers.items(), probe.readouts[2]
        z = readout.slope * (x_ND.numpy() @ probe_D) / np.linalg.norm(probe_D) + readout.bias
        found = np.where(z > readout.threshold, z, 0)
        assert np.allclose(found, expected_NF[:, feature], atol=1e-4)
        written = file.read_vectors(feature, reads=False)
        assert (list(written.layers), written.hook, layer) == ([2], "resid_post", 2)
        assert np.allclose(written.layers[2], draw()["W_dec"][feature] / scale, atol=1e-6)
        assert not written.readouts
    assert 0 < (expected_NF > 0).sum() < expected_NF.numel()


@pytest.mark.parametrize("name", ["topk", "layer_norm", "rescale"])
def test_what_a_projection_does_not_say_has_no_readout(tmp_path: Path, name: str) -> None:
    probe = open_sae(tmp_path, CONFIGS[name]).read_vectors(4, reads=True)
    assert not probe.readouts
    assert np.allclose(probe.layers[2], draw()["W_enc"][:, 4])


def test_scales_of_the_decoder_are_in_the_vector(tmp_path: Path) -> None:
    factors = torch.linspace(1, 3, SIZE)
    tuned = open_sae(
        tmp_path, {"finetuning_scaling_factor": True}, finetuning_scaling_factor=factors
    ).read_vectors(4, reads=False)
    assert np.allclose(tuned.layers[2], factors[4] * draw()["W_dec"][4], atol=1e-6)
    unit = open_sae(tmp_path / "unit", CONFIGS["rescaled"]).read_vectors(4, reads=False)
    assert np.linalg.norm(unit.layers[2]) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("config", "layer", "place"),
    [
        ({"hook_name": "blocks.5.hook_resid_post"}, None, (5, "resid_post")),
        ({"hook_name": "blocks.0.hook_resid_pre"}, None, (0, "resid_pre")),
        ({"hook_name": "blocks.5.hook_mlp_out"}, 4, (4, "mlp_out")),
        ({"hook_name": "blocks.5.attn.hook_z"}, None, (5, "attn.hook_z")),
        ({"hook_name": None, "hook_point": "blocks.2.hook_resid_pre"}, None, (1, "resid_post")),
        ({"hook_name": "blocks.{layer}.hook_resid_post", "hook_layer": 7}, None, (7, "resid_post")),
        ({"hook_name": None, "metadata": {"hook_name": "blocks.6.hook_out"}}, None,
         (6, "resid_post")),
        ({"hook_name": "model.layers.11"}, None, (11, "resid_post")),
        ({"hook_name": "some.module"}, 3, (3, "resid_post")),
        # Another layer of the same hook: the stream that enters block 9 leaves block 8.
        ({}, 9, (8, "resid_post")),
        ({}, 0, (0, "resid_pre")),
        ({"hook_name": "blocks.{layer}.hook_resid_pre", "hook_layer": "x"}, 9, (8, "resid_post")),
    ],
)  # fmt: skip
def test_the_place_of_an_autoencoder(
    tmp_path: Path, config: dict[str, Any], layer: int | None, place: tuple[int, str]
) -> None:
    file = open_sae(tmp_path, config, layer=layer)
    assert (file.layer, file.hook) == place


NAN = {"b_enc": torch.full((SIZE,), float("nan"))}


@pytest.mark.parametrize(
    ("config", "tensors", "fields", "reason"),
    [
        ({"architecture": "batchtopk"}, {}, {}, "save it by save_inference_model"),
        ({"architecture": "transcoder"}, {}, {}, "'transcoder' is not known"),
        ({"architecture": "topk"}, {}, {}, "topk takes 1 to"),
        ({"architecture": "topk", "k": 10**30}, {}, {}, "topk takes 1 to 40"),
        ({"hook_name": f"blocks.{10**30}.hook_resid_post"}, {}, {}, "there is no layer"),
        ({"model_name": "\ud800"}, {}, {}, "surrogates not allowed"),
        ({"x": "y" * 70_000}, {}, {}, "cfg.json has more than 65536 bytes"),
        ({}, {f"t{n}": torch.ones(1) for n in range(60)}, {}, "it has 68 tensors, at most 64"),
        ({"normalize_activations": "zscore"}, {}, {}, "'zscore' is not known"),
        ({"normalize_activations": SCALED}, {}, {}, "--activation-scale"),
        ({}, {}, {"activation_scale": 2.0}, "no activation scale: leave it out"),
        ({"metadata": {"hook_name": "here"}}, {}, {}, "'here' is not known; give --layer"),
        ({"metadata": None}, {}, {}, "names no hook; give --layer"),
        *(
            ({"hook_name": "blocks.{layer}.hook_out", "hook_layer": layer}, {}, {}, "give --layer")
            for layer in ("x", -1, True, 2.5)
        ),
        ({"hook_head_index": 2}, {}, {}, "a single head"),
        ({"activation_fn": "tanh-relu"}, {}, {}, "'standard with tanh-relu' is not known"),
        ({}, {"W_enc": torch.ones(WIDTH, 3)}, {}, r"W_enc has shape \[16, 3\]"),
        ({}, {"b_dec": torch.ones(3)}, {}, r"b_dec has shape \[3\]"),
        ({}, {"W_dec": torch.ones(3)}, {}, r"not \[features, width\]"),
        ({"d_in": 7}, {}, {}, "cfg.json has d_in 7"),
        ({}, NAN, {}, "b_enc has a number that is NaN"),
        ({}, {"b_enc": torch.ones(3)}, {}, r"b_enc has shape \[3\]"),
        ({"architecture": "jumprelu"}, {"threshold": None}, {}, "no tensor threshold"),
        ({}, {}, {"labels": b"[]"}, "no object of feature"),
        ({}, {}, {"labels": b'{"40": "far"}'}, "feature 40, and there are 0 to 39"),
        ({}, {}, {"labels": b'{"a": "b"}'}, "String should match pattern"),
        ({}, {}, {"labels": b"{"}, "no object of feature -> text"),
        ({}, {}, {"labels": b'{"1": "\\ud800"}'}, "no object of feature -> text"),
    ],
)
def test_what_cannot_be_encoded_is_refused(
    config: Any, tensors: Any, fields: Any, reason: str, tmp_path: Path
) -> None:
    kept = {name: tensor for name, tensor in {**draw(), **tensors}.items() if tensor is not None}
    with refused("invalid_sae", reason):
        check_sae(join(save_sae(tmp_path, config, kept), **fields))


def test_features_that_are_no_vector_are_refused(tmp_path: Path) -> None:
    file = open_sae(tmp_path, CONFIGS["gated"], W_dec=torch.eye(SIZE, WIDTH))
    with refused("invalid_sae", f"feature {WIDTH}: .*every number is 0"):
        file.read_vectors(WIDTH, reads=False)
    file = open_sae(tmp_path / "far", CONFIGS["gated"], r_mag=torch.full((SIZE,), 1e4))
    with refused("invalid_sae", "feature 0: its readout is beyond float32"):
        file.read_vectors(0, reads=True)


def test_json_that_is_nested_deeply_is_refused(tmp_path: Path) -> None:
    text = '{"config": ' + "[" * 100_000 + "]" * 100_000 + "}"
    (tmp_path / "joined").write_bytes(save({"a": draw()["b_enc"]}, {SAE_KEY: text}))
    with refused("invalid_sae", "nested too deeply"):
        check_sae(tmp_path / "joined")


@pytest.fixture
def client(fake_server: Server) -> Iterator[Client]:
    with Client(fake_server.url, max_retries=0) as client:
        yield client
        for card in client.saes.list().saes:
            client.saes.delete(card.name)


def test_an_autoencoder_is_put_listed_and_deleted(client: Client, tmp_path: Path) -> None:
    directory = save_sae(tmp_path, CONFIGS["topk"])
    card = client.saes.put("own", directory)
    told = card.model_dump(exclude={"sha256", "bytes", "created"})
    assert told == {
        "name": "own", "architecture": "topk", "hook": "resid_post", "layer": 1, "width": WIDTH,
        "features": SIZE, "k": K, "model_hint": "demo", "labels": 3,
    }  # fmt: skip
    assert client.saes.put("own", directory) == client.saes.get("own") == card
    assert [one.name for one in client.saes.list().saes] == ["own"]
    assert client.saes.put("far", directory, layer=4).layer == 3
    assert client.saes.list().to_pandas().layer.tolist() == [3, 1]
    (directory / "labels.json").unlink()
    with pytest.raises(APIError, match="exists"):
        client.saes.put("own", directory)
    assert client.saes.put("own", directory, overwrite=True).labels == 0
    client.saes.delete("own")
    with pytest.raises(NotFoundError, match="unknown_sae"):
        client.saes.get("own")
    (directory / "cfg.json").unlink()
    with pytest.raises(InvalidRequestError, match=r"no cfg.json: .*SAELens"):
        client.saes.put("own", directory)


TEXTS = ["Once upon a time", "The end of the day"]


@pytest.mark.parametrize("read", ["each", "last"])
@pytest.mark.parametrize("name", ["standard", "topk"])
def test_features_of_tokens_are_those_of_their_activations(
    client: Client, name: str, read: Any, tmp_path: Path
) -> None:
    config = {"architecture": "standard", **CONFIGS[name]}
    card = client.saes.put("own", save_sae(tmp_path, config))
    found = client.activations(TEXTS, sae="own", top=4, read=read)
    plain = client.activations(TEXTS, [1], read=read)
    assert found.layers == {} and found.answer.hook == "resid_post"
    expected_NF = encode(torch.tensor(plain.layers[1]), draw(), config)
    assert found.feature_activations == pytest.approx(
        expected_NF.topk(4, dim=-1).values.numpy(), abs=1e-5
    )
    assert (found.row_starts == plain.row_starts).all()
    used = found.answer.sae
    assert used is not None and (used.name, used.sha256, used.layer) == ("own", card.sha256, 1)
    shown = {str(feature) for feature in found.feature_ids.ravel()}
    assert used.labels == {i: label for i, label in LABELS.items() if i in shown}
    table = found.to_pandas()
    assert len(table) == (found.feature_ids >= 0).sum()
    row = table.iloc[-1]
    assert row.activation == pytest.approx(float(found[1].feature_activations[-1, -1]))  # type: ignore[index]
    body = {"items": TEXTS, "sae": "own", "top": 4, "read": read}
    plain_json = httpx.post(f"{client.base_url}/activations", json=body, timeout=60).json()
    features = plain_json["results"][1]["features"]
    assert features["ids"] == found[1].feature_ids.tolist()  # type: ignore[union-attr]
    assert "activations" not in plain_json["results"][0]


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        ({"layers": [1]}, "invalid_request", "exactly one of layers, sae"),
        ({"hook": "resid_post"}, "invalid_request", "hook goes with layers"),
        ({"read": "mean"}, "invalid_request", "features are of tokens"),
        ({"sae": None, "layers": [1], "top": 3}, "invalid_request", "top goes with sae"),
        ({"sae": "other"}, "unknown_sae", "own"),
        ({"sae": "wide"}, "invalid_sae", "encodes activations of 5 numbers"),
        ({"sae": "inner"}, "unsupported_by_engine", "There are no activations of mlp_out"),
        ({"sae": "far"}, "invalid_request", "this model's layers are 0 to"),
        # Of 76,800 tokens 40 ids and 40 activations each: more than 128 MiB as text.
        ({"items": [{"token_ids": [5] * 64}] * 1200, "top": SIZE}, "payload_too_large", "arrays"),
    ],
)
def test_features_that_cannot_be_had_are_refused(
    client: Client, body: Any, code: str, reason: str, tmp_path: Path
) -> None:
    client.saes.put("own", save_sae(tmp_path, {}))
    client.saes.put("far", tmp_path, layer=99)
    inner = {"metadata": {"hook_name": "blocks.1.hook_mlp_out"}}
    client.saes.put("inner", save_sae(tmp_path / "inner", inner))
    other = {name: tensor for name, tensor in draw().items() if name == "b_enc"}
    other |= {"W_enc": torch.ones(5, SIZE), "W_dec": torch.ones(SIZE, 5), "b_dec": torch.ones(5)}
    client.saes.put("wide", save_sae(tmp_path / "wide", {"d_in": 5}, other))
    given = {"items": ["Once"], "sae": "own", **body}
    answer = httpx.post(f"{client.base_url}/activations", json=given, timeout=60)
    assert answer.json()["code"] == code, answer.text
    assert reason in answer.json()["detail"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("own/3:4", {"sae": "own", "feature": 3}),
        ("shared/own/3:4", {"sae": "shared/own", "feature": 3}),
        ("shared/3:4", {"name": "shared/3"}),
        ("shared/own:4", {"name": "shared/own"}),
    ],
)
def test_a_feature_as_a_string_is_no_shared_vector(text: str, named: dict[str, Any]) -> None:
    assert parse_vector(text) == named | {"scale": 4.0, "layers": "recommended"}

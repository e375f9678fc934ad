"""Overrides and gradients through HTTP and both clients, on TransformerLens; refused elsewhere."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from logsteer import AsyncClient, Client
from logsteer.errors import NotFoundError
from tests import refusals
from tests.conftest import DEMO_MODEL, Server, ServerFactory, fake_model
from tests.contract.agreement import check_agreement, check_sweep
from tests.contract.directions import (
    load_model,
    moved_model,
    read_logprobs,
    read_rows,
)
from tests.contract.test_gradient import autograd_reference, relative, sum_products
from tests.contract.tlens_cases import draw_ids, draw_vector

pytestmark = pytest.mark.engine

PER_TOKEN = 1e-4
ETA = 0.05
OVERRIDE = {"name": "drawn", "eta": ETA}
CONTEXT = draw_ids(np.random.default_rng(1), 9).tolist()
TARGET = draw_ids(np.random.default_rng(2), 7).tolist()
ITEM = {"context_ids": CONTEXT, "target_ids": [TARGET, TARGET[:1], TARGET[1:2]]}
IDS = np.array(CONTEXT + TARGET, np.int32)


@pytest.fixture(scope="module")
def client(tlens_client: Client, tensors: Any) -> Iterator[Client]:
    """A client of a server that has the override `drawn`."""
    tlens_client.overrides.put("drawn", save(tensors))
    yield tlens_client
    tlens_client.overrides.delete("drawn")


def score(client: Client, **options: Any) -> np.ndarray:
    target = client.logprob([ITEM], **options).results[0].targets[0]
    return np.array(target.logprobs)


def test_a_variant_is_computed_with_its_override(client: Client) -> None:
    client.variants.put("moved", override=OVERRIDE)
    try:
        assert score(client, model="moved").tolist() == score(client, override=OVERRIDE).tolist()
        assert np.abs(score(client, model="moved") - score(client)).max() > PER_TOKEN
    finally:
        client.variants.delete("moved")


def test_an_override_goes_up_and_goes_again(
    client: Client, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    card = client.overrides.get("drawn")
    parameters = dict(load_model(DEMO_MODEL).named_parameters())
    assert (card.model, card.tensors) == ("demo", len(tensors))
    assert card.moved == card.total == sum(tensor.numel() for tensor in parameters.values())
    norm = sum(float(v.double().square().sum()) for v in tensors.values()) ** 0.5
    assert card.norm == pytest.approx(norm)
    assert [c.name for c in client.overrides.list().overrides] == ["drawn"]
    path = tmp_path / "norm.safetensors"
    save_file({"model.norm.weight": torch.ones(128)}, path)
    small = client.overrides.put("small", path)
    assert (small.moved, small.norm) == (128, pytest.approx(128**0.5))
    assert client.overrides.list().bytes == card.bytes + small.bytes
    assert client.overrides.delete("small").sha256 == small.sha256
    with refusals.refused("unknown_override"):
        client.overrides.get("small")


def test_scores_under_an_override_are_those_of_the_changed_model(
    client: Client, tensors: Any
) -> None:
    plain = score(client)
    answer = client.logprob([ITEM, ITEM], override=OVERRIDE, columns=["logprob", "entropy"])
    sha256 = client.overrides.get("drawn").sha256
    assert answer.override.model_dump() == OVERRIDE | {"sha256": sha256, "cast": None}
    moved = moved_model(DEMO_MODEL, tensors, ETA)
    wanted = read_logprobs(moved, IDS)[len(CONTEXT) - 1 :]
    others = {"context_ids": CONTEXT, "target_ids": [TARGET], "alternatives": [5, 900]}
    listed = client.logprob([others], override=OVERRIDE).results[0].targets[0].alternatives
    assert np.array(listed.logprobs) == pytest.approx(
        read_rows(moved, IDS)[len(CONTEXT) - 1 :, [5, 900]], abs=PER_TOKEN
    )
    for result in answer.results:
        assert result.targets[0].logprobs == pytest.approx(wanted, abs=PER_TOKEN)
        assert result.targets[1].logprob == pytest.approx(wanted[0], abs=PER_TOKEN)
    assert np.abs(wanted - plain).max() > 0.1
    for options in ({}, {"override": {"name": "drawn", "eta": 0.0}}):
        assert score(client, **options) == pytest.approx(plain, abs=PER_TOKEN)
    text = "Once upon a time there was a little girl."
    under = client.perplexity(text, override=OVERRIDE)
    assert under.override is not None
    ids = np.array(client.tokenize(text).results[0].token_ids, np.int32)
    assert under.total.sum_logprob == pytest.approx(read_logprobs(moved, ids).sum(), abs=1e-3)
    assert client.logprob([ITEM]).override is None


def test_a_cast_is_told_and_what_moves_nothing_is_refused(client: Client) -> None:
    sha256 = client.overrides.get("drawn").sha256
    used = OVERRIDE | {"cast": "float32"}
    plain, cast = (client.logprob([ITEM], override=each) for each in (OVERRIDE, used))
    assert cast.override.model_dump() == used | {"sha256": sha256}
    assert (plain.provenance.cast, cast.provenance.cast) == (None, "float32")
    found, wanted = (answer.results[0].targets[0].logprobs for answer in (cast, plain))
    assert found == pytest.approx(wanted, abs=PER_TOKEN)  # the model is in float32 already
    generated = client.generate(None, prompt_ids=[CONTEXT], max_tokens=3, override=used)
    assert generated.provenance.cast == "float32"
    for given, reason in (
        ({"name": "drawn", "eta": 1e-30}, "no parameter differs after rounding to float32"),
        ({"name": "drawn", "eta": 1.0, "cast": "float64"}, "override.cast"),
    ):
        body = {"items": [ITEM], "override": given}
        found = httpx.post(client.base_url + "/logprob", json=body, timeout=60)
        refused(found, 422, "invalid_request", reason)


def test_every_endpoint_takes_an_override(client: Client) -> None:
    check_agreement(client, override=OVERRIDE)
    check_sweep(
        client, {"vectors": [{"data": {"2": draw_vector(norm=3.0).tolist()}}]}, override=OVERRIDE
    )


def test_cached_results_know_the_override(tlens_limited_server: Server, tensors: Any) -> None:
    with Client(tlens_limited_server.url, timeout=300) as client:
        client.overrides.put("v", save(tensors))
        used = [None, *({"name": "v", "eta": eta} for eta in (0.0, ETA, -ETA))]
        first = [score(client, override=one) for one in used]
        for values, one in zip(first, used, strict=True):
            answer = client.logprob([ITEM], override=one)
            assert answer.usage.cached_results == 3 - 1
            assert (values == np.array(answer.results[0].targets[0].logprobs)).all()
        assert len({values.tobytes() for values in first}) == 3  # eta 0 is the base
        client.overrides.put("v", save({"model.norm.weight": torch.ones(128)}), overwrite=True)
        assert (score(client, override=used[2]) != first[2]).any()
        refused(
            httpx.put(client.base_url + "/overrides/v", content=save(tensors)),
            409, "exists", "overwrite=true",
        )  # fmt: skip


def test_gradients_through_http(client: Client) -> None:
    answer = client.gradient(
        [ITEM], {"layers": [0, 3], "positions": "predicting"}, override={"name": "drawn", "eta": 0}
    )
    first, second, _ = answer.results[0].targets
    length = len(IDS) - 1
    assert first.positions == list(range(len(CONTEXT) - 1, length))
    assert second.positions == [len(CONTEXT) - 1]
    wanted = autograd_reference(load_model(DEMO_MODEL), IDS, len(TARGET), (0, 3))
    for layer, expected in zip(("0", "3"), wanted, strict=True):
        rows = np.array(first.gradients[layer])
        assert relative(rows, expected[len(CONTEXT) - 1 :]) < 1e-4
        assert first.norms[layer] == pytest.approx(np.linalg.norm(rows, axis=-1))
    assert first.logprob == pytest.approx(score(client).sum(), abs=1e-4)
    assert first.token_ids == TARGET
    assert answer.usage.scored_tokens == len(TARGET) + 2
    with Client(client.base_url, encoding="msgpack", timeout=300) as packed:
        same = packed.gradient([ITEM], {"layers": [3, 0], "positions": "predicting"})
    other = same.results[0].targets[0].gradients
    assert relative(np.array(other["3"]), np.array(first.gradients["3"])) < 1e-5


def test_directional_derivatives_through_both_clients(client: Client, tensors: Any) -> None:
    answer = client.gradient([ITEM], {"override": "drawn"})
    first = answer.results[0].targets[0]
    # This scores every token; the context's are taken away.
    whole = sum(map(float, sum_products(load_model(DEMO_MODEL), IDS, tensors)))
    front = sum(map(float, sum_products(load_model(DEMO_MODEL), IDS[: len(CONTEXT)], tensors)))
    assert first.directional == pytest.approx(whole - front, rel=1e-3)
    assert sum(map(float, first.directional_per_token)) == pytest.approx(first.directional)  # type: ignore[arg-type]
    assert answer.along.name == "drawn"

    async def ask() -> tuple[Any, Any]:
        async with AsyncClient(client.base_url, timeout=300) as other:
            cards = await other.overrides.list()
            return await other.gradient([ITEM], {"override": "drawn"}), cards

    same, cards = asyncio.run(ask())
    assert same.results[0].targets[0].directional == pytest.approx(first.directional)
    assert cards == client.overrides.list()
    at_eta = client.gradient([ITEM], {"override": "drawn"}, override=OVERRIDE)
    assert at_eta.results[0].targets[0].directional != pytest.approx(first.directional, rel=0.01)


def refused(response: httpx.Response, status: int, code: str, reason: str) -> None:
    problem = response.json()
    assert (response.status_code, problem["code"]) == (status, code), problem
    assert reason in problem["detail"]


GRADIENTS: list[tuple[dict[str, Any], int, str, str]] = [
    ({"wrt": {}}, 422, "invalid_request", "exactly one of layers, override"),
    ({"wrt": {"layers": [1], "override": "drawn"}}, 422, "invalid_request", "exactly one"),
    ({"wrt": {"override": "drawn", "hook": "attn_out"}}, 422, "invalid_request", "go with layers"),
    ({"wrt": {"layers": [1, 1]}}, 422, "invalid_request", "twice"),
    ({"wrt": {"layers": [7]}}, 422, "invalid_request", "no layer 7"),
    ({"wrt": {"layers": [1], "hook": "nothing"}}, 422, "unsupported_by_engine", "nothing"),
    ({"wrt": {"override": "other"}}, 404, "unknown_override", "'other'"),
    ({"wrt": {"layers": [1], "positions": {"slices": [[90, 91]]}}}, 422, "invalid_request",
     "selects none"),
    ({"wrt": {"layers": [1]}, "override": {"name": "drawn", "eta": "x"}}, 422, "invalid_request",
     "eta"),
    ({"wrt": {"layers": [1]}, "override": {"name": "../x", "eta": 1}}, 422, "invalid_request",
     "name"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "code", "reason"), GRADIENTS)
def test_bad_gradients_are_refused(
    client: Client, body: dict[str, Any], status: int, code: str, reason: str
) -> None:
    found = httpx.post(client.base_url + "/gradient", json={"items": [ITEM]} | body, timeout=60)
    refused(found, status, code, reason)


UPLOADS: dict[str, tuple[bytes, int, str, str]] = {
    "empty": (b"", 422, "invalid_vector", "cannot be read"),
    "no safetensors": (b"hello there, world", 422, "invalid_vector", "not a safetensors"),
    "unknown name": (save({"blocks.0.W": torch.ones(2)}), 422, "invalid_vector", "no parameter"),
    "shape": (save({"model.norm.weight": torch.ones(2)}), 422, "invalid_vector", "[2], the"),
    "transposed": (
        save({"model.layers.0.mlp.down_proj.weight": torch.ones(384, 128)}), 422, "invalid_vector",
        "[384, 128], the parameter [128, 256]",
    ),
    "tied twice": (
        save({
            "lm_head.weight": torch.ones(1436, 128),
            "model.embed_tokens.weight": torch.ones(1436, 128),
        }),
        422, "invalid_vector", "one parameter",
    ),
    "NaN": (
        save({"model.norm.weight": torch.full((128,), torch.nan)}), 422, "invalid_vector", "NaN",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UPLOADS)
def test_bad_uploads_are_refused_and_leave_nothing(client: Client, name: str) -> None:
    data, status, code, reason = UPLOADS[name]
    before = client.overrides.list()
    found = httpx.put(f"{client.base_url}/overrides/bad", content=data, timeout=60)
    refused(found, status, code, reason)
    assert client.overrides.list() == before
    with pytest.raises(NotFoundError):
        score(client, override={"name": "bad", "eta": 1.0})


def test_gradients_too_large_for_an_answer_are_refused(tlens_limited_server: Server) -> None:
    long = {"context_ids": (CONTEXT * 400)[:1000], "target_ids": [TARGET]}
    with (
        Client(tlens_limited_server.url, timeout=300) as client,
        refusals.refused("payload_too_large", "rows of 128 numbers"),
    ):
        client.gradient([long] * 7, {"layers": [0, 1, 2, 3, 4]})


def test_other_engines_refuse_and_say_which_does(start_server: ServerFactory) -> None:
    server = start_server({"models": [fake_model("a"), fake_model("b")]})
    item = {"context": "Once upon", "targets": [" a time"]}
    override = {"override": {"name": "v", "eta": 1.0}, "model": "a"}
    for method, path, body in (
        ("PUT", "/overrides/v?model=a", None),
        ("POST", "/logprob", {"items": [item]} | override),
        ("POST", "/perplexity", {"texts": ["a b"]} | override),
        ("POST", "/generate", {"prompts": ["a"]} | override),
        ("POST", "/gradient", {"items": [item], "wrt": {"layers": [1]}, "model": "a"}),
    ):
        content = b"x" if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        found = httpx.request(method, server.url + path, content=content, headers=headers)
        refused(found, 422, "unsupported_by_engine", "engine transformer_lens")
    found = httpx.put(f"{server.url}/overrides/v", content=b"x")
    refused(found, 422, "invalid_request", "name one of them")

"""`capture` on every endpoint that runs the model: what `/activations` says of the whole text."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from safetensors.numpy import load

from logsteer import APIError, Client
from logsteer.errors import InvalidRequestError, PayloadTooLargeError
from tests.contract.steering import LAYER, VECTOR

WITHIN = 1e-4
LAYERS = [3, 1]
PROMPT = "Once upon a time"
CAPTURE: dict[str, Any] = {"layers": LAYERS}
STEERING = {"vectors": [{"data": {str(LAYER): VECTOR.tolist()}, "scale": 1.5}]}
DRAW = {"max_tokens": 9, "seed": 4, "ignore_eos": True}
REAL = [pytest.param(name, marks=pytest.mark.engine) for name in ("vllm", "compiled", "tlens")]


@pytest.fixture(params=REAL)
def client(request: pytest.FixtureRequest) -> Client:
    found: Client = request.getfixturevalue(f"{request.param}_client")
    return found


def ask(client: Client, path: str, body: dict[str, Any], kind: str = "json") -> Any:
    model = client.models().models[0].id
    accept = {"accept": f"application/{kind}"}
    with httpx.Client(base_url=client.base_url, timeout=120) as http:
        found = http.post(path, json={"model": model} | body, headers=accept)
    assert found.status_code == 200, found.text
    if kind == "msgpack":
        return msgpack.unpackb(found.content, object_hook=read_array)
    return found.content if "safetensors" in kind else found


def read_array(entry: dict[str, Any]) -> Any:
    if entry.keys() != {"dtype", "shape", "data"}:
        return entry
    return np.frombuffer(entry["data"], entry["dtype"]).reshape(entry["shape"])


def finished(client: Client, ids: list[int], **options: Any) -> np.ndarray:
    """What `/activations` says of a text, [L, T, D]."""
    item = client.activations([{"token_ids": ids}], LAYERS, **options)[0]
    return np.stack([item.layers[layer] for layer in sorted(LAYERS)])


def read(shown: Any) -> np.ndarray:
    """The activations of an answer, [L, T, D]."""
    layers = shown["layers"] if isinstance(shown, dict) else shown.layers
    assert list(layers) == [str(layer) for layer in sorted(LAYERS)]
    return np.stack([np.array(rows, np.float32) for rows in layers.values()])


def complete(client: Client, capture: dict[str, Any], **options: Any) -> tuple[Any, list[int]]:
    """What a continuation captured, and all tokens but the last one, which the model never read."""
    found = client.generate([PROMPT], capture=capture, **DRAW, **options).results[0]
    (completion,) = found.completions
    return completion.activations, [*found.prompt_ids, *completion.token_ids[:-1]]


@pytest.mark.parametrize("steered", [False, True], ids=["plain", "steered"])
@pytest.mark.parametrize("read_as", ["each", "mean", "last"])
def test_a_continuation_has_the_activations_of_its_text(
    client: Client, read_as: str, steered: bool
) -> None:
    changes = {"steering": STEERING} if steered else {}
    shown, ids = complete(client, CAPTURE | {"read": read_as}, **changes)
    wanted = finished(client, ids, read=read_as, **changes)
    assert np.abs(read(shown) - wanted).max() < WITHIN
    first = {"each": 0, "mean": 1, "last": len(ids) - 1}[read_as]  # a mean leaves BOS out
    assert shown.positions == list(range(first, len(ids)))


def test_windows_of_the_completion_and_the_stream_before_it_is_steered(client: Client) -> None:
    start = len(client.tokenize([PROMPT], bos="auto").results[0].token_ids)
    shown, ids = complete(client, CAPTURE | {"positions": {"completion": [2, 5]}})
    assert shown.positions == [start + 2, start + 3, start + 4]
    assert np.abs(read(shown) - finished(client, ids)[:, start + 2 : start + 5]).max() < WITHIN
    found = {
        point: complete(client, {"layers": [LAYER], "point": point}, steering=STEERING)[0]
        for point in ("before", "after")
    }
    before, after = (np.array(shown.layers[LAYER]) for shown in found.values())
    assert np.abs(after - before - 1.5 * VECTOR).max() < WITHIN


def test_every_encoding_says_the_same_and_a_stream_as_it_grows(client: Client) -> None:
    body = {"prompts": [PROMPT], "capture": CAPTURE, **DRAW}
    plain = ask(client, "/generate", body).json()["results"][0]["completions"][0]["activations"]
    half = body | {"capture": CAPTURE | {"dtype": "float16"}}
    packed = ask(client, "/generate", half, "msgpack")["results"][0]["completions"][0]
    array = packed["activations"]["layers"]["1"]
    assert array.dtype == np.float16
    assert array == pytest.approx(np.array(plain["layers"]["1"]), rel=2e-3, abs=1e-3)
    lines = ask(client, "/generate", body | {"stream": True}).text.splitlines()
    pieces = [
        json.loads(data.removeprefix("data: "))
        for name, data in pairwise(lines) if name == "event: piece"
    ]  # fmt: skip
    streamed = [piece["activations"] for piece in pieces]
    prompt = len(plain["positions"]) - 8
    assert [len(one["positions"]) for one in streamed] == [prompt, *[1] * 8], "the last is not read"
    assert [place for one in streamed for place in one["positions"]] == plain["positions"]
    joined = np.concatenate([read(one) for one in streamed], axis=1)
    assert np.abs(joined - read(plain)).max() < WITHIN
    whole = json.loads(lines[lines.index("event: result") + 1].removeprefix("data: "))
    shown = whole["results"][0]["completions"][0]["activations"]
    assert np.abs(read(shown) - read(plain)).max() < WITHIN
    items = [{"context": PROMPT, "targets": [" there", " was"]}]
    scored = {"items": items, "capture": CAPTURE}
    file = load(ask(client, "/logprob", scored, "vnd.safetensors"))
    targets = ask(client, "/logprob", scored, "json").json()["results"][0]["targets"]
    starts = file["activation_starts"].tolist()
    for target, begin, end in zip(targets, starts, starts[1:], strict=False):
        shown = target["activations"]
        assert file["activation_positions"][begin:end].tolist() == shown["positions"]
        assert np.abs(file["resid_post.3"][begin:end] - shown["layers"]["3"]).max() < WITHIN


def test_an_end_that_comes_early_leaves_fewer_tokens(client: Client) -> None:
    text = client.generate([PROMPT], **DRAW).results[0].completions[0].text
    capture = CAPTURE | {"positions": "completion", "read": "each"}
    found = client.generate([PROMPT], capture=capture, stop=[text[12:14]], **DRAW).results[0]
    (completion,) = found.completions
    ids = [*found.prompt_ids, *completion.token_ids[:-1]]
    assert 1 < len(completion.token_ids) < DRAW["max_tokens"]
    assert completion.activations is not None
    wanted = finished(client, ids)[:, len(found.prompt_ids) :]
    assert np.abs(read(completion.activations) - wanted).max() < WITHIN


def list_shown(part: Any) -> Iterator[dict[str, Any]]:
    """Every `activations` of an answer, in its order."""
    if isinstance(part, dict):
        if part.get("activations"):
            yield part["activations"]
        part = list(part.values())
    for one in part if isinstance(part, list) else ():
        yield from list_shown(one)


def read_stored(client: Client, name: str) -> dict[str, np.ndarray]:
    """All rows of a stored data set, by tensor."""
    index = client.captures.index(name)
    assert (index.state, client.captures.get(name).num_shards) == ("done", len(index.shards))
    files = [load(client.captures.shard(name, str(n))) for n in range(index.num_shards)]
    return {key: np.concatenate([file[key] for file in files]) for key in files[0]}


TARGETS = [{"context": PROMPT, "targets": [" there was", " a", " the"]}]
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "n": 2, **DRAW}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompts": [PROMPT, "The"], "n": 2, **DRAW}),
        ("/steer", {"prompts": [PROMPT], "steering": STEERING, "baseline": True, **DRAW}),
        ("/logprob", {"items": TARGETS}),
        ("/perplexity", {"texts": [PROMPT * 9, "The"], "windows": True, "context_length": 16}),
        ("/v1/completions", {"prompt": [PROMPT, "The"], "prompt_logprobs": 1, **DRAW}),
        ("/v1/chat/completions", CHAT),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_answer_writes_its_activations_to_the_store(
    client: Client, path: str, body: dict[str, Any]
) -> None:
    shown = list(list_shown(ask(client, path, body | {"capture": CAPTURE}).json()))
    name = "of" + path.replace("/", "-")
    capture = CAPTURE | {"to": f"store://{name}", "overwrite": True}
    answer = ask(client, path, body | {"capture": capture})
    assert not list(list_shown(answer.json()))
    rows = read_stored(client, name)
    told = answer.json()["captured"]
    assert (told["documents"], told["rows"]) == (len(shown), len(rows["document"]))
    for number, one in enumerate(shown):
        own = rows["document"] == number
        assert rows["position"][own].tolist() == one["positions"]
        found = np.stack([rows[f"resid_post.{layer}"][own] for layer in sorted(LAYERS)])
        assert np.abs(found - read(one)).max() < WITHIN
        if "steering" not in body:
            ids = rows["token_ids"][own].tolist()
            assert np.abs(found - finished(client, ids)).max() < WITHIN, "they are of these tokens"
    if path in ("/generate", "/v1/chat/completions"):
        streamed = ask(client, path, body | {"capture": capture, "stream": True}).text
        assert "activations" not in streamed
        again = read_stored(client, name)
        assert all(np.array_equal(again[key], rows[key]) for key in ("document", "token_ids"))
        assert np.abs(again["resid_post.3"] - rows["resid_post.3"]).max() < WITHIN
        last = [line for line in streamed.splitlines() if '"captured"' in line][-1]
        found = json.loads(last.removeprefix("data: "))["captured"]
        assert found == told


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"capture": {"layers": [77]}}, InvalidRequestError, "capture.layers"),
        ({"capture": {"layers": [1], "hook": "nothing"}}, APIError, "capture.hook"),
        ({"capture": CAPTURE, "max_tokens": 1000, "n": 500}, PayloadTooLargeError, None),
    ],
)
def test_what_cannot_be_captured_is_refused(
    client: Client, fields: dict[str, Any], error: type[APIError], param: str | None
) -> None:
    with pytest.raises(error) as refused:
        client.generate([PROMPT], **fields)
    assert refused.value.param == param

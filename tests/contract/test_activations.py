"""`/activations` on every engine, against hooks in transformers; and what is refused."""

from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from safetensors.numpy import load

from logsteer import Client
from logsteer.extras.activations import Activations
from tests.conftest import VOCAB_SIZE
from tests.contract.steering import LAYER, VECTOR, HookedReference, V
from tests.contract.tlens_cases import draw_ids

WITHIN = 1e-4
LAYERS = [4, 0, 2]
REAL = pytest.mark.parametrize("client", ["vllm", "compiled", "tlens"], indirect=True)
STEERING = {"vectors": [{"data": {str(LAYER): VECTOR.tolist()}, "scale": 1.5}]}


def draw_items() -> list[np.ndarray]:
    """Sequences of 1 to 300 tokens, two of which begin alike."""
    draw = np.random.default_rng(7)
    items = [draw_ids(draw, int(n)) for n in (1, 300, 2, 33, 64, 120, 7)]
    return [*items, np.concatenate([items[1][:200], items[3]])]


ITEMS = draw_items()


def ask(client: Client, items: list[np.ndarray] = ITEMS, **options: Any) -> Activations:
    return client.activations([{"token_ids": ids.tolist()} for ids in items], LAYERS, **options)


@pytest.mark.engine
@REAL
@pytest.mark.parametrize("steered", [False, True], ids=["plain", "steered"])
def test_each_token_the_last_and_the_mean(
    client: Client, hooked: HookedReference, steered: bool
) -> None:
    """A batch of many lengths; what leaves the hook, steering there included."""
    changes = {"steering": STEERING} if steered else {}
    change = (lambda x: x + 1.5 * V) if steered else None
    slices = {"slices": [[0, 1], [20, 40], [290, 400]]}
    found = {
        (read, where is None): ask(
            client, read=read, **({} if where is None else {"positions": where}), **changes
        )
        for read in ("each", "last", "mean")
        for where in (None, slices)
    }
    worst = 0.0
    for (read, whole), answer in found.items():
        assert list(answer.layers) == sorted(LAYERS)
        for ids, item in zip(ITEMS, answer, strict=True):
            assert item.token_ids.tolist() == ids.tolist()
            places = np.array([
                t for t in range(len(ids))
                if whole or any(a <= t < b for a, b in slices["slices"])
            ])  # fmt: skip
            places = places[-1:] if read == "last" else places
            streams_LTD = hooked.activations(ids.tolist(), change=change)
            for layer in LAYERS:
                wanted = streams_LTD[layer, places]
                if read == "mean":
                    assert item.positions is None
                    norms_T = np.linalg.norm(wanted, axis=-1)
                    wanted = wanted[norms_T <= 3 * np.median(norms_T)].mean(0, keepdims=True)
                else:
                    assert item.positions.tolist() == places.tolist()
                worst = max(worst, float(np.abs(item.layers[layer] - wanted).max()))
    print(f"largest difference from transformers {worst:.2e}")
    assert worst < WITHIN
    if steered:
        receipt = found["each", True].answer.steering
        assert receipt.tokens_steered == sum(map(len, ITEMS))
        assert receipt.layers[str(LAYER)].tokens == sum(map(len, ITEMS))


def test_texts_ids_and_messages(client: Client) -> None:
    text = "Once upon a time"
    encoded = client.tokenize([text], bos="auto").results[0].token_ids
    answer = client.activations([text, {"token_ids": encoded}, text], [1, 3])
    first, second, third = answer
    assert first.token_ids.tolist() == second.token_ids.tolist() == encoded
    for layer in (1, 3):
        assert first.layers[layer].shape == (len(encoded), first.layers[layer].shape[1])
        assert first.layers[layer] == pytest.approx(second.layers[layer], abs=WITHIN)
        assert first.layers[layer] == pytest.approx(third.layers[layer], abs=WITHIN)
    assert answer.answer.usage.prompt_tokens == 3 * len(encoded)
    chat = client.activations([{"messages": [{"role": "user", "content": text}]}], [1])
    assert len(chat[0].token_ids) > len(encoded)
    assert len(client.activations(text, [0], read="last").layers[0]) == 1


def test_every_encoding_says_the_same(client: Client) -> None:
    body = {"items": ["Once upon a time", "The end"], "layers": [3, 1], "read": "each"}
    model = client.models().models[0].id
    answers = {}
    with httpx.Client(base_url=client.base_url, timeout=60) as http:
        for kind in ("application/json", "application/msgpack", "application/vnd.safetensors"):
            found = http.post("/activations", json=body | {"model": model},
                              headers={"accept": kind})  # fmt: skip
            assert found.headers["content-type"] == kind, found.text
            answers[kind] = found.content
        plain = http.post("/activations", json=body | {"model": model}).json()
    packed = msgpack.unpackb(answers["application/msgpack"])
    tensors = load(answers["application/vnd.safetensors"])
    starts = tensors["row_starts"].tolist()
    assert starts[-1] == sum(len(result["positions"]) for result in plain["results"])
    for index, (result, other) in enumerate(zip(plain["results"], packed["results"], strict=True)):
        rows = slice(starts[index], starts[index + 1])
        assert tensors["positions"][rows].tolist() == result["positions"]
        for layer in ("1", "3"):
            array = other["activations"][layer]
            assert array["dtype"] == "<f4"
            raw = np.frombuffer(array["data"], "<f4").reshape(array["shape"])
            assert raw == pytest.approx(np.array(result["activations"][layer]), abs=WITHIN)
            assert tensors[f"resid_post.{layer}"][rows] == pytest.approx(raw, abs=WITHIN)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"layers": [1, 99]}, "invalid_request", "layers has 99"),
    ({"layers": [1, 1]}, "invalid_request", "twice"),
    ({"layers": []}, "invalid_request", "must not be empty"),
    ({"hook": "nothing"}, "unsupported_by_engine", "resid_post"),
    ({"positions": {"slices": [[60, 70]]}}, "invalid_request", "select none of its"),
    ({"positions": "completion"}, "invalid_request", "all"),
    ({"read": "first"}, "invalid_request", "each"),
    ({"items": [{"token_ids": [VOCAB_SIZE]}]}, "invalid_request", "vocabulary ends at"),
    ({"items": [{"token_ids": []}]}, "invalid_request", "must not be empty"),
    ({"items": [{}]}, "invalid_request", "exactly one of token_ids, messages"),
    ({"items": [""], "bos": "never"}, "invalid_request", "has no token"),
    ({"items": ["cat " * 4000]}, "context_too_long", "shorten"),
    ({"cache": False}, "invalid_request", "none are kept"),
    ({"steering": {"vectors": [{"data": {"1": [1.0]}}]}}, "invalid_vector", "numbers a layer"),
]


@pytest.mark.parametrize(("change", "code", "detail"), REFUSED)
def test_what_cannot_be_is_refused(
    client: Client, change: dict[str, Any], code: str, detail: str
) -> None:
    model = client.models().models[0].id
    body = {"items": ["Once upon a time"], "layers": [1], "model": model} | change
    found = httpx.post(f"{client.base_url}/activations", json=body, timeout=60)
    assert (found.status_code, found.json()["code"]) == (422, code), found.text
    assert detail in found.json()["detail"]

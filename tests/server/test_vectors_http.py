"""`/vectors` over HTTP, on a server with a fake model."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from logsteer import Client
from logsteer.errors import APIError, ConflictError, NotFoundError
from logsteer_server.contract.captures import Capture
from logsteer_server.contract.jobs import CaptureJob
from logsteer_server.engines.fake import fake_activations
from logsteer_server.stores.formats.vector_file import read_file
from logsteer_server.stores.layer_vectors import LayerVectors, parse_safetensors
from logsteer_server.text.tokenizer import TextCodec
from tests.conftest import DEMO_MODEL, Server

FILES = Path(__file__).parent / "vector_files"
PAIRS = [
    {"positive": f"the day was so happy and {word}", "negative": f"the night was sad and {other}"}
    for word, other in [("bright", "dark"), ("warm", "cold"), ("light", "long"), ("good", "bad")]
]
VECTORS = LayerVectors({1: np.arange(1, 17), 3: -np.arange(1, 17)})


@pytest.fixture
def client(fake_server: Server) -> Iterator[Client]:
    with Client(fake_server.url, max_retries=0) as client:
        yield client
        for card in client.vectors.list().vectors:
            client.vectors.delete(card.name)


@pytest.fixture
def http(fake_server: Server, client: Client) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fake_server.url, timeout=120) as http:
        yield http


def refused(response: httpx.Response, status: int, code: str, reason: str) -> dict[str, Any]:
    problem: dict[str, Any] = response.json()
    assert response.headers["content-type"] == "application/problem+json"
    assert (response.status_code, problem["code"]) == (status, code)
    assert reason in problem["detail"]
    return problem


def test_a_file_goes_up_and_comes_down(client: Client, http: httpx.Client) -> None:
    card = client.vectors.put("happy", VECTORS.content)
    assert card.sha256 == VECTORS.sha256
    assert (card.layers, card.width, card.about.format) == ([1, 3], 16, "safetensors")
    assert client.vectors.get("happy") == card
    assert card in client.vectors.list().vectors

    answer = http.get("/vectors/happy/content")
    assert answer.headers["content-type"] == "application/vnd.safetensors"
    assert answer.headers["content-disposition"] == 'attachment; filename="happy.safetensors"'
    assert answer.headers["etag"] == f'"{card.sha256}"'
    assert hashlib.sha256(answer.content).hexdigest() == card.sha256
    assert parse_safetensors(answer.content) == VECTORS
    assert client.vectors.download("happy") == answer.content
    known = {"If-None-Match": answer.headers["etag"]}
    assert http.get("/vectors/happy/content", headers=known).status_code == 304
    gguf = http.get("/vectors/happy/content", params={"format": "gguf"}, headers=known)
    assert gguf.status_code == 200
    assert gguf.headers["content-type"] == "application/vnd.gguf"
    assert 'filename="happy.gguf"' in gguf.headers["content-disposition"]
    assert client.vectors.put("again", gguf.content).sha256 == card.sha256

    assert client.vectors.delete("happy").sha256 == card.sha256
    refused(http.get("/vectors/happy"), 404, "unknown_vector", "'happy'")


def test_files_of_other_programs_go_up(client: Client) -> None:
    card = client.vectors.put("theirs", FILES / "repeng.gguf")
    assert (card.layers, card.about.format, card.about.model_hint) == ([1, 2, 3], "gguf", "llama")
    again = read_file(client.vectors.download("theirs", format="gguf"))
    assert (again.format, again.model_hint) == ("gguf", "llama"), "as it came"


def test_the_same_request_again_gets_the_first_answer(client: Client) -> None:
    """A caller that lost an answer asks again, and gets it; nothing is replaced without a word."""
    put = client.vectors.put("mood", VECTORS.content)
    other = LayerVectors({1: np.ones(16)}).content
    train = client.vectors.train("trained", PAIRS, layers=[1])
    parts = {"mood": 2.0, "trained": 1.0}
    summed = client.vectors.combine("sum", parts)
    assert client.vectors.put("mood", VECTORS.content) == put
    again = client.vectors.train("trained", PAIRS, layers=[1])
    assert (again.vector, again.layer_cosines) == (train.vector, train.layer_cosines)
    assert again.usage.prompt_tokens == 0  # nothing was computed for it
    assert client.vectors.combine("sum", parts) == summed
    changes: list[tuple[str, Callable[..., Any]]] = [
        ("mood", lambda **o: client.vectors.put("mood", other, **o)),
        ("trained", lambda **o: client.vectors.train("trained", PAIRS, layers=[2], **o)),
        ("trained", lambda **o: client.vectors.put("trained", other, **o)),
        ("sum", lambda **o: client.vectors.combine("sum", {"mood": 3.0}, **o)),
    ]
    for name, change in changes:
        before = client.vectors.get(name)
        with pytest.raises(ConflictError, match=f"{name}.*{before.sha256}.*overwrite") as caught:
            change()
        told = caught.value
        assert (told.code, told.status, told.param) == ("exists", 409, "name")
        assert client.vectors.get(name) == before
        change(overwrite=True)
        assert client.vectors.get(name).sha256 != before.sha256
    # A sum of parts that have changed since is another one.
    client.vectors.combine("sum", {"mood": 1.0}, overwrite=True)
    client.vectors.put("mood", VECTORS.content, overwrite=True)
    with pytest.raises(ConflictError):
        client.vectors.combine("sum", {"mood": 1.0})


def test_training_makes_what_the_activations_say(client: Client) -> None:
    answer = client.vectors.train("happy", PAIRS, read="mean", layers=[2, 0], bos="never")
    codec = TextCodec.load(str(DEMO_MODEL))

    def read(text: str) -> np.ndarray:
        ids = np.array(codec.encode_ids([text])[0], dtype=np.int32)
        job = CaptureJob(ids, capture=Capture((0, 2), read="each"))
        found = fake_activations(job, ids, 16)
        assert found is not None
        return found.activations_LTD.mean(1, dtype=float)

    expected = np.mean([read(p["positive"]) - read(p["negative"]) for p in PAIRS], axis=0)
    vectors = parse_safetensors(client.vectors.download("happy"))
    assert list(vectors.layers) == [0, 2]
    assert np.allclose(np.stack(list(vectors.layers.values())), expected, atol=1e-6)
    about = answer.vector.about
    assert (about.source, about.method, about.read) == ("training", "mean_difference", "mean")
    assert (about.model, about.weights_digest, about.pairs) == ("fake", "none", 4)
    assert about.quality is not None and about.quality.keys() == {"0", "2"}
    assert about.validation is not None and about.validation.folds == 4
    # The fake engine scores alike, steered or not.
    assert about.recommendation is None
    assert "raises the preference" in (about.validation.caution or "")
    assert answer.usage.generated_tokens > 0
    assert answer.provenance.engine == "fake"
    assert client.vectors.get("happy") == answer.vector
    client.vectors.put("uploaded", vectors.content)
    for name, others, digest in (("own", {}, "none"), ("mixed", {"uploaded": 1.0}, None)):
        combined = client.vectors.combine(name, {"happy": 1.0, **others})
        assert combined.about.weights_digest == digest


@pytest.mark.parametrize("method", ["mean_difference", "pca", "logistic", "lda"])
def test_every_method_answers_in_json_and_msgpack(
    client: Client, fake_server: Server, method: Any
) -> None:
    answer = client.vectors.train("a", PAIRS, method=method)
    assert answer.vector.about.method == method
    assert answer.vector.layers == [0, 1, 2, 3]
    with Client(fake_server.url, encoding="msgpack") as packed:
        again = packed.vectors.train("b", PAIRS, method=method)
        assert packed.vectors.get("b").sha256 == answer.vector.sha256
    assert again.vector.norms == answer.vector.norms
    assert again.layer_cosines == answer.layer_cosines
    assert [row[n] for n, row in enumerate(again.layer_cosines)] == pytest.approx([1] * 4)
    assert [near[0].name for near in again.similar.layers.values()] == ["a"] * 4
    assert all(near[0].cosine == pytest.approx(1) for near in again.similar.layers.values())
    assert (again.vector.readouts is not None) == (method in ("logistic", "lda"))


def test_combining(client: Client) -> None:
    client.vectors.put("a", VECTORS.content)
    client.vectors.put("b", LayerVectors({3: np.ones(16)}).content)
    card = client.vectors.combine("sum", {"a": 2.0, "b": -1})
    summed = parse_safetensors(client.vectors.download("sum"))
    assert summed.layers[3].tolist() == [-2.0 * n - 1 for n in range(1, 17)]
    assert [part.weight for part in card.about.parts or []] == [2.0, -1.0]
    assert client.vectors.combine("apart", {"a": 1.0}, orthogonal_to=["b"]).about.orthogonal_to
    apart = parse_safetensors(client.vectors.download("apart"))
    assert abs(apart.layers[3].sum()) < 1e-4
    assert np.array_equal(apart.layers[1], VECTORS.layers[1])
    with pytest.raises(NotFoundError, match="'c'"):
        client.vectors.combine("x", {"c": 1.0})
    client.vectors.put("narrow", LayerVectors({3: np.ones(8)}).content)
    client.vectors.put("inside", LayerVectors({3: np.ones(16)}, "attn_out").content)
    for parts, reason in (
        ({"a": 0}, "nothing is left"),
        ({"a": 1.0, "narrow": 1.0}, "different width cannot be combined: 8, 16"),
        ({"a": 1.0, "inside": 1.0}, "different hook cannot be combined: attn_out, resid"),
    ):
        with pytest.raises(APIError, match=reason):
            client.vectors.combine("x", parts)


@pytest.mark.parametrize(
    ("body", "query", "reason"),
    [
        (b"", "", "neither safetensors nor GGUF"),
        (b"hello, this is text", "", "neither safetensors nor GGUF"),
        (b"hello, this is text", "?format=gguf", "does not begin as GGUF"),
        (LayerVectors({1: np.ones(3)}).content[:-2], "", "cannot be read"),
    ],
)
def test_files_that_are_no_vectors(
    http: httpx.Client, body: bytes, query: str, reason: str
) -> None:
    refused(http.put(f"/vectors/a{query}", content=body), 422, "invalid_vector", reason)
    refused(http.get("/vectors/a"), 404, "unknown_vector", "'a'")


@pytest.mark.parametrize(
    "path",
    ["%2e%2e", "..%2f..%2fetc", "a%20b", ".hidden", "a%00", "a%2fb", "-a", "x" * 129, "a%0a"],
)
def test_names_that_are_none(http: httpx.Client, path: str) -> None:
    for response in (
        http.put(f"/vectors/{path}", content=VECTORS.content),
        http.get(f"/vectors/{path}"),
        http.delete(f"/vectors/{path}"),
        http.get(f"/vectors/{path}/content"),
    ):
        assert response.status_code in (404, 405, 422)
        assert response.json()["code"] in ("invalid_request", "not_found", "method_not_allowed")


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        ({"name": "a"}, "invalid_request", "pairs"),
        ({"name": "../a", "pairs": PAIRS}, "invalid_request", "name"),
        ({"name": "a", "pairs": []}, "invalid_request", "pairs"),
        (
            {"name": "a", "pairs": [{"positive": "x", "negative": "x"}]},
            "invalid_request",
            "are the same",
        ),
        ({"name": "a", "pairs": PAIRS, "layers": [4]}, "invalid_request", "0 to 3"),
        ({"name": "a", "pairs": PAIRS, "layers": [1, 1]}, "invalid_request", "twice"),
        ({"name": "a", "pairs": PAIRS, "layers": [-1]}, "invalid_request", "layers"),
        ({"name": "a", "pairs": PAIRS, "hook": "mlp_out"}, "unsupported_by_engine", "resid_post"),
        ({"name": "a", "pairs": PAIRS, "method": "sae"}, "invalid_request", "method"),
        (
            {"name": "a", "pairs": PAIRS, "method": "lda", "whiten": True},
            "invalid_request",
            "whiten is for pca and logistic",
        ),
        (
            {"name": "a", "pairs": [{"positive": "a not so end", "negative": "a so not end"}]},
            "invalid_vector",
            "do not differ",
        ),
        (
            {"name": "a", "pairs": [{"positive": "a", "negative": "word " * 200}]},
            "context_too_long",
            "pairs[0].negative",
        ),
    ],
)
def test_training_that_is_refused(
    http: httpx.Client, body: dict[str, Any], code: str, reason: str
) -> None:
    refused(http.post("/vectors/train", json=body), 422, code, reason)
    refused(http.get("/vectors/a"), 404, "unknown_vector", "'a'")

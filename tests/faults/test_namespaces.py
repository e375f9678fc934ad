"""What one key stores and asks is no other key's: names, contents, cached results and prefixes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from logsteer import Client
from logsteer.errors import InternalError, NotFoundError, PermissionDeniedError
from tests.conftest import Server, fake_model, vllm_model
from tests.faults.keys import add_key, connect, serve
from tests.refusals import refused

ITEM = {"context_ids": [5, 6, 7], "target_ids": [[8]]}
TOKENS = {
    "ann": ("score", "steer", "write"),
    "bob": ("score", "steer", "write"),
    "root": ("score", "steer", "write", "admin"),
}
Tokens = dict[str, str]


def vector(value: float, width: int = 16) -> bytes:
    """A vector's file, of another content for each value."""
    return save({"0": np.full(width, value, dtype=np.float32)})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("namespaces")


@pytest.fixture(scope="module")
def tokens(place: Path) -> Tokens:
    return {name: add_key(place / "keys.json", name, *TOKENS[name]) for name in TOKENS}


@pytest.fixture(scope="module")
def server(place: Path, tokens: Tokens) -> Iterator[Server]:
    """A fake with keys; `start` is what was stored before there were any."""
    store = {"store_directory": str(place / "store")}
    config = {"models": [fake_model()]} | store
    with serve(config, place / "before") as before, connect(before, None) as http:
        assert http.put("/vectors/start", content=vector(0.5)).status_code == 200
        assert http.get("/vectors/shared/start").json()["name"] == "start"
    with serve(config | {"key_file": str(place / "keys.json")}, place / "server") as server:
        yield server


@pytest.fixture
def ann(server: Server, tokens: Tokens) -> Iterator[Client]:
    with Client(server.url, api_key=tokens["ann"], max_retries=0) as client:
        yield client


@pytest.fixture
def bob(server: Server, tokens: Tokens) -> Iterator[Client]:
    with Client(server.url, api_key=tokens["bob"], max_retries=0) as client:
        yield client


@pytest.fixture
def root(server: Server, tokens: Tokens) -> Iterator[Client]:
    with Client(server.url, api_key=tokens["root"], max_retries=0) as client:
        yield client


def use(client: Client, **vector: Any) -> None:
    """Steer with a vector. Errors: NotFoundError; the fake steers nothing, and is caught at it."""
    with pytest.raises(InternalError, match="did not apply the steering"):
        client.steer(["a"], {"vectors": [vector]}, max_tokens=2)


def test_a_name_is_each_keys_own(ann: Client, bob: Client) -> None:
    cards = [
        client.vectors.put("mood", vector(value)) for client, value in ((ann, 1.0), (bob, 2.0))
    ]
    assert cards[0].sha256 != cards[1].sha256
    assert [client.vectors.get("mood").sha256 for client in (ann, bob)] == [
        card.sha256 for card in cards
    ]
    ann.vectors.put("only", vector(3.0))
    for ask in (bob.vectors.get, bob.vectors.delete, bob.vectors.download):
        with pytest.raises(NotFoundError) as caught:
            ask("only")
        assert "only" not in str(caught.value).partition(";")[2]  # of the names that are there
    with pytest.raises(NotFoundError):
        use(bob, name="only")
    use(ann, name="only")


def test_a_content_is_found_by_its_digest_by_those_who_have_it(
    ann: Client, bob: Client, root: Client
) -> None:
    sha256 = ann.vectors.put("secret", vector(4.0)).sha256
    use(ann, sha256=sha256)
    with pytest.raises(NotFoundError):
        use(bob, sha256=sha256)
    root.vectors.put("shared/common", vector(5.0))
    for client in (ann, bob):
        use(client, sha256=root.vectors.get("shared/common").sha256)


def test_what_is_shared_is_everybodys_to_read_and_the_admins_to_write(
    ann: Client, bob: Client, root: Client, server: Server, tokens: Tokens
) -> None:
    assert ann.vectors.get("shared/start").name == "shared/start"  # of the time before keys
    card = root.vectors.put("shared/calm", vector(6.0))
    assert card.name == "shared/calm"
    use(bob, name="shared/calm")
    assert bob.vectors.download("shared/calm") == bob.vectors.download("shared/calm", "safetensors")
    with pytest.raises(NotFoundError):
        ann.vectors.get("calm")
    for write in (
        lambda: ann.vectors.put("shared/calm", vector(7.0)),
        lambda: ann.vectors.delete("shared/calm"),
        lambda: ann.vectors.combine("shared/sum", {"shared/calm": 2.0}),
        lambda: ann.vectors.train("shared/new", [{"positive": "a", "negative": "b"}], layers=[0]),
    ):
        with pytest.raises(PermissionDeniedError, match="scope admin"):
            write()
    assert ann.vectors.combine("sum", {"shared/calm": 2.0}).about.parts[0].name == "shared/calm"
    assert root.vectors.combine("shared/sum", {"shared/calm": 2.0}).name == "shared/sum"
    assert root.vectors.delete("shared/sum").name == "shared/sum"
    with connect(server, tokens["ann"]) as http:
        taken = http.put("/vectors/shared", content=vector(1.0))
        assert (taken.status_code, taken.json()["param"]) == (422, "name")


def test_a_list_shows_own_and_shared_ones(ann: Client, bob: Client, root: Client) -> None:
    ann.vectors.put("listed", vector(8.0))
    root.vectors.put("shared/listed", vector(9.0))
    names = [card.name for card in ann.vectors.list().vectors]
    assert {"listed", "shared/listed", "shared/start"} <= set(names)
    assert "listed" not in [card.name for card in bob.vectors.list().vectors]
    assert "shared/listed" in [card.name for card in bob.vectors.list().vectors]
    assert bob.overrides.list().overrides == [] and bob.adapters.list().adapters == []


@pytest.mark.parametrize(
    "path",
    ["a/b", "shared/a/b", "../keys/bob/vectors/mood", "shared/../mood", "shared%2F.."],
)
def test_no_other_slash_is_in_a_name(server: Server, tokens: Tokens, path: str) -> None:
    with connect(server, tokens["root"]) as http:
        for method in ("GET", "PUT", "DELETE"):
            answer = http.request(method, f"/vectors/{path.replace('..', '%2E%2E')}", content=b"")
            assert answer.status_code in (404, 405, 422), answer.text
    for name in ("keys/bob/mood", "shared/shared/a", "../mood"):
        body = {"items": [ITEM], "steering": {"vectors": [{"name": name}]}}
        with connect(server, tokens["root"]) as http:
            assert http.post("/logprob", json=body).status_code == 422


def score(http: httpx.Client, **fields: Any) -> dict[str, int]:
    """Usage of a text scored; the same text each time."""
    answer = http.post("/logprob", json={"items": [ITEM]} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def test_a_result_tells_no_other_key_that_it_is_known(server: Server, tokens: Tokens) -> None:
    """`cached_results: 1` told one caller that another had scored the same text."""
    with connect(server, tokens["ann"]) as ann, connect(server, tokens["bob"]) as bob:
        ann_item = {"items": [{"context_ids": [9, 9, 9], "target_ids": [[10]]}]}
        assert [score(ann, **ann_item)["cached_results"] for _ in range(2)] == [0, 1]
        assert [score(bob, **ann_item)["cached_results"] for _ in range(2)] == [0, 1]


def test_a_setting_shares_results(tmp_path: Path, place: Path, tokens: Tokens) -> None:
    keys = {"key_file": str(place / "keys.json"), "share_caches": True}
    with (
        serve({"models": [fake_model()]} | keys, tmp_path / "server") as server,
        connect(server, tokens["ann"]) as ann,
        connect(server, tokens["bob"]) as bob,
    ):
        assert score(ann)["cached_results"] == 0
        assert score(bob)["cached_results"] == 1


def test_without_keys_shared_is_everything(fake_client: Client) -> None:
    fake_client.vectors.put("plain", vector(1.0))
    assert fake_client.vectors.get("shared/plain").name == "plain"
    fake_client.vectors.put("shared/other", vector(2.0))
    other, shared = (fake_client.vectors.get(name) for name in ("other", "shared/other"))
    assert other == shared
    names = [card.name for card in fake_client.vectors.list().vectors]
    assert not [name for name in names if "/" in name]
    for name in ("plain", "other"):
        fake_client.vectors.delete(name)


@pytest.mark.engine
def test_a_prefix_tells_no_other_key_that_it_is_known(
    tmp_path: Path, place: Path, tokens: Tokens
) -> None:
    """`cached_tokens` and the time until the first token told what others had sent."""
    config = {"models": [vllm_model("demo")], "key_file": str(place / "keys.json")}
    prompt = list(range(5, 105))
    items = [{"context_ids": prompt, "target_ids": [[7]]}]
    with (
        serve(config, tmp_path / "server") as server,
        connect(server, tokens["ann"]) as ann,
        connect(server, tokens["bob"]) as bob,
    ):

        def cached(http: httpx.Client, last: int) -> int:
            body = {"prompt_ids": [[*prompt, last]], "max_tokens": 2}
            answer = http.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["cached_tokens"]

        assert score(ann, items=items, cache=False)["cached_tokens"] == 0
        assert score(bob, items=items, cache=False)["cached_tokens"] == 0
        assert score(ann, items=items, cache=False)["cached_tokens"] >= 64
        assert cached(ann, 6) >= 64  # scoring and generation share what is one key's
        assert cached(bob, 6) >= 64
        with connect(server, tokens["root"]) as root:
            assert cached(root, 6) == 0
            assert cached(root, 6) >= 64


def test_variants_are_seen_as_vectors_are(
    place: Path, server: Server, ann: Client, bob: Client, root: Client
) -> None:
    ann.vectors.put("own", vector(0.25))
    root.vectors.put("shared/all", vector(0.125))
    ann.variants.put("glad", steering="own:1@0")
    with pytest.raises(InternalError, match="did not apply the steering"):
        ann.logprob([ITEM], model="glad")
    assert not bob.models().variants
    with pytest.raises(NotFoundError, match="No model 'glad'"):
        bob.logprob([ITEM], model="glad")
    with refused("invalid_request", "share that, too"):
        root.vectors.put("own", vector(0.5))
        root.variants.put("shared/glad", steering="own:1@0")
    root.variants.put("shared/glad", steering="shared/all:1@0")
    assert [card.name for card in bob.models().variants] == ["shared/glad"]
    with pytest.raises(InternalError, match="did not apply the steering"):
        bob.logprob([ITEM], model="shared/glad")
    with refused("in_use", "shared/glad"):
        root.vectors.delete("shared/all")

"""Data sets of activations: what is done to a job while it runs, rows that cannot be read, keys.

And a server that is killed in the middle of one: nothing is lost, and nothing is there twice.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from safetensors.numpy import load

from logsteer import APIError, Client
from logsteer.extras.activations import ActivationShards
from logsteer.extras.datasets import RowLines
from logsteer.schemas import CaptureCard
from logsteer.schemas.captures import CaptureReduce
from logsteer_server.stores.captures import read_parquet
from logsteer_server.stores.layer_vectors import parse_safetensors
from logsteer_server.tasks.reduction import Reduction
from tests.buckets import open_bucket
from tests.conftest import VOCAB_SIZE, fake_model, vllm_model
from tests.faults.keys import add_key, connect, serve
from tests.faults.processes import find_engines, running, wait_for
from tests.refusals import refused
from tests.servers import Server

ROWS = [f"Once upon a time there were {n} cats." for n in range(40)]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = {
        "ann": add_key(path, "ann", "score", "steer", "write"),
        "bob": add_key(path, "bob", "score", "write"),
        "eve": add_key(path, "eve", "score", "steer"),
        "small": add_key(path, "small", "score", "steer", "write", stored_bytes=4096),
    }
    return keys | {"path": str(path)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokens: dict[str, str]) -> Iterator[Server]:
    """Two fakes: `quick`, and `slow`, which takes 50 ms for 10 tokens."""
    models = [fake_model("quick"), fake_model("slow", delay_s=0.05, ahead_tokens=10)]
    config = {"models": models, "key_file": tokens["path"]}
    with serve(config, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def client(server: Server, tokens: dict[str, str]) -> Iterator[Client]:
    with Client(server.url, api_key=tokens["ann"], model="quick", max_retries=0) as client:
        yield client


def wait_until_done(client: Client, name: str) -> CaptureCard:
    wait_for(lambda: client.captures.get(name).state != "running")
    card = client.captures.get(name)
    assert card.state == "done", card
    return card


def read_rows(client: Client, name: str) -> dict[str, np.ndarray]:
    """All rows of a capture's shards, by tensor."""
    shards = client.captures.index(name).shards
    files = [load(client.captures.shard(name, str(n))) for n, s in enumerate(shards) if s.bytes]
    return {key: np.concatenate([file[key] for file in files]) for key in files[0]}


@pytest.mark.parametrize("read", ["each", "last", "mean"])
def test_rows_are_those_of_activations(client: Client, read: Any, tmp_path: Path) -> None:
    rows = [*ROWS[:10], {"messages": [{"role": "user", "content": "Hi"}]}, {"token_ids": [5, 6, 7]}]
    index = client.capture(rows, f"rows-{read}", [1, 0], tmp_path, read=read, shard_rows=7)
    wanted = client.activations(rows, [0, 1], read=read)
    found = read_rows(client, index.name)
    for layer in (0, 1):
        assert np.array_equal(found[f"resid_post.{layer}"], wanted.layers[layer])
    assert found["document"].tolist() == np.repeat(range(12), np.diff(wanted.row_starts)).tolist()
    places = [(-1, -1)] * 12
    if read != "mean":
        places = [(p, one.token_ids[p]) for one in wanted for p in one.positions]
    assert list(zip(found["position"], found["token_ids"], strict=True)) == places
    assert (index.documents, index.rows, index.state) == (12, len(places), "done")
    shards = ActivationShards.of_directory(tmp_path)
    assert len(shards) == index.num_shards > 1
    read_back = np.concatenate([shard.layers[1] for shard in shards])
    assert np.array_equal(read_back, wanted.layers[1])


def test_what_cannot_be_read_is_a_problem_of_its_row_alone(client: Client) -> None:
    lines = [
        b'"a text"', b"", b"{no json", b'{"other": 1}', b'{"token_ids": [99999999]}',
        b'{"text": "fine", "more": 2}', b"[1]", json.dumps("the cat " * 200).encode(),
        b'{"text": 3}',
    ]  # fmt: skip
    source = client.captures.put("faulty", b"\n".join(lines))
    assert source.documents == 8
    client.captures.start("faulty", [0])
    card = wait_until_done(client, "faulty")
    assert (card.documents, card.problems) == (8, 6)
    codes = {one.document: one.code for one in client.captures.index("faulty").failures}
    assert codes == dict.fromkeys((1, 2, 3, 5, 7), "invalid_request") | {6: "context_too_long"}
    assert set(read_rows(client, "faulty")["document"]) == {0, 4}

    client.captures.start("cut", [0], items=["the cat " * 200, "a"], max_length=9, dtype="float16")
    card = wait_until_done(client, "cut")
    assert (card.truncated, card.problems) == (1, 0)
    found = read_rows(client, "cut")
    assert np.bincount(found["document"])[0] == 9
    assert found["resid_post.0"].dtype == np.float16


def test_a_job_is_paused_resumed_asked_for_again_and_deleted(
    server: Server, client: Client
) -> None:
    asked = {"layers": [1], "items": ROWS, "model": "slow"}
    card = client.captures.start("long", **asked)
    assert (card.state, card.documents_total) == ("running", 40)
    assert client.captures.start("long", **asked).created == card.created
    with refused("exists", "of another request", param="name"):
        client.captures.start("long", **asked | {"layers": [0]})
    with refused("exists"):
        client.captures.put("long", b'"another text"')
    paused = client.captures.pause("long")
    assert (paused.state, client.captures.get("long").documents) == ("paused", 0)
    (index,) = server.directory.rglob("keys/ann/captures/long/index.json")
    index.write_text(index.read_text().replace('"model":"slow"', '"model":"gone"'))
    with refused("unknown_model", "gone"):
        client.captures.resume("long")
    assert client.captures.pause("long").state == "paused", "that needs no model"
    index.write_text(index.read_text().replace('"model":"gone"', '"model":"slow"'))
    assert client.captures.resume("long").state == "running"
    done = wait_until_done(client, "long")
    assert (done.documents, done.created) == (40, card.created)
    assert client.captures.pause("long").state == "done", "it has ended"
    again = client.captures.start("long", **asked | {"layers": [0]}, overwrite=True)
    assert (again.state, again.layers) == ("running", [0])
    assert client.captures.delete("long").name == "long"
    with refused("not_found", "long"):
        client.captures.get("long")
    with refused("not_found"):
        client.captures.delete("long")
    assert "long" not in [card.name for card in client.captures.list().captures]


@pytest.mark.parametrize(
    ("options", "code", "match"),
    [
        ({"items": ["a"], "layers": [99]}, "invalid_request", "layers"),
        ({"items": ["a"], "hook": "nothing"}, "unsupported_by_engine", "nothing"),
        ({"items": ["a"], "model": "nobody"}, "unknown_model", "nobody"),
        ({"items": ["a"], "adapter": "mine"}, "unsupported_by_engine", "adapters"),
        ({"items": ["a"], "reduce": {"k": 3}}, "invalid_request", "asks for nothing"),
        ({"items": ["a"], "reduce": {"top": [{"name": "mood"}]}}, "unknown_vector", "mood"),
        (
            {"items": ["a"], "reduce": {"top": [{"data": {"0": [1.0] * 16}}]}},
            "invalid_request",
            "not captured",
        ),
        ({}, "invalid_request", "no data set"),
        ({"name": "shared/x", "items": ["a"]}, "invalid_request", "name"),
    ],
)
def test_what_is_refused_at_once(
    client: Client, options: dict[str, Any], code: str, match: str
) -> None:
    with refused(code, match):
        client.captures.start(**{"name": "refused", "layers": [1]} | options)
    with refused("not_found"):
        client.captures.get("refused")


def test_statistics_are_those_of_all_rows_but_bos_and_sinks(client: Client) -> None:
    probe = np.random.default_rng(3).normal(size=16).astype("f4")
    asked: dict[str, Any] = {"mean": True, "covariance": True, "norms": True, "k": 5}
    asked["top"] = [{"data": {"1": probe.tolist()}}]
    index = client.capture(ROWS, "sums", [0, 1], reduce=asked, shards=True, shard_rows=60)
    rows = read_rows(client, "sums")
    is_left_out = rows["position"] == 0
    for name in ("resid_post.0", "resid_post.1"):
        norms = np.linalg.norm(rows[name], axis=1)
        for document in range(len(ROWS)):
            own = rows["document"] == document
            is_left_out |= own & (norms > 3 * np.median(norms[own]))
    x_ND = rows["resid_post.1"][~is_left_out].astype(np.float64)
    found = load(client.captures.statistics("sums"))
    assert np.allclose(found["mean.1"], x_ND.mean(0), rtol=0, atol=1e-12)
    assert np.allclose(found["covariance.1"], np.cov(x_ND.T, bias=True), rtol=0, atol=1e-12)
    assert index.reduced is not None and index.reduced.norms and index.reduced.top
    assert len(ROWS) <= index.reduced.sinks == is_left_out.sum()
    norms = np.linalg.norm(x_ND, axis=1)
    told = index.reduced.norms[1]
    assert [told.mean, told.std, told.largest] == pytest.approx(
        [norms.mean(), norms.std(), norms.max()]
    )
    readings = x_ND @ (probe / np.linalg.norm(probe))
    best = np.sort(readings)[::-1][:5]
    assert [one.reading for one in index.reduced.top[0].examples] == pytest.approx(best, abs=1e-5)
    first = index.reduced.top[0].examples[0]
    text = client.tokenize(ROWS[first.document]).results[0]
    assert text.token_ids[first.position] == first.token_id
    alone = client.capture(ROWS, "sums-alone", [1], reduce={"mean": True})
    assert (alone.bytes, alone.rows) == (0, len(is_left_out))


def test_an_answer_is_written_under_a_name_once(
    server: Server, client: Client, tokens: dict[str, str]
) -> None:
    capture: dict[str, Any] = {"layers": [1], "to": "store://answer"}
    asked: dict[str, Any] = {"capture": capture, "max_tokens": 4, "seed": 1}
    told = client.generate(["a", "b c"], **asked).captured
    assert told is not None and (told.documents, told.num_shards) == (2, 1)
    assert client.generate(["a", "b c"], **asked).captured == told, "it is the same request"
    created = client.captures.get("answer").created
    with refused("exists", "of another request", param="capture.to"):
        client.generate(["a"], **asked)
    with refused("exists", "of another request"):
        client.captures.start("answer", [1], items=["a"])
    assert client.captures.get("answer").created == created
    found = client.perplexity(["a b c"], capture=capture | {"overwrite": True})
    assert found.captured and client.captures.get("answer").documents == found.captured.documents
    assert client.captures.pause("answer").state == client.captures.resume("answer").state == "done"
    client.captures.start("busy", [1], items=ROWS, model="slow")
    with refused("exists"):
        client.generate(["a"], capture=capture | {"to": "store://busy", "overwrite": True})
    client.captures.delete("busy")
    for key, to, code, param in (
        ("eve", "store://answer", "forbidden", "capture.to"),
        ("ann", "store://../answer", "invalid_request", "capture.to"),
        ("small", "store://answer", "payload_too_large", None),
    ):
        with Client(server.url, api_key=tokens[key], model="quick", max_retries=0) as other:
            with refused(code, param=param):
                other.generate(["a " * 50], capture=capture | {"to": to})
            assert key == "ann" or not other.captures.list().captures


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_data_set_of_the_store_is_named_by_its_place(
    server: Server, client: Client, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = client.capture(ROWS[:9], "sent", [1], overwrite=True)
    (index,) = server.directory.rglob("keys/ann/captures/sent/index.json")
    place = index.parents[4] / "datasets" / "of" / f"rows.{kind}"
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "jsonl":
        place.write_bytes(b"".join(RowLines(ROWS[:9], "text")))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"id": range(9), "text": ROWS[:9]}), place)
    name, source = f"named-{kind}", f"store://of/rows.{kind}"
    found = client.capture(source, name, [1])
    assert (found.documents, found.source == wanted.source) == (9, kind == "jsonl")
    same, rows = (read_rows(client, one) for one in ("sent", name))
    assert all(np.array_equal(rows[key], same[key]) for key in same)
    place.write_text("neither")
    assert client.capture(source, name, [1]) == found, "it was copied once"
    with refused("exists"):
        client.captures.start(name, [1], source=f"store://of/others.{kind}")
    for path, code in (
        (f"store://of/others.{kind}", "not_found"),
        ("store://../keys/ann/captures/sent/index.json", "invalid_request"),
        (str(index), "invalid_request"),
        *([(source, "invalid_request")] if kind == "parquet" else []),
    ):
        with refused(code, param="source"):
            client.captures.start(name, [1], source=path, overwrite=True)
    assert client.captures.index(name) == found, "what cannot be read replaces nothing"
    if kind == "parquet":
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with refused("invalid_request", "pip install pyarrow.*None"), place.open("rb") as file:
            list(read_parquet(file))


def test_a_long_token_at_any_layer_is_a_sink_of_its_document() -> None:
    rows_N3 = np.array([[0, n, 9] for n in range(4)] + [[1, n, 9] for n in range(4)], np.int32)
    layers = {layer: np.ones((8, 2), np.float32) for layer in (0, 1)}
    layers[0][2] = 5
    layers[1][4:] = 10
    reduction = Reduction(CaptureReduce(mean=True), ())
    reduction.add(layers, rows_N3, str)
    assert (reduction.describe().rows, reduction.describe().sinks) == (7, 1)
    assert reduction.sums["sum.0"].tolist() == [7, 7]


def test_a_vector_is_whitened_by_the_covariance_of_a_capture(client: Client) -> None:
    client.capture(ROWS, "background", [1], reduce={"covariance": True})
    pairs = [(f"I am happy {n}", f"I am sad {n}") for n in range(6)]
    card = client.vectors.train(
        "whitened", pairs, method="lda", layers=[1], whiten="background"
    ).vector
    assert card.about.whiten == "background"
    items = client.activations([text for pair in pairs for text in pair], [1], read="last")
    x_ND = np.concatenate([item.layers[1] for item in items]).astype(np.float64)
    apart_D = x_ND[0::2].mean(0) - x_ND[1::2].mean(0)
    covariance_DD = load(client.captures.statistics("background"))["covariance.1"]
    expected_D = np.linalg.solve(covariance_DD, apart_D)
    found_D = parse_safetensors(client.vectors.download("whitened")).layers[1]
    cosine = found_D @ expected_D / np.linalg.norm(found_D) / np.linalg.norm(expected_D)
    assert cosine > 0.999
    for name, options, match in (
        ("nothing", {}, "nothing"),
        ("background", {"hook": "resid_pre"}, "resid_post"),
        ("background", {"layers": [0]}, "layers"),
    ):
        asked = {"method": "lda", "layers": [1], "whiten": name} | options
        with pytest.raises(APIError, match=match):
            client.vectors.train("refused", pairs, **asked)


def test_each_key_has_its_own(server: Server, client: Client, tokens: dict[str, str]) -> None:
    client.capture(ROWS[:2], "mine", [1])
    for path in ("", "/index", "/shards/0", "/statistics"):
        with connect(server, tokens["bob"]) as http:
            assert http.get(f"/captures/mine{path}").status_code == 404
    body = {"name": "mine", "layers": [1], "items": ["a"], "model": "quick"}
    with connect(server, tokens["eve"]) as http:
        answers = [http.post("/captures", json=body), http.delete("/captures/mine")]
        answers += [http.post(f"/captures/mine/{change}") for change in ("pause", "resume")]
        answers.append(http.put("/captures/mine/source", content=b'"a"'))
        assert [answer.status_code for answer in answers] == [403] * 5
        assert http.get("/captures").json() == {"captures": []}
    with Client(server.url, api_key=tokens["small"], model="quick", max_retries=0) as small:
        with refused("payload_too_large"):
            small.captures.put("full", b'"a text"\n' * 1000)
        small.captures.start("full", [1], items=["the cat " * 20] * 20)
        wait_for(lambda: small.captures.get("full").state == "failed")
        assert "capture store would hold" in str(small.captures.get("full").error)
    (found,) = server.directory.rglob("keys/ann/captures/mine/index.json")
    found.write_text("{")
    with refused("internal", "damaged"):
        client.captures.get("mine")
    assert client.captures.delete("mine").name == "mine"


@pytest.mark.full
def test_any_server_of_a_bucket_stops_a_job_and_moves_it(tmp_path: Path) -> None:
    slow = fake_model("slow", delay_s=0.05, ahead_tokens=10)
    with open_bucket() as bucket, ExitStack() as stack:
        clients = []
        for name in "ab":
            (tmp_path / name).mkdir()
            own = {"models": [slow], "store_directory": str(tmp_path / name / "own")}
            server = stack.enter_context(running(own | bucket.settings, tmp_path / name))
            server.wait_until_ready()
            clients.append(stack.enter_context(Client(server.url, max_retries=0)))
        first, second = clients
        began = first.captures.start("job", [1], items=ROWS)
        assert second.captures.get("job").server == began.server
        second.captures.pause("job")
        assert second.captures.get("job").state == "paused"
        moved = second.captures.resume("job")
        assert moved.server != began.server
        done = wait_until_done(second, "job")
        assert done.server == moved.server
        found = read_rows(first, "job")["document"]
        assert np.array_equal(np.unique(found), np.arange(40)) and len(found) == done.rows
        first.captures.delete("job")
        assert not second.captures.list().captures


@pytest.mark.engine
def test_a_job_survives_the_death_of_client_server_and_engine(tmp_path: Path) -> None:
    """On the real demo model: all are killed, and the same call is made again."""
    draw = np.random.default_rng(5)
    sizes = draw.integers(1, 120, 3000)
    rows = [{"token_ids": draw.integers(3, VOCAB_SIZE, n).tolist()} for n in sizes]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(RowLines(rows, "text")))
    config = {"models": [vllm_model("demo")], "cache_bytes": 0}
    asked: dict[str, Any] = {"layers": [2], "shard_rows": 5000, "reduce": {"mean": True}}
    asked |= {"source": str(file), "shards": True, "progress": False}
    with running(config, tmp_path) as server:
        server.wait_until_ready()
        call = f"Client({server.url!r}).capture(name='all', **{asked})"
        caller = subprocess.Popen([sys.executable, "-c", f"from logsteer import Client; {call}"])
        with Client(server.url, max_retries=0) as client, caller:
            wait_for(lambda: any(one.num_shards >= 2 for one in client.captures.list().captures))
            for pid in (caller.pid, server.process.pid, *find_engines(server)):
                os.kill(pid, signal.SIGKILL)
    with running(config, tmp_path) as server:
        server.wait_until_ready()
        with Client(server.url) as client:
            before = client.captures.get("all")
            assert (before.state, before.documents < 3000) == ("running", True), before
            index = client.capture(name="all", directory=tmp_path / "out", **asked)
            sums = load(client.captures.statistics("all"))
            few = [0, 1500, 2999]
            wanted = client.activations([rows[n] for n in few], [2])
    shards = ActivationShards.of_directory(tmp_path / "out")
    document = np.concatenate([shard.documents for shard in shards])
    position = np.concatenate([shard.positions for shard in shards])
    assert np.array_equal(document, np.repeat(np.arange(3000), sizes)), "each once, in order"
    assert np.array_equal(position, np.concatenate([np.arange(n) for n in sizes]))
    assert index.documents == 3000 and index.rows == sizes.sum()
    x_ND = np.concatenate([shard.layers[2] for shard in shards])
    for n, item in zip(few, wanted, strict=True):
        assert np.allclose(x_ND[document == n], item.layers[2], rtol=0, atol=1e-4)
    norms = np.split(np.linalg.norm(x_ND, axis=1), sizes.cumsum()[:-1])
    is_kept = np.concatenate([norms_T <= 3 * np.median(norms_T) for norms_T in norms])
    mean_D = x_ND[is_kept].mean(0, dtype=np.float64)
    assert np.allclose(sums["mean.2"], mean_D, rtol=0, atol=1e-9)

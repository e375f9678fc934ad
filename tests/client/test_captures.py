"""Activations as arrays, of a server that follows a script; and captures, of one that has a fake
engine.
"""

import io
import json
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet
import pytest
import torch
from safetensors.numpy import load_file

from logsteer import Client
from logsteer.cli import main
from logsteer.errors import AnswerError, ConflictError, InvalidRequestError
from logsteer.extras.activations import (
    INDEX,
    Activations,
    ActivationShards,
    open_activations,
)
from logsteer.schemas import CaptureIndex
from logsteer.schemas.captures import name_shard
from logsteer_server.api.encoding import SAFETENSORS, encode_tensors
from tests.servers import Server

from .documents import ANSWER
from .scripted import Caller

WIDTH = 3


class CaptureServer:
    """Answers with an activation [1, WIDTH] a text of its length."""

    def __init__(self) -> None:
        self.answer = ANSWER | {"hook": "resid_post", "read": "last"}
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked.append(body)
        assert SAFETENSORS in request.headers["accept"]
        return httpx.Response(200, content=self.write(body), headers={"content-type": SAFETENSORS})

    def write(self, body: dict[str, Any]) -> bytes:
        items, count = body["items"], len(body["items"])
        rows = [np.full((1, WIDTH), len(text), np.float32) for text in items]
        starts = [np.arange(count + 1, dtype=np.int32)]
        tensors = {f"resid_post.{layer}": [row * layer for row in rows] for layer in body["layers"]}
        side = {
            "row_starts": starts,
            "token_ids": [np.arange(2 * count, dtype=np.int32)],
            "token_starts": [2 * starts[0]],
            "positions": [np.ones(count, dtype=np.int32)],
        }
        results = [{"truncated_tokens": n, "sinks": {}, "flags": []} for n in range(count)]
        return encode_tensors(tensors | side, {"answer": self.answer | {"results": results}})


TEXTS = ["a", "bb", "ccc", "dddd", "eeeee"]


def test_activations_are_arrays_by_layer_and_by_text(call: Caller, tmp_path: Path) -> None:
    server = CaptureServer()
    found = call(server, lambda client: client.activations(TEXTS, range(1, 3), read="last"))
    assert server.asked == [{"items": TEXTS, "layers": [1, 2], "read": "last"}]
    assert list(found.layers) == [1, 2]
    assert isinstance(found, Activations)
    assert found.layers[2].tolist() == [[2.0 * n] * WIDTH for n in range(1, 6)]
    assert repr(found) == "<Activations: 5 texts, 5 rows, layers [1, 2]>"
    assert len(found) == 5
    assert found[3].layers[1].tolist() == [[4.0] * WIDTH]
    assert found[-1].token_ids.tolist() == [8, 9]
    assert found[1].positions is not None and found[1].positions.tolist() == [1]
    assert [item.truncated_tokens for item in found] == [0, 1, 2, 3, 4]
    assert len(found[1:3]) == 2
    with pytest.raises(IndexError):
        found[5]
    assert found.answer.provenance.weights_digest == ANSWER["provenance"]["weights_digest"]
    found.save(tmp_path / "a.safetensors")
    assert load_file(tmp_path / "a.safetensors")["resid_post.1"].shape == (5, WIDTH)
    again = open_activations(tmp_path / "a.safetensors")
    assert np.array_equal(again.layers[2], found.layers[2])


def test_activations_are_a_table_of_their_norms() -> None:
    server = CaptureServer()
    found = Activations(bytes(server.write({"items": TEXTS, "layers": [1, 2]})))
    frame = found.to_pandas()
    assert list(frame["item"]) == [0, 1, 2, 3, 4] and list(frame["token_id"]) == [1, 3, 5, 7, 9]
    assert frame["norm@2"].to_numpy() == pytest.approx([2 * n * WIDTH**0.5 for n in range(1, 6)])


def file_of(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with this header, right or wrong."""
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + data


def entry(begin: int, end: int, *shape: int, dtype: str = "F32") -> dict[str, Any]:
    return {"x.1": {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}", b"\x02" + bytes(7) + b"{}", b"\xff" * 30, file_of(5), file_of([]),
        file_of({"__metadata__": 5}), file_of({"x.1": 5}), file_of({"x.1": {"dtype": "F32"}}),
        file_of(entry(0, 8, 2), bytes(4)), file_of(entry(-8, 0, 2), bytes(8)),
        file_of(entry(0, 8, 3), bytes(8)), file_of(entry(0, 8, 1, dtype="F64"), bytes(8)),
        file_of({"__metadata__": {"answer": "[]"}}),
    ],
)  # fmt: skip
def test_what_is_no_file_is_an_error(call: Caller, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(AnswerError, match="no file of /activations"):
        open_activations(path)
    reply = httpx.Response(200, content=content, headers={"content-type": SAFETENSORS})
    with pytest.raises(AnswerError, match="no file of /activations"):
        call(lambda request: reply, lambda client: client.activations("a", [1]))


@pytest.fixture(scope="module")
def rows(fake_server: Server) -> CaptureIndex:
    """The texts, captured at two layers in shards of a few rows."""
    with Client(fake_server.url) as client:
        return client.capture(TEXTS * 20, "texts", [0, 1], shard_rows=30)


def test_a_loader_gives_every_row_once_in_batches(
    fake_server: Server, rows: CaptureIndex, tmp_path: Path
) -> None:
    with Client(fake_server.url) as client:
        near = client.activation_loader("texts", 16, layer=1, directory=tmp_path)
        far = client.activation_loader("texts", 16, layer=1)
        mixed = client.activation_loader("texts", 16, 50, layer=1, directory=tmp_path, seed=3)
        endless = client.activation_loader("texts", 16, 50, layer=1, repeat=True)
        with pytest.raises(InvalidRequestError, match="choose one of"):
            client.activation_loader("texts", 16)
    batches = list(near)
    assert {len(batch) for batch in batches[:-1]} == {16}
    x_ND = torch.cat(batches)
    assert len(x_ND) == rows.rows and x_ND.dtype == torch.float32
    assert torch.equal(torch.cat(list(far)), x_ND)
    found = torch.cat(list(mixed))
    assert not torch.equal(found, x_ND)
    order, wanted = (np.lexsort(rows_ND.numpy().T) for rows_ND in (found, x_ND))
    assert torch.equal(found[order.copy()], x_ND[wanted.copy()])
    assert torch.equal(found, torch.cat(list(mixed))), "the seed says in which order"
    twice = torch.cat(list(islice(endless, 2 * len(batches) + 3)))
    assert len(twice) == 16 * (2 * len(batches) + 3)
    workers = torch.utils.data.DataLoader(mixed, batch_size=None, num_workers=2)
    assert sum(map(len, workers)) == rows.rows


def test_a_directory_has_the_shards_of_one_capture(
    fake_server: Server, rows: CaptureIndex, tmp_path: Path
) -> None:
    with Client(fake_server.url) as client:
        index = client.capture(TEXTS * 20, "texts", [0, 1], tmp_path, shard_rows=30)
        assert index == rows, "it is the same job"
        (tmp_path / name_shard(1)).write_bytes(b"cut")
        client.capture(TEXTS * 20, "texts", [0, 1], tmp_path, shard_rows=30)
        assert (
            sum(len(shard.documents) for shard in ActivationShards.of_directory(tmp_path))
            == rows.rows
        )
        with pytest.raises(InvalidRequestError, match="another directory"):
            client.capture(TEXTS, "others", [0], tmp_path)
        with pytest.raises(ConflictError, match="of another request"):
            client.capture(TEXTS, "texts", [0, 1])
        (tmp_path / name_shard(0)).write_bytes(b"no tensors")
        with pytest.raises(AnswerError, match="no shard of activations"):
            ActivationShards.of_directory(tmp_path)[0]
    for content in ("[]", "{x", "", '{"version": 1}'):
        (tmp_path / INDEX).write_text(content)
        with pytest.raises(InvalidRequestError, match="not an index of a capture"):
            ActivationShards.of_directory(tmp_path)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("one\n\ntwo\r\n", ["one", "two"]),
        ('"a text"\n\n{"text": "b"}\n', ["a text", "b"]),
        ('"Hello," he said.\nnull\n', ['"Hello," he said.', "null"]),
        ('{"text": "\\u00e9"}\n"c"', ["é", "c"]),
    ],
)
def test_the_command(
    fake_server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: str,
    texts: list[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    out = tmp_path / "out"
    argv = ["command", "-", "--layers", "0-1", "--output", str(out), "--read", "last"]
    argv += ["--at", "0:1", "--overwrite", "--base-url", fake_server.url]
    assert main(["capture", *argv]) == 0
    told = f"command: {len(texts)} documents, {len(texts)} rows of 16 numbers; shards: 1"
    assert told in capsys.readouterr().out
    (shard,) = ActivationShards.of_directory(out)
    with Client(fake_server.url) as client:
        wanted = client.activations(texts, [0, 1], positions={"slices": [[0, 1]]}, read="last")
    assert np.array_equal(shard.layers[1], wanted.layers[1])


@pytest.mark.parametrize("value", ["null", "5", '["a"]', '{"text": "a"}'])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows"])
def test_what_is_no_text_is_not_captured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    path, asked = tmp_path / name, []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request.read())
        return httpx.Response(500)

    argv = ["capture", "name", str(path), "--layers", "1"]
    for content, said in (
        (f'{{"text": "a"}}\n\n{{"body": {value}}}', "row 1 has no text under 'text', only body"),
        ('{"text": "a"}\n5', "row 1 is 5, neither a text"),
        ('"a"\n{', "line 2: no JSON"),
        ("\n", "the source has no rows"),
    ):
        path.write_text(content)
        assert main(argv, transport=httpx.MockTransport(refuse)) == 1
        assert said in capsys.readouterr().err
    assert not asked


@pytest.mark.parametrize("column", ["text", "body", "token_ids", "messages"])
def test_documents_of_a_parquet_file(
    fake_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str
) -> None:
    texts = [f"document {n}" for n in range(3000)]
    cells: dict[str, list[Any]] = {
        "text": texts,
        "body": texts,
        "token_ids": [[1, 2, n % 9] for n in range(3000)],
        "messages": [[{"role": "user", "content": text}] for text in texts],
    }
    path = tmp_path / "documents.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": texts, column: cells[column]}), path)
    argv = [column, str(path), "--layers", "1", "--read", "last", "--base-url", fake_server.url]
    assert main(["capture", *argv, *(["--field", "body"] if column == "body" else [])]) == 0
    assert f"{column}: 3000 documents, 3000 rows" in capsys.readouterr().out
    plain = texts if column == "body" else [{column: cell} for cell in cells[column]]
    with Client(fake_server.url) as client:
        index = client.capture(plain, "plain", [1], read="last", overwrite=True)
        found, wanted = (client.captures.shard(one, "0") for one in (column, "plain"))
    assert index.documents == 3000 and found == wanted


def test_captures_are_listed_and_deleted(
    fake_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(fake_server.url) as client:
        client.capture(TEXTS, "listed", [1], read="last", overwrite=True)
    here = ["--base-url", fake_server.url]
    assert main(["captures", "list", "--format", "jsonl", *here]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = [(row["state"], row["documents"]) for row in rows if row["name"] == "listed"]
    assert told == [("done", len(TEXTS))]
    assert main(["captures", "list", *here]) == 0
    assert "listed" in capsys.readouterr().out
    assert main(["captures", "delete", "listed", *here]) == 0
    assert "deleted listed" in capsys.readouterr().out
    assert main(["captures", "delete", "listed", *here]) == 1

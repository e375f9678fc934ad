"""Activations as arrays, and captures as shards, of a server that follows a script."""

import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from logsteer.cli import main
from logsteer.errors import AnswerError, InvalidRequestError, PayloadTooLargeError
from logsteer.extras.activations import INDEX, Activations, ActivationShards, open_activations
from logsteer_server.api.encoding import SAFETENSORS, encode_tensors

from .documents import ANSWER
from .scripted import Caller, problem

WIDTH = 3


class CaptureServer:
    """Answers with an activation [1, WIDTH] a text of its length, for at most `limit` texts."""

    def __init__(self, limit: int = 100, **answer: Any) -> None:
        self.limit = limit
        self.answer = ANSWER | {"hook": "resid_post", "read": "last"} | answer
        self.asked: list[dict[str, Any]] = []
        self.left = 10**6

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked.append(body)
        assert SAFETENSORS in request.headers["accept"]
        self.left -= 1
        if self.left < 0:
            raise httpx.ReadTimeout("gone")
        if len(body["items"]) > self.limit:
            return problem("payload_too_large", 413)
        return httpx.Response(
            200, content=bytes(self.write(body)), headers={"content-type": SAFETENSORS}
        )

    def write(self, body: dict[str, Any]) -> memoryview:
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
    assert not again.layers[2].flags.writeable


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


def capture(call: Caller, server: CaptureServer, directory: Path, **options: Any) -> Any:
    given: dict[str, Any] = {"layers": [1], "batch_size": 2} | options
    texts = given.pop("texts", TEXTS)
    return call(server, lambda client: client.capture(texts, directory, **given))


def test_shards_have_all_texts_in_order(call: Caller, tmp_path: Path) -> None:
    server = CaptureServer()
    shards = capture(call, server, tmp_path / "new" / "x", read="last")
    assert [body["items"] for body in server.asked] == [TEXTS[:2], TEXTS[2:4], TEXTS[4:]]
    assert (len(shards), shards.num_items, shards.num_rows) == (3, 5, 5)
    rows = np.concatenate([shard.layers[1] for shard in shards])
    assert rows[:, 0].tolist() == [1, 2, 3, 4, 5]
    index = json.loads((tmp_path / "new" / "x" / INDEX).read_text())
    assert index["asked"] == {"layers": [1], "read": "last"}
    assert index["model"]["model"] == ANSWER["model"]
    assert [shard["items"] for shard in index["shards"]] == [2, 2, 1]
    assert len(ActivationShards(tmp_path / "new" / "x")[1:]) == 2


def test_a_capture_goes_on_where_it_was_interrupted(call: Caller, tmp_path: Path) -> None:
    server = CaptureServer()
    server.left = 1
    with pytest.raises(Exception, match="did not answer"):
        capture(call, server, tmp_path)
    server.left = 100
    server.asked.clear()
    shards = capture(call, server, tmp_path)
    assert [body["items"] for body in server.asked] == [TEXTS[2:4], TEXTS[4:]]
    server.asked.clear()
    assert len(capture(call, server, tmp_path)) == len(shards) == 3
    assert server.asked == []
    more = capture(call, server, tmp_path, texts=[*TEXTS, "six"])
    assert (len(more), server.asked[-1]["items"]) == (4, ["six"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layers": [2]}, "name another directory"),
        ({"read": "mean"}, "name another directory"),
        ({"texts": ["z", *TEXTS[1:]]}, "other texts"),
        ({"texts": TEXTS[:1]}, "other texts"),
    ],
)
def test_a_directory_of_something_else_is_refused(
    call: Caller, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    server = CaptureServer()
    capture(call, server, tmp_path)
    asked = len(server.asked)
    with pytest.raises(InvalidRequestError, match=reason):
        capture(call, server, tmp_path, **options)
    assert len(server.asked) == asked


@pytest.mark.parametrize(
    "content",
    ["[]", "{x", "", '{"version": 1}', '{"version": 2}', '{"version": 1, "shards": [5]}', "\xff"],
)
def test_an_index_of_something_else_is_refused(call: Caller, tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidRequestError, match=r"index\.json is not an index of this version"):
        ActivationShards(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"index\.json is not an index of this version"):
        capture(call, CaptureServer(), tmp_path)
    assert (tmp_path / INDEX).read_bytes() == content.encode("latin-1")


def test_shards_of_two_models_are_refused(call: Caller, tmp_path: Path) -> None:
    capture(call, CaptureServer(), tmp_path)
    other = CaptureServer(model="another")
    with pytest.raises(InvalidRequestError, match="another"):
        capture(call, other, tmp_path, texts=[*TEXTS, "six"])


def test_a_batch_that_is_too_large_is_halved(call: Caller, tmp_path: Path) -> None:
    server = CaptureServer(limit=1)
    shards = capture(call, server, tmp_path, batch_size=5)
    assert [len(body["items"]) for body in server.asked] == [5, 2, 1, 1, 1, 1, 1]
    assert shards.num_items == 5
    with pytest.raises(PayloadTooLargeError):
        capture(call, CaptureServer(limit=0), tmp_path / "none")


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = CaptureServer()

    def run(*argv: str) -> tuple[int, str, str]:
        status = main(["capture", *argv], transport=httpx.MockTransport(server))
        return status, *capsys.readouterr()

    lines = tmp_path / "lines.txt"
    lines.write_text("one\n\ntwo\r\n")
    file = tmp_path / "out.safetensors"
    steering = tmp_path / "steering.json"
    steering.write_text(json.dumps({"vectors": [{"name": "mood"}]}))
    status, out, _ = run(str(lines), "--layers", "1-2", "--output", str(file), "--read", "last",
                         "--at", "0:5,7:9", "--steering", str(steering))  # fmt: skip
    assert (status, "2 texts, 2 rows of 3 numbers at layers 1, 2" in out) == (0, True)
    assert server.asked[-1] == {
        "items": ["one", "two"], "layers": [1, 2], "read": "last",
        "positions": {"slices": [[0, 5], [7, 9]]}, "steering": {"vectors": [{"name": "mood"}]},
    }  # fmt: skip
    assert open_activations(file).layers[1][:, 0].tolist() == [3, 3]

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"q": "x"}\n{"q": "yy"}')))
    status, out, _ = run("-", "--layers", "1", "--field", "q", "--output", str(tmp_path / "d"))
    assert (status, "2 texts, 2 rows; shards: 1" in out) == (0, True)
    assert ActivationShards(tmp_path / "d")[0].layers[1][:, 0].tolist() == [1, 2]
    status, out, _ = run(str(lines), "--layers", "1", "--output", str(file), "--json")
    assert json.loads(out)["read"] == "last"

    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"other": "b"}\n')
    status, _, err = run(str(rows), "--layers", "1", "--output", str(file))
    assert (status, "line 2" in err) == (1, True)
    lines.write_text("\n")
    status, _, err = run(str(lines), "--layers", "1", "--output", str(file))
    assert (status, "no text" in err) == (1, True)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('"a text"\n\n{"text": "b"}\n', ["a text", "b"]),
        ('"Hello," he said.\nnull\n', ['"Hello," he said.', "null"]),
        ('{"text": "\\u00e9"}\n"c"', ["é", "c"]),
    ],
)
def test_lines_are_texts_as_generate_reads_them(
    tmp_path: Path, content: str, texts: list[str]
) -> None:
    path, server = tmp_path / "lines", CaptureServer()
    path.write_text(content)
    argv = ["capture", str(path), "--layers", "1", "--output", str(tmp_path / "out.safetensors")]
    assert main(argv, transport=httpx.MockTransport(server)) == 0
    assert server.asked[0]["items"] == texts


@pytest.mark.parametrize("value", ["null", "5", "true", '["a"]', '{"text": "a"}'])
def test_what_is_no_text_is_not_captured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    path, server = tmp_path / "rows.jsonl", CaptureServer()
    argv = ["capture", str(path), "--layers", "1", "--output", str(tmp_path / "out.safetensors")]
    wrong = [f'{{"text": {value}}}', *([] if value.startswith("{") else [value])]
    for line in wrong:
        for content, number in ((f"{line}\n", 1), (f'{{"text": "a"}}\n\n{line}', 3)):
            path.write_text(content)
            assert main(argv, transport=httpx.MockTransport(server)) == 1
            err = capsys.readouterr().err
            assert f"{path}, line {number}: no text; write" in err
    assert not server.asked

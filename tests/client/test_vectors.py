"""`client.vectors` and `logsteer vectors`: what is sent, and what comes of the answers."""

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load

from logsteer import AnswerError, InvalidRequestError, TransportError
from logsteer.extras.tensors import convert_upload
from tests.refusals import refused

from .documents import ANSWER
from .scripted import Caller, Output, Script, answer, problem, run

QUALITY = {
    "accuracy": 0.75, "auc": 0.875, "pair_accuracy": 1.0, "activation_norm": 10.0,
    "left_out": None, "scale": 2.0, "gain": 3.0, "harm": 0.0625,
}  # fmt: skip
ADVICE = {
    "layer": 2, "scale": 2.5, "relative_norm": 0.5, "recommended_by": "effect", "gain": 3.0,
    "harm": 0.0625, "pairs": 8, "reason": "the largest gain",
}  # fmt: skip
CARD: dict[str, Any] = {
    "name": "happy",
    "sha256": "ab" * 32,
    "hook": "resid_post",
    "layers": [1, 2, 3, 7],
    "width": 16,
    "norms": {"1": 1.0, "2": 2.25, "3": 3.0, "7": 7.0},
    "bytes": 400,
    "created": "2026-01-02T03:04:05.678Z",
    "readouts": {"2": {"kind": "logistic", "slope": 2.0, "bias": -1.5, "threshold": 0.0}},
    "about": {
        "source": "training",
        "method": "pca",
        "quality": {"2": QUALITY},
        "validation": {"folds": 5, "reason": None, "caution": "may be chance"},
        "recommendation": ADVICE,
    },
}
LIST = {"vectors": [CARD], "bytes": 400, "max_bytes": 1000}
COSINES = [[1.0, 0.5, 0.25, None], [0.5, 1.0, 0.125, None], [0.25, 0.125, 1.0, None], [None] * 4]
SIMILAR = {
    "layers": {"1": [], "2": [{"name": "sad", "sha256": "cd" * 32, "cosine": -0.75}]},
    "compared": 6,
    "left_out": 2,
}
TRAINED = {**ANSWER, "vector": CARD, "layer_cosines": COSINES, "similar": SIMILAR}
GONE = {"name": "happy", "sha256": "ab" * 32}
PAIR = {"positive": "good", "negative": "bad"}


def file_answer(data: bytes, kind: str = "application/vnd.safetensors") -> Script:
    return Script(httpx.Response(200, content=data, headers={"Content-Type": kind}))


@pytest.mark.parametrize("kind", ["bytes", "path", "file", "pieces"])
def test_a_file_is_put(call: Caller, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "v.gguf"
    path.write_bytes(b"GGUF and so on")
    with path.open("rb") as file:
        source = {
            "bytes": b"GGUF and so on",
            "path": path,
            "file": file,
            "pieces": [b"GGUF", b" and so on"],
        }
        server = answer(CARD)
        card = call(server, lambda client: client.vectors.put("happy", source[kind], "gguf"))
    assert card.sha256 == "ab" * 32
    (request,) = server.requests
    assert (request.method, request.url.path) == ("PUT", "/vectors/happy")
    assert dict(request.url.params) == {"format": "gguf"}
    assert request.headers["Content-Type"] == "application/octet-stream"
    assert server.bodies == [b"GGUF and so on"]


def test_a_file_is_downloaded(call: Caller) -> None:
    server = file_answer(b"\x00\xff\x80 bytes")
    data = call(server, lambda client: client.vectors.download("happy"))
    assert data == b"\x00\xff\x80 bytes"
    (request,) = server.requests
    assert request.url.path == "/vectors/happy/content"
    assert dict(request.url.params) == {"format": "safetensors"}
    assert request.headers["Accept"].startswith("application/vnd.safetensors")
    server = file_answer(b"GGUF", "application/vnd.gguf")
    gguf = call(server, lambda client: client.vectors.download("happy", format="gguf"))
    assert gguf == b"GGUF"


def test_a_page_is_no_file(call: Caller) -> None:
    server = file_answer(b"<html>", "text/html")
    with pytest.raises(AnswerError, match=r"expected application/vnd\.safe.* got text/html"):
        call(server, lambda client: client.vectors.download("happy"))
    server = Script(problem("unknown_vector", 404))
    with refused("unknown_vector"):
        call(server, lambda client: client.vectors.download("sad"))


def test_a_vector_is_deleted_once(call: Caller, pauses: list[float]) -> None:
    server = Script(httpx.ReadError("broken"))
    with pytest.raises(TransportError, match="broken"):
        call(server, lambda client: client.vectors.delete("happy"))
    assert len(server.requests) == 1


def test_a_vector_is_got_as_a_file(
    capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for argv, kind, path in (
        (["happy"], "safetensors", "happy.safetensors"),
        (["happy", "x.gguf"], "gguf", "x.gguf"),
        (["happy", "--format", "gguf"], "gguf", "happy.gguf"),
    ):
        content = file_answer(b"data", f"application/vnd.{kind}").replies[0]
        server = Script(httpx.Response(200, json=CARD), content)
        assert run(server, "vectors", "get", *argv) == 0
        assert dict(server.requests[1].url.params) == {"format": kind}
        assert Path(path).read_bytes() == b"data"
    assert run(answer(CARD), "vectors", "put", "happy", "none.pt") == 1
    assert "No such file" in capsys.readouterr().err


def test_train(capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(PAIR) + "\n\n" + json.dumps(PAIR | {"note": 1}) + "\n")
    server = answer(TRAINED)
    argv = ["--method", "pca", "--read", "mean", "--layers", "1,2", "--bos", "never"]
    argv += ["--whiten"]
    assert run(server, "vectors", "train", "happy", str(path), *argv, "--model", "m") == 0
    assert json.loads(server.bodies[0]) == {
        "name": "happy",
        "pairs": [PAIR, PAIR],
        "method": "pca",
        "whiten": True,
        "read": "mean",
        "layers": [1, 2],
        "bos": "never",
        "model": "m",
    }
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["2", "sad", "-0.75"] in rows
    for text in (
        "happy is happy:2.5@2", "the largest gain", "5 folds",
        "nothing is recommended: may be chance",
        "nearest of 6 stored", "2 stored vectors were not compared",
        "happy at layer 2, projection c: probability 1 / (1 + exp(-z)), z = 2 c - 1.5",
    ):  # fmt: skip
        assert text in shown
    for text, hint in (
        ('{"positive": "a"}', "line 1"),
        ('{"positive": "a", "negative": null}', "line 1"),
        ('[{"positive": "a", "negative": ["b"]}]', "pairs[0]"),
        ('"a"', "line 1"),
        ("[" * 100_000, "nested too deeply"),
        ("", "is empty"),
        (json.dumps(PAIR) + "\nno json", "line 2"),
        ("1", "line 1"),
        ("[1]", "entry 1: no"),
        ("[", "no JSON"),
        ("[]", "no pairs"),
        ("\n", "no pairs"),
    ):
        path.write_text(text)
        assert run(server, "vectors", "train", "happy", str(path)) == 1
        assert hint in capsys.readouterr().err


@pytest.mark.parametrize("content", [json.dumps(PAIR), json.dumps([PAIR])], ids=["lines", "list"])
@pytest.mark.parametrize("way", ["pipe", "stdin"])
def test_pairs_of_a_pipe(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, content: str, way: str
) -> None:
    """A pipe, as of process substitution, can be read once."""
    reading, writing = os.pipe()
    os.write(writing, content.encode())
    os.close(writing)
    with os.fdopen(reading) as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        name = "-" if way == "stdin" else f"/dev/fd/{reading}"
        server = answer(TRAINED)
        assert run(server, "vectors", "train", "happy", name) == 0, capsys.readouterr().err
        assert json.loads(server.bodies[0])["pairs"] == [PAIR]


FILES = Path(__file__).parent / "vector_files"
"""Files that the package steering-vectors, and torch.save of a dictionary, have written."""


def torch_file(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def put(call: Caller, source: Any, *form: Any) -> tuple[dict[str, Any], str | None]:
    """What a server is sent for this source, as tensors, and the format that is said."""
    server = answer(CARD)
    call(server, lambda client: client.vectors.put("happy", source, *form))
    return load(server.bodies[0]), server.requests[0].url.params.get("format")


@pytest.mark.parametrize("name", ["steering_vectors.pt", "layers.pt"])
def test_files_of_torch_are_converted_on_this_machine(call: Caller, name: str) -> None:
    path = FILES / name
    numbers = np.random.default_rng(0)
    expected = {layer: numbers.standard_normal(8).astype(np.float32) for layer in (3, 2, 1)}
    with path.open("rb") as file:
        for source in (path, str(path), path.read_bytes(), file):
            tensors, form = put(call, source)
            assert form == "safetensors" and len(tensors) == 3
            for key, found in tensors.items():
                (layer,) = re.findall(r"\d+", key)
                assert np.array_equal(found, expected[int(layer)])


def test_tensors_of_torch_of_any_kind_and_layout(call: Caller) -> None:
    wide = torch.arange(8.0).reshape(2, 4)
    value = {
        1: torch.tensor(2.5, dtype=torch.bfloat16).expand(4), "blocks.2.hook_mlp_out": wide[:, 1],
        3: wide[0, ::2].double().requires_grad_(), "4": wide[0], "5": wide[0].to_sparse(),
    }  # fmt: skip
    tensors, _ = put(call, torch_file(value), "pt")
    assert {name: found.tolist() for name, found in tensors.items()} == {
        "1": [2.5] * 4, "blocks.2.hook_mlp_out": [1.0, 5.0], "3": [0.0, 2.0],
        "4": [0.0, 1.0, 2.0, 3.0], "5": [0.0, 1.0, 2.0, 3.0],
    }  # fmt: skip
    old = torch_file({"layer_activations": {2: torch.ones(3)}, "layer_type": "mlp"})
    assert list(put(call, old)[0]) == ["blocks.2.hook_mlp_out"]


class Exploit:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "ran")


def test_what_torch_saved_and_no_vector_is_refused(call: Caller, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for content, reason in (
        (torch_file({1: Exploit(mark)}), "pickles are not run here; save a dictionary"),
        (torch_file([torch.ones(2)]), "it holds a list; save a dictionary"),
        (torch_file({1: "a"}), "entry '1' is not a tensor"),
        (torch_file({1: torch.ones(2, dtype=torch.int64)}), "floating-point"),
        (torch_file({"layer_activations": {}, "layer_type": "x"}), "known are decoder_block"),
        (b"PK\x03\x04 cut off", "torch cannot read it"),
    ):
        server = answer(CARD)
        with pytest.raises(InvalidRequestError, match=reason):
            call(server, lambda client, data=content: client.vectors.put("happy", data))
        assert server.requests == []
    assert not mark.exists()
    with pytest.raises(InvalidRequestError, match="give a path, an open file or bytes"):
        call(answer(CARD), lambda client: client.vectors.put("happy", [b"PK"], "pt"))


def test_a_pipe_is_not_looked_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opened for reading, it would be waited for
    assert convert_upload(pipe, None) == (pipe, None)


def test_what_needs_torch_says_so(
    capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run(answer(CARD), "vectors", "put", "happy", str(FILES / "layers.pt")) == 1
    assert (
        "pip install torch safetensors; or save the vector as safetensors"
        in capsys.readouterr().err
    )

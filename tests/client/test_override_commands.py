"""`logsteer overrides` and `--override`: what is sent and shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from .documents import PERPLEXITY, START, SWEEP, events, logprob_answer, steer_answer, target
from .scripted import Output, Script, answer, event_stream, problem, run

CARD: dict[str, Any] = {
    "name": "dir", "sha256": "cd" * 32, "model": "demo", "weights_digest": "w", "tensors": 3,
    "moved": 128, "total": 922496, "norm": 11.595, "bytes": 600,
    "created": "2026-01-02T03:04:05.678Z",
}  # fmt: skip
LIST = {"overrides": [CARD], "damaged": ["old"], "bytes": 600, "max_bytes": 1000}
GONE = {"name": "dir", "sha256": "cd" * 32}
WANTED = {"name": "dir", "eta": 1e-6}


def test_overrides_are_listed_and_shown(capsys: Output) -> None:
    row = ["dir", "demo", "3", "128", "922496", "11.595"]
    row += [*CARD["created"][:16].split("T"), CARD["sha256"][:12]]
    for argv, document in ((["list"], LIST), (["show", "dir"], CARD)):
        server = answer(document)
        assert run(server, "overrides", *argv) == 0
        out = capsys.readouterr().out
        assert row in [line.split() for line in out.splitlines()]
        assert ("damaged: old" in out) is (argv == ["list"])
    assert server.requests[0].url.path == "/overrides/dir"


def test_an_override_is_put_and_deleted(capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    path.write_bytes(b"direction")
    server = answer(CARD)
    assert run(server, "overrides", "put", "dir", str(path), "--model", "demo", "--json") == 0
    assert json.loads(capsys.readouterr().out) == CARD
    (request,) = server.requests
    assert (request.method, request.url.path) == ("PUT", "/overrides/dir")
    assert dict(request.url.params) == {"model": "demo"}
    assert server.bodies == [b"direction"]
    server = answer(GONE)
    assert run(server, "overrides", "delete", "dir") == 0
    assert server.requests[0].method == "DELETE"
    assert capsys.readouterr().out.startswith("deleted dir, cdcd")


def test_the_commands_about_texts_take_an_override(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("some text")
    perplexity = event_stream(events(("start", START), ("result", PERPLEXITY)))
    steered = event_stream(events(("start", START), ("result", steer_answer())))
    vector = ["--vector", "mood"]
    commands: list[tuple[list[str], Script]] = [
        (["score", "a", "b"], answer(logprob_answer([target("b", -1.0)]))),
        (["perplexity", str(path)], Script(perplexity)),
        (["steer", "a", *vector], Script(steered)),
        (["sweep", "--scales=0,1", "--item", "I am", " glad", " sad", "--text", str(path), *vector],
         answer(SWEEP)),
    ]  # fmt: skip
    for command, server in commands:
        assert run(server, *command, "--override", "dir:1e-6") == 0
        if command[0] == "perplexity":  # the body is the text
            assert json.loads(server.requests[0].url.params["override"]) == WANTED
        else:
            assert json.loads(server.bodies[0])["override"] == WANTED


@pytest.mark.parametrize("command", [["score", "a", "b"], ["steer", "a", "--vector", "v"]])
def test_a_cast_goes_with_an_override(capsys: Output, command: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(Script(problem("internal", 500)), *command, "--cast", "float32")
    assert caught.value.code == 2
    assert "--cast: only with --override" in capsys.readouterr().err

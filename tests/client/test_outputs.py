"""What commands give to other programs and to terminals: formats, pipes, colours, exit statuses.

And commands that steer: how they read steering, and what they show of it.
"""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from .documents import (
    ANSWER,
    MODELS,
    PERPLEXITY,
    PERPLEXITY_EVENTS,
    START,
    SWEEP,
    TOKENS,
    events,
    logprob_answer,
    piece,
    steer_answer,
    target,
)
from .scripted import Output, Script, answer, event_stream, problem, run

LONG = {"tokens": [" gl", "ad\x1b\n"], "token_ids": [3, 4], "logprobs": [-0.1, -8.0]}
SCORES = logprob_answer([target(" glad", -8.1, **LONG), target(" sad", None)])
SWEEP_ARGV = ["sweep", "--vector", "m", "--scales=-1,0,1", "--item", "I am", " glad", " sad",
              "--text", "book.txt"]  # fmt: skip


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("a text")


# ------------------------------------------------------------------ formats

COMMANDS: list[tuple[list[str], Any, int]] = [
    (["models"], MODELS, 1),
    (["score", "I am", " glad", " sad"], SCORES, 2),
    (["tokenize", "Hi"], TOKENS, 2),
    (["generate", "I am", "-n", "2"], {**ANSWER, "results": steer_answer(2)["results"]}, 2),
    (["steer", "I am", "--vector", "m", "-n", "2"], steer_answer(2), 2),
    (["diagnostics", "I am", " glad", " sad"], SCORES, 2),
    (SWEEP_ARGV, SWEEP, 18),
]


@pytest.mark.parametrize(("argv", "document", "count"), COMMANDS, ids=[c[0][0] for c in COMMANDS])
def test_rows_in_every_format(capsys: Output, argv: list[str], document: Any, count: int) -> None:
    assert run(answer(document), *argv, "--format", "csv") == 0
    cells = read_csv(capsys.readouterr().out)
    assert run(answer(document), *argv, "--format", "jsonl") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(cells) == len(rows) == count
    assert list(cells[0]) == list(rows[0])
    assert run(answer(document), *argv, "--format", "json") == 0
    found, err = capsys.readouterr()
    assert run(answer(document), "--json", *argv) == 0
    assert capsys.readouterr().out == found and err == ""
    assert document.keys() <= json.loads(found).keys()


def test_csv_has_nothing_for_null_and_words_of_json_for_truth(capsys: Output) -> None:
    assert run(answer(SCORES), "score", "I am", " glad", " sad", "--format", "csv") == 0
    first, second = read_csv(capsys.readouterr().out)
    assert (first["target"], first["logprob"], first["best"]) == (" glad", "-8.1", "true")
    assert (second["logprob"], second["best"]) == ("", "false")


def test_rows_of_another_grain_and_into_a_file(capsys: Output) -> None:
    argv = ["score", "I am", " glad", " sad", "--per", "token", "--output", "tokens.csv"]
    assert run(answer(SCORES), *argv) == 0
    assert capsys.readouterr().out == ""
    rows = [(row["token"], row["logprob"]) for row in read_csv(Path("tokens.csv").read_text())]
    assert rows == [(" gl", "-0.1"), ("ad\x1b\n", "-8.0")]
    argv = ["score", "a", "b", "c", "--format", "table", "--output", "t.txt"]
    assert run(answer(SCORES), *argv) == 0
    assert "logprob" in Path("t.txt").read_text()


def test_sweep_rows_have_names(capsys: Output) -> None:
    assert run(answer(SWEEP), *SWEEP_ARGV, "--format", "csv") == 0
    first, _, third, *_ = read_csv(capsys.readouterr().out)
    assert (first["item"], first["target"], first["scale"]) == ("'I am'", "' glad'", "-1.0")
    assert (third["text"], third["perplexity"], third["item"]) == ("book.txt", "3.0", "")


# ------------------------------------------------------------------ readers


def test_windows_are_rows_as_they_come(capsys: Output) -> None:
    server = Script(event_stream(PERPLEXITY_EVENTS))
    assert run(server, "perplexity", "book.txt", "--format", "csv") == 0
    rows = read_csv(capsys.readouterr().out)
    assert [(row["start"], row["mean_logprob"]) for row in rows] == [("2", "-0.5"), ("4", "-0.5")]
    server = Script(event_stream(PERPLEXITY_EVENTS))
    assert run(server, "perplexity", "book.txt", "--format", "csv", "--per", "text") == 0
    assert [row["num_scored"] for row in read_csv(capsys.readouterr().out)] == ["4"]


def test_a_reader_who_leaves_ends_a_table_quietly() -> None:
    code = (
        "import httpx, sys; from logsteer.cli import main; from tests.client.documents import *;"
        "reply = lambda request: httpx.Response(200, json=MODELS);"
        "sys.exit(main(['models'], transport=httpx.MockTransport(reply)))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, check=False, cwd=root
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


# ------------------------------------------------------------------ exit statuses


# ------------------------------------------------------------------ commands that steer


RECOMMENDED = {"scale": "recommended", "layers": "recommended"}
ITEM = ["--item", "I am", " glad", " [red]sad"]


def stream(*pieces: dict[str, Any], **more: Any) -> Script:
    named = [("piece", one) for one in pieces]
    result = ("result", steer_answer(**more))
    return Script(event_stream(events(("start", START), *named, result)))


def perplexity_stream() -> httpx.Response:
    return event_stream(events(("start", START), ("result", PERPLEXITY)))


def sent(server: Script) -> Any:
    return json.loads(server.bodies[0])


def rows(capsys: Output) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("argv", "steering"),
    [
        (["--vector", "mood"], {"vectors": [{"name": "mood"}]}),
        (["--vector", "mood:-2.5"], {"vectors": [{"name": "mood", "scale": -2.5}]}),
        (["--vector", "mood@2"], {"vectors": [{"name": "mood", "layers": [2]}]}),
        (
            ["--vector", "mood:4@2,5-7", "--vector", "a.b-c:1e1"],
            {
                "vectors": [
                    {"name": "mood", "scale": 4.0, "layers": [2, 5, 6, 7]},
                    {"name": "a.b-c", "scale": 10.0},
                ]
            },
        ),
        (
            ["--vector", "a", "--when", "no@1:cosine", "--above", "0.3", "--of", "prompt"],
            {
                "vectors": [
                    {
                        "name": "a",
                        "when": {
                            "probe": {"name": "no", "layers": [1], "read": "cosine"},
                            "above": 0.3,
                            "of": "prompt",
                        },
                    }
                ]
            },
        ),
        (
            ["--vector", "a", "--vector", "b", "--op", "replace", "--unit", "unit"],
            {
                "vectors": [
                    {"name": "a", "op": "replace", "unit": "unit"},
                    {"name": "b", "op": "replace", "unit": "unit"},
                ]
            },
        ),
        (
            ["--vector", "a", "--op", "clamp", "--clamp=-1:", "--positions", "last_prompt"],
            {
                "vectors": [{"name": "a", "op": "clamp", "params": {"min": -1.0}}],
                "positions": "last_prompt",
            },
        ),
        (
            ["--vector", "a", "--positions", "0:5,8:10"],
            {"vectors": [{"name": "a"}], "positions": {"slices": [[0, 5], [8, 10]]}},
        ),
    ],
)
def test_the_four_commands_read_steering_alike(
    tmp_path: Path, argv: list[str], steering: dict[str, Any]
) -> None:
    vectors = [RECOMMENDED | vector for vector in steering["vectors"]]
    steering = {**steering, "vectors": vectors}
    path = tmp_path / "text"
    path.write_text("some text")
    scored = logprob_answer([target("b", -1.0)])
    commands = [
        (["score", "a", "b"], answer(scored)),
        (["perplexity", str(path)], Script(perplexity_stream(), perplexity_stream())),
        (["steer", "a"], Script(*stream().replies, *stream().replies)),
    ]
    if "--clamp=-1:" not in argv:
        commands.append((["sweep", "--scales=0,1", *ITEM, "--text", str(path)], answer(SWEEP)))
    file = tmp_path / "steering.json"
    file.write_text(json.dumps(steering))
    for command, server in commands:
        assert run(server, *command, *argv) == 0
        assert run(server, *command, "--steering", str(file)) == 0
        if command[0] == "perplexity":  # the body is the text
            found = [json.loads(request.url.params["steering"]) for request in server.requests]
        else:
            found = [json.loads(body)["steering"] for body in server.bodies]
        assert found == [steering, steering]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "no JSON"),
        (b"[]", "no steering object"),
        (b"", "is empty"),
        (b"\xff", "not UTF-8"),
        (b"{}", "steering.vectors is missing"),
        (b'{"vectors": [{"name": "a", "strength": 1}]}', "strength"),
    ],
)
def test_a_file_that_steers_nothing_is_told(
    capsys: Output, tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "steering.json"
    path.write_bytes(content)
    server = stream()
    for command in (["steer", "a"], ["score", "a", "b"], ["perplexity", __file__]):
        assert run(server, *command, "--steering", str(path)) == 1
        assert reason in capsys.readouterr().err
    assert server.requests == []


def test_what_probes_read_stands_under_each_completion(capsys: Output) -> None:
    read = {"name": "mood", "sha256": "0" * 64, "layer": 3, "hook": "resid_post",
            "read": "projection", "before": [0.25, -4.5]}  # fmt: skip
    document = steer_answer(baseline=True)
    (result,) = document["results"]
    for side, first in (("completions", 0.25), ("baseline", 0.75)):
        result[side][0]["probes"] = [read | {"before": [first, -4.5]}]
    argv = ["steer", "I am", "--vector", "mood", "--baseline", "--probe", "mood@3"]
    assert run(Script(httpx.Response(200, json=document)), *argv) == 0
    found = rows(capsys)
    assert found.index(["steered", "completion", "0"]) < found.index(["'g'", "-0.5", "0.25"])
    assert found.index(["unsteered", "completion", "0"]) < found.index(["'s'", "-0.5", "0.75"])
    assert len([row for row in found if row[-1:] == ["-4.5"]]) == 2


def test_a_refusal_while_streaming_ends_the_line(capsys: Output) -> None:
    error = json.loads(problem("out_of_memory", 503).content)
    text = events(("start", START), ("piece", piece(" half")), ("error", error))
    assert run(Script(event_stream(text)), "steer", "I", "--vector", "mood") == 3
    out, err = capsys.readouterr()
    assert out == "I half\n"
    assert err.startswith("error: out_of_memory")


def test_a_long_steering_object_goes_into_a_body(capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("söme text")
    steering = {"vectors": [{"data": {"2": [0.5] * 20_000}}]}
    file = tmp_path / "steering.json"
    file.write_text(json.dumps(steering))
    server = Script(perplexity_stream())
    argv = ["--steering", str(file), "--stride", "4", "--adapter", "lora"]
    assert run(server, "perplexity", str(path), *argv) == 0
    assert server.requests[0].url.path == "/perplexity"
    assert sent(server) == {
        "texts": ["söme text"],
        "stride": 4,
        "steering": steering,
        "adapter": "lora",
        "stream": True,
    }
    path.write_bytes(b"\xff\xfe")
    assert run(server, "perplexity", str(path), *argv) == 1
    assert "is not UTF-8" in capsys.readouterr().err


def test_items_of_a_file(capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    item: dict[str, Any] = {"context_ids": [1, 2], "target_ids": [[3], [4, 5]]}
    path.write_text(f"\n{json.dumps(item)}\n")
    document = {
        **SWEEP,
        "unsteered": two_items(SWEEP["unsteered"]),
        "points": [two_items(point) for point in SWEEP["points"]],
    }
    server = answer(document)
    argv = ["--vector", "mood", "--scales=1", *ITEM, "--items", str(path)]
    assert run(server, "sweep", *argv, "--text", str(path)) == 0
    assert sent(server)["items"][1] == item
    out = capsys.readouterr().out
    assert "tokens [1, 2]" in out and "[4, 5]" in out
    for content, reason in (("3", "line 1: no JSON object"), ("{", "line 1: no JSON")):
        path.write_text(content)
        assert run(server, "sweep", *argv) == 1
        assert reason in capsys.readouterr().err


def two_items(point: dict[str, Any]) -> dict[str, Any]:
    return {**point, "items": point["items"] * 2}

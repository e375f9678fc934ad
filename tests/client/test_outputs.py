"""What commands give to other programs and to terminals: formats, pipes, colours, exit statuses."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .documents import (
    ANSWER,
    CHECKS,
    MODELS,
    PERPLEXITY_EVENTS,
    START,
    SWEEP,
    TOKENS,
    events,
    logprob_answer,
    steer_answer,
    target,
)
from .scripted import Output, Script, answer, event_stream, run

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
    assert run(answer(document), *argv, "--json") == 0
    assert capsys.readouterr().out == found and json.loads(found) and err == ""


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


def test_a_selftest_has_a_row_a_check(capsys: Output) -> None:
    told = {**ANSWER, "verdict": "passed", "checks": CHECKS, "num_texts": 1, "num_tokens": 9,
            "seconds": 1.0}  # fmt: skip
    server = Script(event_stream(events(("start", START), ("result", told))))
    assert run(server, "selftest", "demo", "--format", "csv") == 0
    rows = read_csv(capsys.readouterr().out)
    assert [row["verdict"] for row in rows] == ["passed", "passed", "failed", "not_run"]


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

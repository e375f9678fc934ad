"""What commands give to other programs and to terminals: formats, pipes, colours, exit statuses."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as parquet
import pytest

from logsteer.cli import main
from logsteer.cli.heat import Sparklines, choose_style, draw_blocks
from logsteer.cli.scoring import _Windows
from logsteer.cli.terminal import TerminalConsole
from logsteer.schemas import WindowScore

from .documents import (
    ANSWER,
    CHECKS,
    MODELS,
    PERPLEXITY_EVENTS,
    START,
    SWEEP,
    TOKENS,
    completion,
    events,
    logprob_answer,
    piece,
    steer_answer,
    target,
    window,
)
from .scripted import Script, event_stream, problem

Output = pytest.CaptureFixture[str]
LONG = {"tokens": [" gl", "ad\x1b\n"], "token_ids": [3, 4], "logprobs": [-0.1, -8.0]}
SCORES = logprob_answer([target(" glad", -8.1, **LONG), target(" sad", None)])
ITEM = {"context": "I am", "targets": [" glad", " sad"]}
SWEEP_ARGV = ["sweep", "--vector", "m", "--scales=-1,0,1", "--item", "I am", " glad", " sad",
              "--text", "book.txt"]  # fmt: skip


def answer(document: Any) -> Script:
    return Script(httpx.Response(200, json=document))


def run(server: Any, *argv: str) -> int:
    return main(argv, transport=httpx.MockTransport(server))


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def pipe(monkeypatch: pytest.MonkeyPatch, *lines: Any) -> None:
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "160")
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
    assert run(answer(document), *argv, "--output", "rows.parquet") == 0
    assert parquet.read_table("rows.parquet").to_pylist() == rows
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


@pytest.mark.parametrize(
    "argv",
    [
        ["models", "--json", "--format", "csv"],
        ["models", "--format", "parquet"],
        ["models", "--output", "rows"],
        ["models", "--format", "xml"],
        ["models", "--plot", "a.png"],
        ["score", "a", "b", "--per", "token"],
        ["score", "a", "b", "--per", "window", "--format", "csv"],
        ["score", "-", "--per", "token"],
        ["score", "-", "--format", "json"],
        ["generate", "-", "--plot", "a.png"],
        ["completion", "tcsh"],
    ],
)
def test_wrong_usage_is_2(capsys: Output, argv: list[str]) -> None:
    server = answer(MODELS)
    with pytest.raises(SystemExit) as caught:
        run(server, *argv)
    assert caught.value.code == 2
    assert "usage: logsteer" in capsys.readouterr().err and server.requests == []


def test_what_is_missing_is_told_before_anything_is_asked_for(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = answer(MODELS)
    assert run(server, "models", "--output", "none/rows.csv") == 1
    assert "there is no directory" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(server, "models", "--output", "rows.parquet") == 1
    assert 'pip install "logsteer[tables]"' in capsys.readouterr().err
    assert server.requests == []


# ------------------------------------------------------------------ pipes


def score_all(request: httpx.Request) -> httpx.Response:
    items = json.loads(request.content)["items"]
    results = [[target(text, -1.0, **LONG) for text in item["targets"]] for item in items]
    return httpx.Response(200, json=logprob_answer(*results))


def test_score_answers_lines(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, {**ITEM, "id": 7}, {"context": "You are", "targets": [" it"]})
    server = Script(score_all)
    assert run(server, "score", "-", "--batch-size", "1", "--space", "both") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["id"] == 7 and lines[0]["result"]["best"] == 0
    assert [one["target"] for one in lines[1]["result"]["targets"]] == [" it"]
    assert [json.loads(body)["space"] for body in server.bodies] == ["both", "both"]


def test_lines_without_targets_have_those_of_the_arguments(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, "I am", {"context": "You are", "targets": [" it"]}, {"context": "We are"})
    server = Script(score_all)
    assert run(server, "score", "-", " glad", " sad", "--format", "csv") == 0
    rows = read_csv(capsys.readouterr().out)
    assert [(row["line"], row["target"]) for row in rows] == [
        ("1", " glad"), ("1", " sad"), ("2", " it"), ("3", " glad"), ("3", " sad"),
    ]  # fmt: skip
    assert json.loads(server.bodies[0])["items"][0] == {"context": "I am",
                                                        "targets": [" glad", " sad"]}  # fmt: skip


def test_lines_go_into_a_file_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, ITEM, ITEM)
    assert run(Script(score_all), "score", "-", "--per", "token", "--output", "t.parquet") == 0
    rows = parquet.read_table("t.parquet").to_pylist()
    assert [row["line"] for row in rows] == [1] * 4 + [2] * 4


def test_a_column_that_comes_late_is_told(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, ITEM, ITEM)
    more = logprob_answer(
        [
            target(
                "a",
                -1.0,
                variants={"with_space": target("a", -1.0), "without_space": target("a", -1.0)},
            )
        ]
    )
    few = logprob_answer([target("a", -1.0)])
    server = Script(httpx.Response(200, json=few), httpx.Response(200, json=more))
    assert run(server, "score", "-", "--batch-size", "1", "--format", "csv") == 1
    out, err = capsys.readouterr()
    assert len(read_csv(out)) == 1
    assert "logprob_with_space is no column of the first rows: take jsonl" in err


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


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (problem("unknown_model", 404), 1),
        (problem("invalid_request", 422), 1),
        (problem("internal", 500), 1),
        (problem("unauthorized", 401), 1),
        (problem("overloaded", 429), 3),
        (problem("model_loading", 503), 3),
        (problem("deadline_exceeded", 504), 3),
        (httpx.ConnectError("refused"), 3),
        (httpx.ReadTimeout("slow"), 3),
    ],
)
def test_the_exit_status_says_whether_later_may_do(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch, reply: Any, status: int
) -> None:
    assert run(Script(reply), "models") == status
    pipe(monkeypatch, ITEM)
    assert run(Script(reply), "score", "-") == status


# ------------------------------------------------------------------ terminals


def test_a_terminal_shows_tokens_in_colours(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(answer(SCORES), "score", "I am", " glad", " sad") == 0
    assert "surprisal" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert run(answer(SCORES), "score", "I am", " glad", " sad") == 0
    out = capsys.readouterr().out
    assert "surprisal in nats" in out and "\x1b[38;2;255;255;255;48;2;208;33;28m" in out
    assert "ad\\x1b↵" in out  # a control character of a token is written out
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(answer(SCORES), "score", "I am", " glad", " sad") == 0
    out = capsys.readouterr().out
    assert "surprisal" not in out and "48;2" not in out


def test_a_continuation_is_coloured_while_it_grows(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [{**piece(" gl"), "logprobs": [-8.0]}, {**piece("ad"), "logprobs": [0.0]}]
    told = events(("start", START), *(("piece", one) for one in pieces),
                  ("result", steer_answer()))  # fmt: skip
    for forced, expected in (("", "I am glad\n"), ("1", None)):
        monkeypatch.setenv("FORCE_COLOR", forced)
        monkeypatch.setenv("COLORTERM", "truecolor")
        monkeypatch.setenv("TERM", "xterm-256color")
        assert run(Script(event_stream(told)), "steer", "I am", "--vector", "m") == 0
        out = capsys.readouterr().out
        if expected is not None:
            assert out.startswith(expected) and "\x1b" not in out
        else:
            assert "48;2;208;33;28m gl\x1b[0mad" in out


def test_the_more_surprising_the_stronger() -> None:
    styles = [choose_style(-value) for value in (0.0, 0.4, 0.6, 2.0, 5.0, 30.0)]
    assert styles[:2] == ["", ""] and len(set(styles[2:])) == 4
    assert choose_style(None) not in styles


def test_blocks() -> None:
    assert draw_blocks([0.0, 1.0, None, 2.0]) == "▁▅ █"
    assert draw_blocks([1.0, 1.0]) == "▁▁"
    assert draw_blocks([None]) == " "
    assert len(draw_blocks([float(n) for n in range(1000)], 40)) == 40


@pytest.mark.parametrize("width", [30, 80, 140])
def test_sparklines_fit_and_are_for_terminals(width: int) -> None:
    curves = Sparklines("along", [("perplexity of a rather long name", [1.0, 2.0] * 50)])
    plain, terminal = io.StringIO(), io.StringIO()
    TerminalConsole(file=plain, width=width).print(curves)
    assert plain.getvalue() == ""
    TerminalConsole(file=terminal, width=width, force_terminal=True, no_color=True).print(curves)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in terminal.getvalue().splitlines()]
    assert any(set("▁▂▃▄▅▆▇█") & set(line) for line in lines)
    assert max(map(len, lines)) <= width


def test_many_windows_are_kept_as_few() -> None:
    windows = _Windows(None)
    for number in range(5000):
        windows.add(WindowScore.model_validate(window(number)["window"]))
    kept = windows.list_kept()
    assert 1024 <= len(kept) < 2048
    assert sum(one.num_scored for one in kept) == 2 * 5000
    assert all(one.end == later.start for one, later in pairwise(kept))


def test_plots_of_commands(capsys: Output) -> None:
    assert run(answer(SCORES), "score", "I am", " glad", " sad", "--plot", "s.png") == 0
    assert "plot: s.png" in capsys.readouterr().out
    server = Script(event_stream(PERPLEXITY_EVENTS))
    assert run(server, "perplexity", "book.txt", "--json", "--plot", "p.svg") == 0
    assert json.loads(capsys.readouterr().out)
    continued = {**ANSWER, "results": [{"completions": [completion("ab")], "prompt_ids": [1]}]}
    assert run(answer(continued), "generate", "a", "--json", "--plot", "g.png") == 0
    assert {path.name for path in Path().iterdir()} >= {"s.png", "p.svg", "g.png"}
    assert run(answer(SCORES), "score", "a", "b", "--plot", "s.txt") == 1
    assert "ends in .png, .svg or .pdf" in capsys.readouterr().err

"""score_file: every row of a file goes through an endpoint exactly once.

A job that was killed, or whose disk was full, resumes from its files, cut at any byte. Files of
another job are refused, and files that no job wrote are left alone.
"""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import logsteer
from logsteer import (
    AsyncClient,
    InvalidRequestError,
    LogsteerError,
    NotFoundError,
    OverloadedError,
)
from logsteer.cli import main
from logsteer.corpus import JobLimits
from logsteer.corpus.answers import read_answer
from logsteer.corpus.job import FleetServer
from logsteer.errors import AnswerError

from .corpus_server import (
    BAD,
    RESULTS,
    CorpusServer,
    PowerCutError,
    answer,
    encode,
    interrupt,
    read_rows,
    score,
    serve_corpus,
    texts,
    value_of,
    write_rows,
)
from .scripted import problem

Output = pytest.CaptureFixture[str]


def test_there_is_a_line_for_each_row_in_its_order(corpus: Path, tmp_path: Path) -> None:
    target, server = tmp_path / "out.jsonl", CorpusServer()
    scores = score(corpus, target, server, id_column="id")
    rows = read_rows(target)
    assert [row["row"] for row in rows] == list(range(50))
    assert [row["id"] for row in rows] == [f"r{n}" for n in range(50)]
    assert [row["result"]["sum_logprob"] for row in rows] == [
        value_of(f"text {n}") for n in range(50)
    ]
    assert (scores.rows, scores.failed, scores.prompt_tokens) == (50, 0, 150)
    assert scores.total is not None
    expected = sum(value_of(f"text {n}") for n in range(50))
    assert scores.total.sum_logprob == pytest.approx(expected)
    assert scores.total.num_scored == 150
    assert server.most_at_once > 1
    assert {headers["X-Priority"] for headers in server.headers} == {"batch"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl", "out.jsonl", "out.jsonl.job",
    ]  # fmt: skip
    # It is done: nothing is asked any more, and the same is told.
    assert score(corpus, target, CorpusServer(OSError()), id_column="id") == scores


def test_columns_with_other_names(tmp_path: Path) -> None:
    rows = [{"q": "2 + 2 =", "a": " 4"}, {"q": "I feel", "a": [" glad", " sad"]}, {"q": "Oh"}, "Hi"]
    source, server = write_rows(tmp_path / "in.jsonl", rows), CorpusServer()
    options = {"fields": {"context": "q", "targets": "a"}, "targets": ["!"]}
    score(source, tmp_path / "out.jsonl", server, "logprob", options={"top": 2}, **options)
    (body,) = server.asked
    assert body == {
        "top": 2,
        "on_error": "report",
        "items": [
            {"context": "2 + 2 =", "targets": [" 4"]},
            {"context": "I feel", "targets": [" glad", " sad"]},
            {"context": "Oh", "targets": ["!"]},
            {"context": "Hi", "targets": ["!"]},
        ],
    }


def test_a_row_has_its_own_seed_however_rows_are_asked_for(tmp_path: Path) -> None:
    rows = ["a", "b", {"prompt_ids": [1, 2]}, {"prompt": ""}, "c", {"prompt": f"a {BAD} one"}, "d",
            {"messages": [{"role": "user", "content": "x"}]}]  # fmt: skip
    source = write_rows(tmp_path / "in.jsonl", rows)
    scores = score(source, tmp_path / "out.jsonl", CorpusServer(), "generate",
                   options={"n": 2, "seed": 10})  # fmt: skip
    found = read_rows(tmp_path / "out.jsonl")
    seeds = [row["result"]["completions"][0]["seed"] for row in found if "result" in row]
    assert seeds == [10 + 2 * n for n in (0, 1, 2, 4, 6, 7)]
    assert [row["row"] for row in found if "error" in row] == [3, 5]
    assert scores.failed == 2


def test_texts_and_conversations_are_asked_for_apart(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "x"}]
    source = write_rows(tmp_path / "in.jsonl", ["a", {"messages": turns}, "b"])
    server = CorpusServer()
    score(source, tmp_path / "out.jsonl", server)
    asked = [body.get("texts") or body["messages"] for body in server.asked]
    assert sorted(asked, key=str) == [["a", "b"], [turns]]
    found = read_rows(tmp_path / "out.jsonl")
    assert [row["result"]["sum_logprob"] for row in found] == [
        value_of("a"), value_of(json.dumps(turns)), value_of("b"),
    ]  # fmt: skip


BROKEN = ['{"text": "a"', '{"text": 7}', '{"other": "a"}', "[1]", '{"text": ""}', '"\\ud800"']


def test_rows_that_are_invalid_have_an_error_and_the_others_their_result(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [f'"good {n}"\n\n{line}\n' for n, line in enumerate([*BROKEN, f'"{BAD}"'])]
    source.write_text("".join(lines))
    target, server = tmp_path / "out.jsonl", CorpusServer()
    scores = score(source, target, server, limits=JobLimits())
    rows = read_rows(target)
    assert [set(row) for row in rows] == [{"row", "result"}, {"row", "error"}] * 7
    assert [row["result"]["sum_logprob"] for row in rows[::2]] == [
        value_of(f"good {n}") for n in range(7)
    ]
    errors = [row["error"] for row in rows[1::2]]
    assert [error["code"] for error in errors] == ["invalid_request"] * 6 + ["context_too_long"]
    assert "text must be a text" in errors[1]["detail"]
    assert (scores.rows, scores.failed) == (14, 7)
    assert len(server.asked) < 8, "those that are no item are not sent"


def test_strict_ends_with_the_first_row_that_fails(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [*["a"] * 9, 7, "b"])
    target = tmp_path / "out.jsonl"
    with pytest.raises(LogsteerError, match="row 9: invalid_request: no object"):
        score(source, target, CorpusServer(), strict=True)
    assert not target.exists()
    assert len(read_rows(tmp_path / "out.jsonl.part")) == 8
    assert score(source, target, CorpusServer()).failed == 1
    assert len(read_rows(target)) == 11


def test_many_failures_in_a_row_end_the_job(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a", *[BAD] * 40])
    limits = JobLimits(batch_size=4, max_failures=10)
    with pytest.raises(LogsteerError, match=r"11 rows in a row have failed.*too long"):
        score(source, tmp_path / "out.jsonl", CorpusServer(), limits=limits)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"endpoint": "tokenize"}, "takes no rows"),
        ({"options": {"bos": "perhaps"}}, "bos"),
        ({"options": {"reference": "other"}}, "not of each row"),
        ({"options": {"columns": ["rank"]}}, "tokens: true"),
        ({"fields": {"context": "a"}}, "context is not a field"),
        ({"targets": ["a"]}, "takes no targets"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_asked(
    corpus: Path, tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        score(corpus, tmp_path / "out.jsonl", CorpusServer(OSError()), **options)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


# ------------------------------------------------------------------ servers


def test_temporary_failures_are_retried(corpus: Path, tmp_path: Path) -> None:
    busy = problem("overloaded", 429, retryable=True, headers={"Retry-After": "1"})
    gone = problem("engine_restarting", 503, retryable=True, headers={"Retry-After": "0"})
    server = CorpusServer(busy, gone, httpx.ReadError("reset"), httpx.ConnectError("refused"))
    began = time.monotonic()
    scores = score(corpus, tmp_path / "out.jsonl", server)
    assert time.monotonic() - began >= 1, "as long as the server asks for"
    assert (scores.rows, scores.failed, scores.retries) == (50, 0, 4)
    sent = [text for body in server.asked for text in body["texts"]]
    assert sorted(sent) == sorted(row["text"] for row in texts(50))


def test_lasting_failures_end_the_job_and_keep_finished_rows(corpus: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    with pytest.raises(NotFoundError):
        score(corpus, target, CorpusServer(problem("unknown_model", 404)))
    limits = JobLimits(batch_size=4, patience_s=0.5)
    refusal = problem("overloaded", 429, retryable=True, headers={"Retry-After": "0"})
    busy = CorpusServer()
    busy.failures = Endless(refusal)
    with pytest.raises(OverloadedError):
        score(corpus, target, busy, limits=limits)
    assert score(corpus, target, CorpusServer()).rows == 50


class Endless(list[Any]):
    """A list whose first entry stays."""

    def __init__(self, entry: Any) -> None:
        super().__init__([entry])

    def pop(self, *_: Any) -> Any:
        return httpx.Response(self[0].status_code, headers=self[0].headers, content=self[0].content)


@pytest.mark.parametrize("code", ["internal", "deadline_exceeded", "payload_too_large"])
def test_a_batch_that_is_too_large_is_halved(corpus: Path, tmp_path: Path, code: str) -> None:
    status = {"internal": 500, "deadline_exceeded": 504, "payload_too_large": 413}[code]
    server = CorpusServer(*[problem(code, status) for _ in range(3)])
    assert score(corpus, tmp_path / "out.jsonl", server).failed == 0
    sizes = {len(body["texts"]) for body in server.asked}
    assert sizes == {2, 4}


def test_a_server_that_dies_loses_nothing_to_the_other(corpus: Path, tmp_path: Path) -> None:
    living, dying = CorpusServer(), CorpusServer()

    class Dying(httpx.AsyncBaseTransport):
        count = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            Dying.count += 1
            if Dying.count > 3:
                raise httpx.ConnectError("refused")
            return await dying("").handle_async_request(request)

    servers: dict[str, Any] = {"http://a": living, "http://b": lambda _: Dying()}
    scores = score(corpus, tmp_path / "out.jsonl", living, base_url=list(servers),
                   transport=lambda url: servers[url](url))  # fmt: skip
    assert (scores.rows, scores.failed) == (50, 0)
    assert len(dying.asked) == 3 and len(living.asked) == 10
    score(corpus, tmp_path / "alone.jsonl", CorpusServer())
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()


def test_servers_with_different_models_do_not_share_a_job(corpus: Path, tmp_path: Path) -> None:
    servers = {"http://a": CorpusServer(weights="w"), "http://b": CorpusServer(weights="v")}
    with pytest.raises(LogsteerError, match="answered by another model"):
        score(corpus, tmp_path / "out.jsonl", CorpusServer(), base_url=list(servers),
              transport=lambda url: servers[url]())  # fmt: skip


def test_concurrency_halves_after_a_refusal_and_grows_again() -> None:
    async def ask() -> list[int]:
        async with AsyncClient("http://there") as client:
            server = FleetServer(client, 16)
            server.record_failure(OverloadedError("overloaded", "busy", retry_after=60.0))
            # What it refused meanwhile counts as one refusal.
            server.record_failure(OverloadedError("overloaded", "busy", retry_after=60.0))
            limits = [server.limit]
            for _ in range(8 + 9):
                server.record_answer()
            return [*limits, server.limit]

    assert asyncio.run(ask()) == [8, 10]


# ------------------------------------------------------------------ the command


def test_the_command_tells_what_was_done(corpus: Path, tmp_path: Path, capsys: Output) -> None:
    target = tmp_path / "out.jsonl"
    argv = ["score-file", str(corpus), str(target), "--endpoint", "perplexity"]
    with serve_corpus() as url:
        assert main([*argv, "--url", url, "--id", "id"]) == 0
        out, err = capsys.readouterr()
        assert "perplexity" in out and "150" in out and err == ""
        assert main([*argv, "--base-url", url, "--id", "id", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["rows"] == 50
        write_rows(corpus, [*texts(2), 7])
        assert main([*argv, "--url", url, "--restart"]) == 1
        err = capsys.readouterr().err
        assert "1 of 3 rows failed" in err and "out.jsonl" in err
    other = str(tmp_path / "other.jsonl")
    argv = ["score-file", str(corpus), other, "--endpoint", "perplexity"]
    assert main([*argv, "--url", "http://127.0.0.1:9", "--patience-s", "0.2"]) == 3


@pytest.mark.parametrize(
    ("endpoint", "result", "told"),
    [
        ("logprob", {}, "2 targets were asked for, got 0"),
        ("logprob", {"targets": [{"logprob": -1.0}]}, "2 targets were asked for, got 1"),
        ("logprob", {"targets": None}, "2 targets were asked for, got 0"),
        ("logprob", None, "not an object"),
        ("perplexity", {"sum_logprob": -1.0}, "no number sum_squared_logprob"),
        ("generate", {"completions": []}, "1 completions were asked for, got 0"),
    ],
)
def test_a_result_without_what_was_asked_for_is_a_failed_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str, result: Any, told: str
) -> None:
    monkeypatch.setitem(RESULTS, f"/{endpoint}", lambda *_: result)
    item = {"context": "a", "targets": [" b", " c"], "text": "a", "prompt": "a"}
    source, target = write_rows(tmp_path / "in.jsonl", [item]), tmp_path / "out.jsonl"
    with serve_corpus() as url:
        argv = ["score-file", str(source), str(target), "--endpoint", endpoint, "--url", url]
        assert main(argv) == 1
    (row,) = read_rows(target)
    assert row["error"]["code"] == "internal" and told in row["error"]["detail"]


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_files_of_other_kinds_say_the_same(corpus: Path, tmp_path: Path, kind: str) -> None:
    import pyarrow
    from pyarrow import parquet

    plain, packed = tmp_path / "plain.jsonl", tmp_path / f"in.{kind}"
    expected = score(corpus, plain, CorpusServer(), id_column="id")
    if kind == "parquet":
        table = pyarrow.Table.from_pylist([{**row, "more": 1} for row in texts(50)])
        parquet.write_table(table, packed, row_group_size=7)
    else:
        packed.write_bytes(gzip.compress(corpus.read_bytes()))
    target = tmp_path / "out.jsonl.gz"
    interrupt(packed, target, after=5)
    scores = score(packed, target, CorpusServer(), id_column="id")
    assert (scores.rows, scores.resumed_rows, scores.total) == (50, 20, expected.total)
    assert gzip.decompress(target.read_bytes()) == plain.read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "target", "told"),
    [
        ("in.txt", b"{}", "out.jsonl", "does not say what it holds"),
        ("in.jsonl.gz", b"no gzip", "out.jsonl", "cannot be unpacked"),
        ("in.jsonl.gz", gzip.compress(b'"a"\n' * 999)[:-20], "out.jsonl", "cannot be unpacked"),
        ("in.parquet", b"no parquet", "out.jsonl", "not a Parquet"),
        ("in.jsonl", b"{}", "out.parquet", r"name a \.jsonl"),
        ("in.jsonl", b"{}", "none/out.jsonl", "there is no directory"),
    ],
    ids=["no name", "no gzip", "cut", "no parquet", "to parquet", "no directory"],
)
def test_files_that_cannot_be_read_or_written(
    tmp_path: Path, name: str, content: bytes, target: str, told: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LogsteerError, match=told):
        score(tmp_path / name, tmp_path / target, CorpusServer())


def test_what_is_missing_for_parquet_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    packed = tmp_path / "in.parquet"
    packed.touch()
    with pytest.raises(LogsteerError, match=r"pip install \"logsteer\[tables\]\""):
        score(packed, tmp_path / "out.jsonl", CorpusServer())


MEASURE = """
import re, sys
from pathlib import Path
from logsteer.cli import main
assert main(sys.argv[1:]) == 0
print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.full
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    with serve_corpus() as url:
        for count in (25_000, 100_000):
            corpus = write_rows(tmp_path / f"in-{count}.jsonl", texts(count))
            target = tmp_path / f"out-{count}.jsonl"
            argv = ["score-file", str(corpus), str(target), "--endpoint", "perplexity",
                    "--url", url, "--json", "--concurrency", "16"]  # fmt: skip
            done = subprocess.run(
                [sys.executable, "-c", MEASURE, *argv],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            peaks.append(int(done.stdout.splitlines()[-1]) / 1024)
            with target.open() as lines:
                assert sum(1 for _ in lines) == count
    assert peaks[1] - peaks[0] < 10, f"MiB of 25,000 and 100,000 rows: {peaks}"


def test_an_incomplete_answer_is_refused() -> None:
    _, document = answer("/logprob", {"items": [{"context": "a", "targets": ["b"]}] * 3})
    whole = encode(document)
    assert read_answer(whole, 3) == document
    for size in range(0, len(whole), 7):
        with pytest.raises(AnswerError):
            read_answer(whole[:size], 3)
    with pytest.raises(AnswerError, match="2 rows, 3 results"):
        read_answer(whole, 2)


def test_answers_in_another_style_give_the_same_lines(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    rows = [{"context": f'{n} "}},{{"', "targets": ['"},{"targets":[\n', "\\"]} for n in range(40)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for name, style in (("plain", {}), ("spaced", {"separators": None, "ensure_ascii": True})):
        target = tmp_path / f"{name}.jsonl"
        logsteer.score_file(source, target, transport=CorpusServer(**style))
        found.append(target.read_bytes())
    assert found[0] == found[1]
    assert len(found[0].splitlines()) == 40


# ------------------------------------------------------------------ jobs that end in their midst


@pytest.mark.full
def test_a_job_resumes_from_a_file_cut_at_any_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power is lost here
    corpus = write_rows(tmp_path / "in.jsonl", texts(12))
    whole = tmp_path / "whole.jsonl"
    expected = score(corpus, whole, CorpusServer(), id_column="id")
    target = tmp_path / "out.jsonl"
    interrupt(corpus, target, after=2)
    files = {path: path.read_bytes() for path in tmp_path.glob("out.jsonl.*")}
    cut = target.with_name(f"{target.name}.part")
    files[cut] += b'{"row": 8, "resu'  # what stands behind the last commit
    server = CorpusServer(seconds=0.0)
    for size in range(0, len(files[cut]) + 1, 4):
        for path, content in files.items():
            path.write_bytes(content[:size] if path == cut else content)
        found = score(corpus, target, server, id_column="id", limits=JobLimits(batch_size=8))
        assert target.read_bytes() == whole.read_bytes(), f"cut at {size}"
        same = {"seconds", "rows_per_s", "tokens_per_s", "resumed_rows"}
        assert found.model_dump(exclude=same) == expected.model_dump(exclude=same)
        target.unlink()


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_an_interrupted_end_of_a_job_is_repeated(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from logsteer.corpus import job, record

    whole = tmp_path / f"whole-{name}"
    score(corpus, whole, CorpusServer())
    target = tmp_path / name

    def stop(*_: Any) -> None:
        raise PowerCutError

    for place in ((job, "place"), (record.JobRecord, "finish")):
        with monkeypatch.context() as patch, pytest.raises(PowerCutError):
            patch.setattr(*place, stop)
            score(corpus, target, CorpusServer())
        silent = CorpusServer(*[OSError()] * 9)
        assert score(corpus, target, silent).rows == 50
        assert target.read_bytes() == whole.read_bytes()
        for path in tmp_path.glob(f"{name}*"):
            path.unlink()


def test_a_full_disk_costs_nothing_that_was_there(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.jsonl"
    write, room, one_at_a_time = os.write, 3000, threading.Lock()

    def write_less(file: int, data: Any) -> int:
        nonlocal room
        with one_at_a_time:  # lines and notes of them are written by several threads
            if not room:
                raise OSError(28, "No space left on device")
            count = write(file, bytes(data)[:room])
            room -= count
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_less)
        with pytest.raises(OSError, match="No space left") as caught:
            score(corpus, target, CorpusServer())
    assert str(caught.value.filename).startswith(str(target))
    assert score(corpus, target, CorpusServer()).rows == 50
    score(corpus, tmp_path / "whole.jsonl", CorpusServer())
    assert target.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


# ------------------------------------------------------------------ the command


def run_command(url: str, *argv: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("logsteer")), "score-file", *argv, "--url", url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def wait_for_commit(record: Path) -> None:
    """Wait until a job has noted more than it had."""

    def count() -> int:
        found = json.loads(record.read_bytes()) if record.exists() else {}
        return int(found.get("commit", {}).get("rows", 0))

    before = count()
    deadline = time.monotonic() + 120
    while count() <= before:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.full
def test_ctrl_c_keeps_what_is_done_and_two_at_once_are_refused(tmp_path: Path) -> None:
    corpus, target = write_rows(tmp_path / "in.jsonl", texts(3000)), tmp_path / "out.jsonl"
    with serve_corpus(delay_s=0.5) as url:  # the first has work for three minutes
        argv = (str(corpus), str(target), "--endpoint", "perplexity", "--batch-size", "4")
        argv = (*argv, "--concurrency", "2", "--commit-s", "0.01")
        command = run_command(url, *argv)
        wait_for_commit(tmp_path / "out.jsonl.job")
        second = run_command(url, *argv)
        _, told = second.communicate(timeout=120)
        assert second.returncode == 1
        assert b"out.jsonl is being written by another process" in told
        command.send_signal(signal.SIGINT)
        _, told = command.communicate(timeout=120)
        assert command.returncode == 130
        assert b"the same command resumes" in told
    scores = score(corpus, target, CorpusServer(), limits=JobLimits())
    assert 0 < scores.resumed_rows < 3000
    assert [row["row"] for row in read_rows(target)] == list(range(3000))


# ------------------------------------------------------------------ another job


def test_a_changed_job_is_refused_and_restart_begins_anew(corpus: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    interrupt(corpus, target, after=3)
    with pytest.raises(LogsteerError, match=r"of another job: options was .* --restart"):
        score(corpus, target, CorpusServer(), id_column="id", options={"stride": 4})
    with pytest.raises(LogsteerError, match="id_column was"):
        score(corpus, target, CorpusServer())
    with pytest.raises(LogsteerError, match="weights_digest: 'w', now 'v'"):
        score(corpus, target, CorpusServer(weights="v"), id_column="id")
    rows = texts(50)
    write_rows(corpus, [*rows[1::-1], *rows[2:]])
    with pytest.raises(LogsteerError, match="has changed: rows 0 to 11 are not the rows"):
        score(corpus, target, CorpusServer(), id_column="id")
    write_rows(corpus, rows[:-1])
    with pytest.raises(LogsteerError, match=r"input was .* and is"):
        score(corpus, target, CorpusServer(), id_column="id")
    scores = score(corpus, target, CorpusServer(weights="v"), id_column="id", restart=True)
    assert (scores.rows, scores.resumed_rows) == (49, 0)
    target.write_text("other")
    with pytest.raises(LogsteerError, match="has 5 bytes, not"):
        score(corpus, target, CorpusServer(), id_column="id")
    assert not (tmp_path / "out.jsonl.part").exists()
    (tmp_path / "out.jsonl.job").write_text('{"score-file": 1}\n{"rows": 4}\n')
    with pytest.raises(LogsteerError, match="not a record of a job of this version; --restart"):
        score(corpus, target, CorpusServer(), id_column="id")


def test_files_of_others_are_not_written_over(corpus: Path, tmp_path: Path) -> None:
    for name in ("out.jsonl", "other.jsonl.part"):
        (tmp_path / name).write_text("mine")
        target = tmp_path / name.removesuffix(".part")
        for _ in range(2):
            with pytest.raises(LogsteerError, match="no job is known that wrote it"):
                score(corpus, target, CorpusServer())
        assert (tmp_path / name).read_text() == "mine"
        assert score(corpus, target, CorpusServer(), restart=True).rows == 50

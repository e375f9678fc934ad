"""What `logsteer.score_file` reads and writes: files of gzip, Zstandard and Parquet.

Files that cannot be read, a package that is missing, and the memory that a file of any size takes.
"""

import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from logsteer import LogsteerError

from .corpus_server import CorpusServer, serve_corpus, value_of
from .score_file_cases import interrupt, read_rows, score, texts, write_rows


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_files_of_other_kinds_say_the_same(corpus: Path, tmp_path: Path, kind: str) -> None:
    import pyarrow
    from pyarrow import parquet

    plain, packed = tmp_path / "plain.jsonl", tmp_path / f"in.{kind}"
    expected = score(corpus, plain, CorpusServer(), id_column="id")
    if kind == "parquet":
        table = pyarrow.Table.from_pylist([{**row, "more": 1} for row in texts(50)])
        parquet.write_table(table, packed, row_group_size=7)
    elif kind == "jsonl.gz":
        packed.write_bytes(gzip.compress(corpus.read_bytes()))
    else:
        with pyarrow.CompressedOutputStream(str(packed), "zstd") as file:
            file.write(corpus.read_bytes())
    target = tmp_path / f"out.{kind}"
    interrupt(packed, target, after=5)
    scores = score(packed, target, CorpusServer(), id_column="id")
    assert (scores.rows, scores.resumed_rows, scores.total) == (50, 20, expected.total)
    if kind == "parquet":
        rows = parquet.read_table(target).to_pylist()
        assert all(row.pop("error") is None for row in rows)
        for row in rows:
            row["result"] = {n: v for n, v in row["result"].items() if v is not None}
        assert rows == read_rows(plain)
        return
    opened = pyarrow.input_stream(str(target), compression="detect")
    assert opened.read() == plain.read_bytes()


def test_parquet_has_errors_and_ids_in_columns_of_their_own(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"context": "a", "targets": [" b"], "n": 7}, {"context": "a", "targets": [], "n": 8}]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "in.parquet")
    target = tmp_path / "out.parquet"
    score(tmp_path / "in.parquet", target, CorpusServer(), "logprob", id_column="n")
    one, other = parquet.read_table(target).to_pylist()
    assert (one["row"], one["id"], one["error"]) == (0, 7, None)
    assert one["result"]["targets"][0]["logprob"] == value_of('"a" b')
    assert (other["id"], other["result"], other["error"]["code"]) == (8, None, "invalid_request")
    assert parquet.read_schema(target).field("id").type == table.schema.field("n").type


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["7", None, "a\u00e9\n"], ["7", None, "a\u00e9\n"]),
        ([7, "8", None], ["7", "8", None]),
        ([{"a": 1}, [2], "x"], ['{"a":1}', "[2]", "x"]),
    ],
    ids=["text", "mixed", "structures"],
)
def test_ids_of_json_lines_are_text_in_parquet(
    tmp_path: Path, ids: list[Any], expected: list[Any]
) -> None:
    from pyarrow import parquet

    source = write_rows(tmp_path / "in.jsonl", [{"text": "\ud83d\ude00", "n": n} for n in ids])
    score(source, tmp_path / "out.parquet", CorpusServer(), id_column="n")
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["id"] for row in rows] == expected


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("in.txt", b"{}", "does not say what it holds"),
        ("in.jsonl.gz", b"no gzip", "cannot be unpacked"),
        ("in.jsonl.gz", gzip.compress(b'"a"\n' * 999)[:-20], "cannot be unpacked"),
        ("in.parquet", b"no parquet", "not a Parquet"),
    ],
    ids=["no name", "no gzip", "cut", "no parquet"],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LogsteerError, match=told):
        score(tmp_path / name, tmp_path / "out.jsonl", CorpusServer())


def test_what_is_missing_for_parquet_is_named(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LogsteerError, match=r"pip install \"logsteer\[tables\]\""):
        score(corpus, tmp_path / "out.parquet", CorpusServer())


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

"""What `logsteer.score_file` reads and writes: files of gzip and Parquet.

Files that cannot be read, a package that is missing, and the memory that a file of any size takes.
"""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from logsteer import LogsteerError

from .corpus_server import CorpusServer, serve_corpus
from .score_file_cases import interrupt, score, texts, write_rows


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


def test_results_are_not_written_as_parquet(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(LogsteerError, match=r"name a \.jsonl"):
        score(corpus, tmp_path / "out.parquet", CorpusServer())


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
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

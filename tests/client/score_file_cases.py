"""Jobs of `logsteer.score_file`, whole and interrupted: what its tests share."""

import json
from pathlib import Path
from typing import Any

import pytest

import logsteer
from logsteer.corpus import FileScores, JobLimits

from .corpus_server import CorpusServer

SMALL = JobLimits(batch_size=4, commit_s=0.0)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "text": f"text {n}"} for n in range(count)]


def score(
    source: Path, target: Path, server: CorpusServer, endpoint: str = "perplexity", **options: Any
) -> FileScores:
    own: dict[str, Any] = {"limits": SMALL, "transport": server, **options}
    return logsteer.score_file(source, target, endpoint, **own)


class PowerCutError(BaseException):
    """The process is gone."""


def interrupt(corpus: Path, target: Path, after: int) -> None:
    """Leave the files of a job as they are when it ends behind so many chunks."""
    from logsteer.corpus.job import FileJob

    count = 0
    write, commit = FileJob.write, FileJob.commit

    def stop(self: FileJob, scored: Any) -> None:
        nonlocal count
        write(self, scored)
        commit(self)
        count += 1
        if count == after:
            raise PowerCutError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerCutError):
        patch.setattr(FileJob, "write", stop)
        score(corpus, target, CorpusServer(), id_column="id")

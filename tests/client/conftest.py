"""Fixtures of the client's tests."""

from pathlib import Path

import pytest

from logsteer import _async_caller, _sync_caller

from .corpus_server import texts, write_rows
from .scripted import Caller


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGSTEER_BASE_URL", raising=False)
    monkeypatch.delenv("LOGSTEER_API_KEY", raising=False)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that the clients made, none of which takes time."""
    made: list[float] = []

    async def pause(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(_sync_caller, "sleep", made.append)
    monkeypatch.setattr(_async_caller, "sleep", pause)
    return made


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Caller:
    """Each test that takes this runs once with each client."""
    return Caller(request.param)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A file of 50 rows, each a text with an id, for `logsteer.score_file`."""
    return write_rows(tmp_path / "in.jsonl", texts(50))

"""Fixtures of the client's tests."""

import asyncio
import time

import pytest

from .scripted import Caller


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGSTEER_BASE_URL", raising=False)
    monkeypatch.delenv("LOGSTEER_API_KEY", raising=False)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that the clients made, none of which takes time."""
    made: list[float] = []

    async def pause(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(time, "sleep", made.append)
    monkeypatch.setattr(asyncio, "sleep", pause)
    return made


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Caller:
    """Each test that takes this runs once with each client."""
    return Caller(request.param)

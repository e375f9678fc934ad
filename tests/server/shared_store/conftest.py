"""An object store that is empty before each test, and soon asked again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logsteer_server.stores import bucket as bucket_module
from tests.server.shared_store.bucket_cases import URL, open_at, shared_at
from tests.server.shared_store.object_store import ObjectStore


@pytest.fixture(autouse=True)
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty the object store, and take pauses out of asking it again."""
    ObjectStore.forget()
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(bucket_module, "REST_S", 0.0)
    yield
    ObjectStore.forget()


@pytest.fixture(params=["objects", "memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place of each sort that nobody else uses."""
    places = {"objects": URL, "memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}/r"}
    return places[request.param]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Any, Any]:
    """The stores of two machines."""
    return tuple(open_at(shared_at(tmp_path / name)) for name in "ab")  # type: ignore[return-value]

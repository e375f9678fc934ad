"""Fixtures of the server's tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that holds a module's fake models, those of `may_hold`, while it exists."""
    return tmp_path_factory.mktemp("hold") / "hold"

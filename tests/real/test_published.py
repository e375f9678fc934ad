"""Published results on SmolLM2, as the notebooks of the documentation reproduce them."""

from pathlib import Path

import pytest

from tests.notebooks import PUBLISHED, compare
from tests.servers import Server
from tests.trained import convert_smollm2, needs_smollm2

pytestmark = [pytest.mark.engine, needs_smollm2]


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_published_result_is_found_again(
    path: Path, real_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGSTEER_MODEL", "vllm")
    monkeypatch.setenv("LOGSTEER_CHECKPOINT", str(convert_smollm2()))
    compare(path, real_server.url, rel=0.02, abs=0.02)

"""The pages of the documentation that are written from the code."""

from pathlib import Path

import pytest

from logsteer._endpoints import ENDPOINTS
from logsteer.errors import KINDS
from logsteer_server.reference import main, spell, write_endpoints, write_errors, write_settings
from logsteer_server.settings import ModelSettings, Settings
from tests.conftest import ROOT


def test_every_setting_stands_in_its_page_with_a_description() -> None:
    page = write_settings()
    for kind in (Settings, ModelSettings):
        for name, field in kind.model_fields.items():
            assert f"| `{name}` |" in page
            assert field.description, name


def test_every_problem_code_and_every_endpoint_have_a_line() -> None:
    errors, endpoints = write_errors(), write_endpoints()
    assert all(f"| `{code}` | {kind.status} |" in errors for code, kind in KINDS.items())
    for endpoint in ENDPOINTS.values():
        assert f"## {endpoint.method} {endpoint.path}\n" in endpoints
        for field in endpoint.request.model_fields if endpoint.request else ():
            assert f"| `{field}` |" in endpoints.split(f" {endpoint.path}\n")[1]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 65535}, "integer ≥ 1 ≤ 65,535"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string or null"),
        ({"type": "array", "items": {"$ref": "#/$defs/Pair"}}, "list of `Pair`"),
        ({"enum": ["auto", "never"]}, "`auto`, `never`"),
    ],
)
def test_types_in_words(schema: dict[str, object], words: str) -> None:
    assert spell(schema) == words


def test_a_page_that_is_stale_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--check"]) == 0
    (tmp_path / "errors.md").write_text("old")
    assert main([str(tmp_path), "--check"]) == 1
    assert "errors.md" in capsys.readouterr().err


def test_the_pages_in_the_repository_are_those_of_the_code() -> None:
    assert main([str(ROOT / "docs"), "--check"]) == 0

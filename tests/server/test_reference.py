"""The pages of the documentation that are written from the code."""

from pathlib import Path

import pytest

from logsteer._endpoints import ENDPOINTS
from logsteer.errors import KINDS
from logsteer_server.reference import (
    MODEL_TOPICS,
    SERVER_TOPICS,
    main,
    spell,
    write_endpoints,
    write_errors,
    write_settings,
)
from logsteer_server.settings import ModelSettings, Settings
from tests.conftest import ROOT


def test_every_setting_stands_in_its_page_with_a_description() -> None:
    page = write_settings()
    for kind, topics in ((Settings, SERVER_TOPICS), (ModelSettings, MODEL_TOPICS)):
        assert sorted(" ".join(topics.values()).split()) == sorted(kind.model_fields)
        for name, field in kind.model_fields.items():
            assert f"| `{name}` |" in page
            assert field.description, name


def test_every_problem_code_and_every_endpoint_have_a_line() -> None:
    errors, page = write_errors(), write_endpoints()
    rows = [line for line in errors.splitlines() if line.startswith("| `")]
    for code, kind in KINDS.items():
        (row,) = [row for row in rows if f"`{code}`" in row]
        assert f" | {kind.status} | " in row
    shared = page.split("\n## POST")[0]
    for endpoint in ENDPOINTS.values():
        assert f"{endpoint.method} {endpoint.path}" in page
        for field in endpoint.request.model_fields if endpoint.request else ():
            section = page.split(f"{endpoint.method} {endpoint.path}\n")[-1].split("\n## ")[0]
            assert f"| `{field}` |" in shared or f"`{field}`" in section, (endpoint.path, field)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 65535}, "integer ≥ 1 ≤ 65,535"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string"),
        ({"type": "array", "items": {"$ref": "#/$defs/Pair"}}, "list of `Pair`"),
        ({"enum": ["auto", "never"]}, "`auto`, `never`"),
    ],
)
def test_types_in_words(schema: dict[str, object], words: str) -> None:
    assert spell(schema) == words


def test_a_field_of_two_meanings_is_shared_by_its_most_frequent_one() -> None:
    shared, *sections = write_endpoints().split("\n## POST ")
    (generate,) = [section for section in sections if section.startswith("/generate\n")]
    assert '| `columns` | list of `Column` = `["logprob", "rank"]` |' in shared
    assert "- `columns` (list of `Column`): Columns of each generated token" in generate


def test_a_page_that_is_stale_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--check"]) == 0
    (tmp_path / "errors.md").write_text("old")
    assert main([str(tmp_path), "--check"]) == 1
    assert "errors.md" in capsys.readouterr().err


def test_the_pages_in_the_repository_are_those_of_the_code() -> None:
    assert main([str(ROOT / "docs"), "--check"]) == 0

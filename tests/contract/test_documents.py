"""Every code block of the documentation, run as it stands against the demo model."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from logsteer import Client
from logsteer_server.settings import Settings
from tests.conftest import ROOT, Server
from tests.deploy.observed import list_metrics
from tests.documents import (
    DISTRIBUTIONS,
    NOT_RUN,
    PAGES,
    assert_contains,
    open_namespace,
    read_blocks,
    run_python,
    run_shell,
)

README = ROOT / "README.md"
START = ROOT / "docs" / "index.md"
LANGUAGES = {"sh", "python", "json", "yaml", "text"}
"""What a block may be of; `text` is for drawings and is not run."""
ELSEWHERE = {
    "export_gguf", "extra_body", "fwd_hooks", "lm_eval", "model_args", "oom_score_adj",
    "set_control", "token_ids",
}  # fmt: skip
"""Names in the documentation that are other tools'."""
GUIDES = [page for page in PAGES if page != README and any(b.is_run for b in read_blocks(page))]


@pytest.fixture
def empty_server(demo_server: Server) -> Server:
    """Return the demo's server without the vectors that other pages and files have stored."""
    with Client(demo_server.url) as client:
        for card in client.vectors.list().vectors:
            client.vectors.delete(card.name)
    return demo_server


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_have_a_language_and_those_that_are_not_run_a_reason(page: Path) -> None:
    text = page.read_text()
    assert text.count("```") == 2 * len(read_blocks(page)), "a fence without a language"
    for block in read_blocks(page):
        assert block.language in LANGUAGES, block.name
        assert block.is_run or len(block.comment) > len(NOT_RUN), block.name


def test_blocks_of_other_pages_have_a_reason() -> None:
    others = {*ROOT.glob("*.md"), *ROOT.glob("*/README.md")}.difference(PAGES)
    blocks = [block for page in sorted(others) for block in read_blocks(page)]
    assert blocks
    assert [b.name for b in blocks if b.is_run and b.language != "text"] == []


@pytest.mark.engine
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_in_their_order(
    page: Path, empty_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page's blocks share a directory and what Python has defined; JSON is the answer before."""
    answer = ""
    with open_namespace() as namespace:
        for block in filter(lambda block: block.is_run, read_blocks(page)):
            try:
                match block.language:
                    case "sh":
                        answer = run_shell(block.code, empty_server.url, tmp_path)
                    case "python":
                        run_python(block.code, empty_server.url, block.name, namespace)
                        answer = capsys.readouterr().out
                    case "json":
                        assert_contains(json.loads(answer), json.loads(block.code))
                    case "yaml":
                        document = yaml.safe_load(block.code)
                        assert "models" not in document or Settings(**document).models
            except BaseException as error:
                error.add_note(f"in {block.name}")
                raise


def count_words(page: Path) -> int:
    """Words of a page, without bars of tables and other signs that stand alone."""
    return sum(any(map(str.isalnum, word)) for word in page.read_text().split())


def test_the_documentation_is_short() -> None:
    assert count_words(README) <= 450
    pages = (page for page in PAGES if page != ROOT / "demo" / "README.md")
    assert sum(map(count_words, pages)) <= 14_000


@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md"))],
    ids=lambda page: page.name,
)  # fmt: skip
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    for link in filter(None, (one or other for one, other in links)):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w]+", "-", h.lower()).strip("-") for h in headings}, link


def test_what_package_indexes_show_has_no_link_into_the_repository() -> None:
    projects = [ROOT / "pyproject.toml", ROOT / "server" / "pyproject.toml"]
    readmes = [p.parent / tomllib.loads(p.read_text())["project"]["readme"] for p in projects]
    assert readmes == DISTRIBUTIONS
    for readme in readmes:
        links = re.findall(r"\]\(([^)]*)|^\[[^\]]+\]: (.*)", readme.read_text(), re.MULTILINE)
        assert not [link for link in links if "://" not in "".join(link)], readme


def test_every_picture_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [p.name for p in (ROOT / "docs" / "images").iterdir() if p.name not in text] == []


@pytest.mark.engine
def test_the_readme_runs(empty_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (b for b in read_blocks(README) if b.is_run)
    with open_namespace() as namespace:
        run_python(block.code, empty_server.url, block.name, namespace)
    probs, happy = capsys.readouterr().out.splitlines()
    assert probs.startswith("[0.99999")
    assert "He felt happy and glad." in happy


@pytest.mark.engine
def test_the_calls_that_the_server_prints_are_those_of_the_first_page(demo_server: Server) -> None:
    calls = [b.code.strip() for b in read_blocks(START) if b.code.startswith("curl")]
    printed = [line.strip() for line in demo_server.lines if line.startswith("  curl")]
    assert printed == [call.replace("http://127.0.0.1:8000", demo_server.url) for call in calls]


def test_make_targets_of_the_documentation_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    known = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = {
        target
        for page in PAGES
        for target in re.findall(r"`make ([\w-]+)|^make ([\w-]+)", page.read_text(), re.MULTILINE)
        for target in target
        if target
    }
    assert {"serve", "cluster"} <= named <= known


def read_names(value: Any) -> set[str]:
    """Names of fields, and values of enumerations, at any depth of a JSON document."""
    if isinstance(value, dict):
        own = {name for name in value if isinstance(name, str)}
        return own.union(*map(read_names, value.values()))
    if isinstance(value, list):
        return {v for v in value if isinstance(v, str)}.union(*map(read_names, value))
    return {value} if isinstance(value, str) else set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fields_that_a_page_names_exist(page: Path) -> None:
    """Whatever stands in backquotes and has an underscore is a name of the code or the API."""
    known = read_names(json.loads((ROOT / "openapi.json").read_text()))
    known |= read_names(Settings.model_json_schema())
    known |= set().union(*list_metrics().values())
    known |= set(list_metrics())  # a histogram as a whole
    folders = ("client", "server", "demo", "bench")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = {
        name
        for code in re.findall(r"`([^`\n]+)`", prose)
        for name in re.findall(r"(?<![\w/.])[a-z]+(?:_[a-z0-9]+)+(?![\w/(])", code)
    }
    assert not {name for name in named - known - words - ELSEWHERE if "test_" not in name}

"""What the documentation says, held to what runs: every code block, engines, the demo model."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.reference import write_pages
from logsteer import Client
from logsteer.errors import APIError
from logsteer_server.settings import Settings
from tests.conftest import ROOT, Server
from tests.contract.conftest import REAL
from tests.contract.steering import DATA
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
    "export_gguf", "extra_body", "fwd_hooks", "get_sequence_logprobs", "lm_eval", "model_args",
    "oom_score_adj", "set_control", "token_ids",
}  # fmt: skip
"""Names in the documentation that are other tools'."""
GUIDES = [page for page in PAGES if page != README and any(b.is_run for b in read_blocks(page))]


@pytest.fixture
def empty_server(demo_server: Server) -> Server:
    """Return the demo's server without what other pages and files have stored."""
    with Client(demo_server.url) as client:
        for variant in client.variants.list().variants:
            client.variants.delete(variant.name)
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
    others = {"demo/README.md", "docs/families.md", *(f"docs/{name}" for name in write_pages())}
    written = (page for page in PAGES if str(page.relative_to(ROOT)) not in others)
    assert sum(map(count_words, written)) <= 9_700


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
        for name in re.findall(r"(?<![\w/.:])[a-z]+(?:_[a-z0-9]+)+(?![\w/(])", code)
    }
    assert not {name for name in named - known - words - ELSEWHERE if "test_" not in name}


ITEMS: Any = [{"context": "Once upon a time", "targets": [" there was"]}]
SHORT_NAMES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
NOBODY: dict[str, Any] = {"override": {"name": "nobody", "eta": 0.5}, "adapter": "nobody"}


def read_table() -> dict[str, list[str]]:
    """First cell of each row -> what it says of vLLM and of TransformerLens."""
    lines = (ROOT / "docs" / "engines.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if "|" in line
    ]
    return {row[0].strip("| "): row[1:] for row in rows if len(row) == 3}


TABLE = read_table()


def cell_of(client: Client, beginning: str) -> str:
    engine = client.models().models[0].engine
    (cells,) = (cells for name, cells in TABLE.items() if name.startswith(beginning))
    return cells[("vllm", "transformer_lens").index(engine)]


def find_code(client: Client, **options: Any) -> str | None:
    """The code of the error that a request gives; None where it is answered."""
    try:
        client.logprob(ITEMS, model="demo", **options)
    except APIError as error:
        return error.code
    return None


@pytest.mark.parametrize("client", REAL, indirect=True)
def test_features_are_those_of_the_table(client: Client) -> None:
    for feature in ("override", "adapter"):
        code = find_code(client, **{feature: NOBODY[feature]})
        # Both shared servers are without adapter_slots.
        has = cell_of(client, f"`{feature}`").startswith("yes")
        assert code == (f"unknown_{feature}" if has else "unsupported_by_engine"), feature
    for feature, options in (
        ("`steering`", {"steering": {"vectors": [DATA]}}),
        ("`probes`", {"probes": [DATA]}),
        ("`probes`", {"steering": {"vectors": [DATA | {"when": {"probe": DATA, "above": 0.0}}]}}),
    ):
        assert (find_code(client, **options) is None) == cell_of(client, feature).startswith("yes")
    try:
        client.gradient(ITEMS, wrt={"layers": [1]}, model="demo")
        has_gradients = True
    except APIError as error:
        assert error.code == "unsupported_by_engine"
        has_gradients = False
    assert has_gradients == (cell_of(client, "`gradient`") == "yes")


@pytest.mark.parametrize("client", REAL, indirect=True)
def test_hooks_are_those_of_the_table(client: Client) -> None:
    cell = cell_of(client, "hooks")
    for hook in SHORT_NAMES:
        code = find_code(client, steering={"vectors": [DATA | {"hook": hook}]})
        assert (code is None) == (f"`{hook}`" in cell), (hook, code)
        is_renamed = hook == "resid_pre" and "in steering also" in cell
        probed = "unsupported_by_engine" if is_renamed else code
        assert find_code(client, probes=[DATA | {"hook": hook}]) == probed
    bridge = find_code(client, steering={"vectors": [DATA | {"hook": "ln1.hook_out"}]})
    assert (bridge is None) == ("every hook of the bridge" in cell)


@pytest.mark.parametrize("client", REAL, indirect=True)
def test_prefixes_are_shared_as_the_table_says(client: Client) -> None:
    context = " ".join(f"A story of dog number {n} and its hat." for n in range(20))
    targets = [" It was red and", " It was blue and", " It was green and"]
    answer = client.logprob([{"context": context, "targets": targets}], model="demo")
    assert (answer.usage.cached_tokens > 0) == (cell_of(client, "a prefix") == "yes")

"""Data sets by name: repositories, configurations, splits and directories; and as one text."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from logsteer import Client
from logsteer.cli import main
from logsteer.errors import InvalidRequestError
from logsteer.extras.datasets import JoinedRows, load_rows, name_source, read_prompts
from logsteer.schemas import PerplexityAnswer
from tests.conftest import Server

pytestmark = pytest.mark.filterwarnings("ignore")

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: socratic
  data_files:
  - {split: test, path: other/test.jsonl}
---
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set with two configurations, as they lie on the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    found = tmp_path / "sums"
    for place, split in (("main", "train"), ("main", "test"), ("other", "test")):
        (found / place).mkdir(parents=True, exist_ok=True)
        rows = [{"question": f"{place} {split} {n}?", "answer": n} for n in range(3)]
        path = found / place / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found / "README.md").write_text(CARD)
    return found


def questions(name: str) -> list[str]:
    return [row.prompt for row in read_prompts(name, field="question")]


def test_a_directory_has_configurations_and_splits(directory: Path) -> None:
    assert questions(f"hf:{directory}/main") == [f"main train {n}?" for n in range(3)]
    assert questions(f"hf:{directory}/main@test") == [f"main test {n}?" for n in range(3)]
    assert questions(f"hf:{directory}/main@test[:1]") == ["main test 0?"]
    # `socratic` is no directory of it; `other` is one, and no configuration.
    assert questions(f"hf:{directory}/socratic@test") == [f"other test {n}?" for n in range(3)]
    assert questions(f"hf:{directory}/other@test") == [f"other test {n}?" for n in range(3)]
    plain = directory / "plain"
    plain.mkdir()
    datasets.Dataset.from_list([{"question": "Why?"}]).to_parquet(plain / "test.parquet")
    assert questions(f"hf:{plain}@test") == ["Why?"]


def test_what_a_directory_lacks_is_told_with_what_it_has(directory: Path) -> None:
    for name, told in (
        (f"{directory}@test", "main.*socratic.*NAME/CONFIG"),
        (f"{directory}/none@test", "'none'.*main.*socratic"),
        (f"{directory}/main@none", "'?\"?none.*train.*test"),
        (f"{directory}/no/such/place", "no directory"),
    ):
        with pytest.raises(InvalidRequestError, match=f"(?s){told}"):
            read_prompts(f"hf:{name}", field="question")


@pytest.mark.parametrize(
    ("name", "there", "asked"),
    [
        ("imdb", ("imdb", None), [("imdb", None, "train")]),
        ("openai/gsm8k", ("openai/gsm8k", None), [("openai/gsm8k", None, "train")]),
        ("openai/gsm8k@test", ("openai/gsm8k", None), [("openai/gsm8k", None, "test")]),
        ("openai/gsm8k/main", ("openai/gsm8k", "main"), [("openai/gsm8k", "main", "train")]),
        ("gsm8k/main@test", ("gsm8k", "main"),
         [("gsm8k/main", None, "test"), ("gsm8k", "main", "test")]),
    ],
)  # fmt: skip
def test_names_of_the_hub_are_repository_configuration_and_split(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    there: tuple[str, str | None],
    asked: list[tuple[str, str | None, str]],
) -> None:
    seen = []

    def load(path: str, config: str | None, split: str) -> list[dict[str, Any]]:
        seen.append((path, config, split))
        if (path, config) != there:
            raise datasets.exceptions.DatasetNotFoundError(f"no {path}")
        return [{"prompt": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert [row.prompt for row in read_prompts(f"hf:{name}")] == ["a"]
    assert seen == asked
    there = ("elsewhere", None)
    with pytest.raises(InvalidRequestError, match=r"no data set .* was found"):
        read_prompts(f"hf:{name}")
    with pytest.raises(InvalidRequestError, match="OWNER/NAME/CONFIG"):
        load_rows("a/b/c/d")


def test_rows_are_one_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    texts = ["One é", "", "Two " * 40_000, "Three"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    rows = JoinedRows(name_source(str(path)), "text")
    whole = "\n\n".join(texts).encode()
    assert b"".join(rows) == b"".join(rows) == whole
    assert b"".join(JoinedRows(path, "text", " | ")).startswith("One é |  | Two".encode())
    once = JoinedRows(iter(["a"]), "text")
    assert list(once) == [b"a"]
    with pytest.raises(InvalidRequestError, match="cannot be read again"):
        list(once)
    with pytest.raises(InvalidRequestError, match="row 0 has no text under 'body', only text"):
        list(JoinedRows(path, "body"))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("imdb", "hf:imdb@test"),
        ("hf:imdb", "hf:imdb@test"),
        ("imdb@train", "hf:imdb@train"),
        ("hf:imdb@test[:5]", "hf:imdb@test[:5]"),
        ("./with@sign/imdb", "hf:./with@sign/imdb@test"),
        ("rows.jsonl", "rows.jsonl"),
        ("jsonl:rows", "jsonl:rows"),
    ],
)
def test_a_name_stands_for_its_test_split(name: str, source: str) -> None:
    assert name_source(name) == source


def test_lines_that_are_texts(tmp_path: Path) -> None:
    """A string stands for an object with that text, whatever the field is called."""
    path = tmp_path / "rows.jsonl"
    path.write_text('"one"\r\n{"question": "two"}')
    assert questions(str(path)) == ["one", "two"]
    assert b"".join(JoinedRows(path, "question")) == b"one\n\ntwo"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("5", "row 1 is 5, neither a text nor an object"),
        ("[1]", r"row 1 is \[1\], neither"),
        ("null", "row 1 is None, neither"),
        ('{"text": null}', "row 1 has None under 'text', no text"),
        ('{"body": "x"}', "row 1 has no text under 'text', only body; name a column"),
        ('{"text": "\\ud800"}', "row 1 has a lone surrogate"),
        ("{", "line 3: no JSON: .* at column 2; write "),
        ("[" * 100_000, "line 3: no JSON: nested too deeply"),
        ("\xff", "line 3: no JSON: .*utf-8"),
    ],
)
def test_rows_that_no_text_is_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(InvalidRequestError, match=told):
        list(JoinedRows(path, "text"))
    if "surrogate" not in told:
        with pytest.raises(InvalidRequestError, match=told.replace("column; ", "field")[:30]):
            read_prompts(path, "text")


def test_the_command_scores_a_data_set(
    directory: Path, fake_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same numbers as the joined text itself, and what cut it."""
    here = ["perplexity", "--base-url", fake_server.url, "--dataset"]
    own = [*here, f"{directory}/main"]
    windows = ["--protocol", "exl3", "--context-length", "8", "--rows", "2"]
    assert main([*own, "--column", "question", "--json", *windows]) == 0
    found = PerplexityAnswer.model_validate_json(capsys.readouterr().out)
    text = "\n\n".join(f"main test {n}?" for n in range(3))
    with Client(fake_server.url) as client:
        wanted = client.perplexity(text, protocol="exl3", context_length=8, rows=2)
    assert found.total.model_dump() == wanted.total.model_dump()
    assert (found.provenance.context_length, found.provenance.rows) == (8, 2)
    assert main([*here, f"{directory}/main@train", "--column", "question", *windows]) == 0
    assert "exl3, windows of 8 tokens, stride 8, at most 2" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main([*own, "--column", "none"]) == 1
    assert "only question, answer" in capsys.readouterr().err
    assert main(["perplexity", str(directory / "README.md"), "--join", "a"]) == 1
    assert "--join goes with --dataset" in capsys.readouterr().err

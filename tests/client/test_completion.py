"""`logsteer completion`: what a shell offers, and that each script parses where its shell is."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from logsteer.cli import main
from logsteer.cli.command import _build_parser
from logsteer.cli.completion import SHELLS, write_completion

PARSER = _build_parser()


def complete(line: str, directory: Path) -> set[str]:
    """What bash offers at the end of a line."""
    words = line.split(" ")
    array = " ".join(f"'{word}'" for word in words)
    script = write_completion(PARSER, "bash") + (
        f"\nCOMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _shtab_logsteer; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, check=True, cwd=directory
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("logsteer ve", {"vectors"}),
        ("logsteer score a b --space ", {"as_given", "both"}),
        ("logsteer score a --pre", {"--precision"}),
        ("logsteer --model demo perplexity --proto", {"--protocol"}),
        ("logsteer perplexity --protocol exl", {"exl3"}),
        ("logsteer perplexity bo", {"book.txt"}),
        ("logsteer vectors tr", {"train"}),
        ("logsteer vectors train mood pa", {"pairs.jsonl"}),
        ("logsteer vectors train mood pairs.jsonl --method l", {"logistic", "lda"}),
        ("logsteer models --format ", {"table", "json", "jsonl", "csv", "parquet"}),
        ("logsteer perplexity --plot pa", {"pairs.jsonl"}),
        ("logsteer score --top ", set()),
        ("logsteer completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_bash_offers(tmp_path: Path, line: str, offered: set[str]) -> None:
    (tmp_path / "book.txt").touch()
    (tmp_path / "pairs.jsonl").touch()
    assert complete(line, tmp_path) == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_a_script_that_parses(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for word in ("vectors", "import-sae", "activation-scale", "truncate_left"):
        assert word in text
    if shutil.which(shell) is None:
        pytest.skip(f"SKIPPED BECAUSE {shell} IS ABSENT: its script was written, but not parsed")
    path = tmp_path / "script"
    path.write_text(text)
    flag = "--no-execute" if shell == "fish" else "-n"
    subprocess.run([shell, flag, str(path)], check=True)


def test_without_shtab_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert 'pip install "logsteer[cli]"' in capsys.readouterr().err

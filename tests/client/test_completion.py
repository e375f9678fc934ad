"""`logsteer completion`: what a shell offers, and that each script parses where its shell is."""

import argparse
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from logsteer.cli import main
from logsteer.cli.command import _build_parser
from logsteer.cli.completion import SHELLS, write_completion

PARSER = _build_parser()


def list_commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from list_commands(command, (*words, name))


COMMANDS = dict(list_commands(PARSER))


def complete(line: str, directory: Path) -> set[str]:
    """What bash offers at the end of a line."""
    words = line.split(" ")
    array = " ".join(f"'{word}'" for word in words)
    script = write_completion(PARSER, "bash") + (
        f"\nCOMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _logsteer; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-u", "-c", script],
        capture_output=True, text=True, check=True, cwd=directory,
    )  # fmt: skip
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
        ("logsteer --base-url vectors sweep --sca", {"--scales"}),
        ("logsteer models --format ", {"table", "json", "jsonl", "csv", "parquet"}),
        ("logsteer score --plot pa", {"pairs.jsonl"}),
        ("logsteer score --top ", set()),
        ("logsteer completion ", {"bash", "zsh", "fish", "-h", "--help"}),
    ],
)
def test_bash_offers(tmp_path: Path, line: str, offered: set[str]) -> None:
    (tmp_path / "book.txt").touch()
    (tmp_path / "pairs.jsonl").touch()
    found = complete(line, tmp_path)
    if line.endswith("completion "):
        offered |= {"--base-url", "--api-key", "--model", "--timeout", "--json"}
    assert found == offered


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_bash_offers_every_option_and_command(tmp_path: Path, words: tuple[str, ...]) -> None:
    line = " ".join(("logsteer", *words))
    flags = {flag for action in COMMANDS[words]._actions for flag in action.option_strings}
    assert complete(f"{line} -", tmp_path) == flags
    below = {path[-1] for path in COMMANDS if path[:-1] == words and path}
    assert below <= complete(f"{line} ", tmp_path)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_a_script_that_parses(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for words in COMMANDS:
        assert not words or words[-1] in text
    if shutil.which(shell) is None:
        pytest.skip(f"SKIPPED BECAUSE {shell} IS ABSENT: its script was written, but not parsed")
    path = tmp_path / "script"
    path.write_text(text)
    flag = "--no-execute" if shell == "fish" else "-n"
    subprocess.run([shell, flag, str(path)], check=True)


def test_zsh_and_fish_have_every_option() -> None:
    zsh, fish = write_completion(PARSER, "zsh"), write_completion(PARSER, "fish")
    for parser in COMMANDS.values():
        for action in parser._actions:
            for flag in action.option_strings:
                assert f"'*{flag}[" in zsh
                assert (f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}") in fish

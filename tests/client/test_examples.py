"""The examples in the commands' help, which the parser takes; and the notebook as it is kept."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from logsteer.cli.command import build_parser

PARSER = build_parser()


def list_commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from list_commands(command, (*words, name))


COMMANDS = dict(list_commands(PARSER))

EXAMPLES = {
    " ".join(words): [
        line.strip()
        for line in (parser.epilog or "").partition("examples:")[2].split("\n\n")[0].splitlines()
        if line.strip()
    ]
    for words, parser in COMMANDS.items()
}
"""Command -> the lines of its examples."""


@pytest.mark.parametrize("command", EXAMPLES)
def test_every_command_has_one_to_three_examples(command: str) -> None:
    lines = EXAMPLES[command]
    assert 1 <= len(lines) <= (3 if command else 6)
    assert all(len(line) <= 98 for line in lines)
    own = f"logsteer {command}".strip()
    assert any(own in line for line in lines)


def test_the_notebook_is_kept_without_outputs() -> None:
    path = Path(__file__).resolve().parents[2] / "docs" / "tour.ipynb"
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 10
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}

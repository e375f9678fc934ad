"""The examples in the help of commands, which the parser takes; and notebooks as they are kept."""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from logsteer.cli.command import build_parser

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.ipynb"))

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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_with_their_outputs_and_nothing_of_a_machine(path: Path) -> None:
    text = path.read_text()
    notebook = json.loads(text)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] == n for n, cell in enumerate(cells, 1))
    assert sum(bool(cell["outputs"]) for cell in cells) >= 3
    assert not [o for cell in cells for o in cell["outputs"] if o["output_type"] == "error"]
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}
    assert not re.search(r"/(work|home|tmp|root|Users)/", text)

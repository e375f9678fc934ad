"""`logsteer completion SHELL`: what makes a shell complete the command, read from its parsers."""

import argparse

from logsteer.cli.terminal import add_examples
from logsteer.client import Client
from logsteer.errors import LogsteerError

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = """
  source <(logsteer completion bash)
  logsteer completion zsh > _logsteer        # in a directory of $fpath
  logsteer completion fish > logsteer.fish   # for ~/.config/fish/completions
"""
_FILES = {"FILE", "PATH", "DIRECTORY", "IN", "OUT"}
"""What stands for a file among the values of a command."""


def add_completion(parser: argparse.ArgumentParser, root: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer completion`, which tells of all that `root` has."""
    add_examples(parser, EXAMPLES)
    parser.add_argument("shell", choices=SHELLS)

    def write(_: Client, arguments: argparse.Namespace) -> None:
        print(write_completion(root, arguments.shell), end="")

    parser.set_defaults(command=write)


def write_completion(root: argparse.ArgumentParser, shell: str) -> str:
    """Return the script that a shell reads to complete the command of this parser.

    Raises LogsteerError that says what to install where shtab is missing.
    """
    try:
        import shtab
    except ImportError as error:
        raise LogsteerError('completion needs shtab: pip install "logsteer[cli]"') from error
    _mark_files(root, shtab.FILE)
    script: str = shtab.complete(root, shell)
    return script


def _mark_files(parser: argparse.ArgumentParser, mark: object) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _mark_files(command, mark)
        elif action.metavar in _FILES:
            action.complete = mark  # type: ignore[attr-defined]

"""`logsteer completion SHELL`: what makes a shell complete the command, read from its parsers."""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from logsteer.cli.terminal import add_examples
from logsteer.client import Client

Shell = Literal["bash", "zsh", "fish"]
SHELLS: tuple[Shell, ...] = ("bash", "zsh", "fish")
EXAMPLES = """
  source <(logsteer completion bash)
  logsteer completion zsh > _logsteer        # in a directory of $fpath
  logsteer completion fish > logsteer.fish   # for ~/.config/fish/completions
"""
_FILES = {"FILE", "PATH", "DIRECTORY"}
"""What stands for a file among the values of a command."""


@dataclass(frozen=True)
class _Option:
    """An option: its flags, its help, and what its value is; `takes` None: it has no value."""

    flags: Sequence[str]
    help: str
    takes: str | None
    choices: Sequence[str] = ()

    @property
    def is_file(self) -> bool:
        return self.takes in _FILES


@dataclass(frozen=True)
class _Node:
    """A command: the words that lead to it, its options, its commands, and its last argument."""

    words: tuple[str, ...]
    options: Sequence[_Option]
    commands: dict[str, str]
    choices: Sequence[str]
    takes_file: bool


def add_completion(parser: argparse.ArgumentParser, root: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer completion`, which tells of all that `root` has."""
    add_examples(parser, EXAMPLES)
    parser.add_argument("shell", choices=SHELLS)

    def write(_: Client, arguments: argparse.Namespace) -> None:
        print(write_completion(root, arguments.shell), end="")

    parser.set_defaults(command=write)


def write_completion(root: argparse.ArgumentParser, shell: Shell) -> str:
    """Return the script that a shell reads to complete the command of this parser."""
    nodes = list(_walk(root, ()))
    return {"bash": _write_bash, "zsh": _write_zsh, "fish": _write_fish}[shell](nodes)


def _walk(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> Iterator[_Node]:
    options, choices, file = [], [], False
    commands: dict[str, argparse.ArgumentParser] = {}
    told: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands = dict(action.choices)
            told = {one.dest: one.help or "" for one in action._choices_actions}
        elif action.option_strings:
            options.append(_read_option(action))
        else:
            choices += [str(one) for one in action.choices or ()]
            file = file or action.metavar in _FILES
    yield _Node(words, options, told, choices, file)
    for name, command in commands.items():
        yield from _walk(command, (*words, name))


def _read_option(action: argparse.Action) -> _Option:
    metavar = action.metavar[0] if isinstance(action.metavar, tuple) else action.metavar
    takes = None if action.nargs == 0 else str(metavar or action.dest.upper())
    choices = [str(one) for one in action.choices or ()]
    text = "" if action.help in (None, argparse.SUPPRESS) else str(action.help)
    return _Option(action.option_strings, text.replace("%%", "%"), takes, choices)


# ------------------------------------------------------------------ bash

_BASH = """\
# Completion of logsteer in bash: source <(logsteer completion bash)
_logsteer() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}}
  local path= word words= skip= file= i
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=${{COMP_WORDS[i]}}
    if [[ $skip ]]; then skip=; continue; fi
    case "$path $word" in
{values}
        skip=1 ;;
{steps}
    esac
  done
  case "$path $previous" in
{choices}
  esac
  case "$path" in
{words}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  if [[ $file && $current != -* ]]; then COMPREPLY+=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F _logsteer logsteer
"""


def _write_bash(nodes: Sequence[_Node]) -> str:
    values, steps, choices, words = [], [], [], []
    for node in nodes:
        path = " ".join(("", *node.words)).strip()
        for option in node.options:
            if option.takes is None:
                continue
            patterns = "|".join(f'"{path} {flag}"' for flag in option.flags)
            values.append(patterns)
            if option.choices:
                listed = " ".join(option.choices)
                choices.append(
                    f'    {patterns}) COMPREPLY=($(compgen -W "{listed}" -- "$current")); return ;;'
                )
            elif option.is_file:
                choices.append(
                    f'    {patterns}) COMPREPLY=($(compgen -f -- "$current")); return ;;'
                )
            else:
                choices.append(f"    {patterns}) COMPREPLY=(); return ;;")
        for name in node.commands:
            after = f"{path} {name}".strip()
            steps.append(f'      "{path} {name}") path="{after}" ;;')
        flags = [flag for option in node.options for flag in option.flags]
        listed = " ".join([*node.commands, *node.choices, *flags])
        file = " file=1" if node.takes_file else ""
        words.append(f'    "{path}") words="{listed}"{file} ;;')
    return _BASH.format(
        values="      " + " | \\\n      ".join(values) + ")",
        steps="\n".join(steps),
        choices="\n".join(choices),
        words="\n".join(words),
    )


# ------------------------------------------------------------------ zsh


def _write_zsh(nodes: Sequence[_Node]) -> str:
    parts = ["#compdef logsteer\n# Completion of logsteer in zsh, for a directory of $fpath.\n"]
    parts += [_write_zsh_command(node) for node in nodes]
    return "\n".join([*parts, '_logsteer "$@"\n'])


def _write_zsh_command(node: _Node) -> str:
    specs = []
    for option in node.options:
        for flag in option.flags:
            value = ""
            if option.takes is not None:
                action = "_files" if option.is_file else f"({' '.join(option.choices)})"
                value = f":{_quote_zsh(option.takes)}:{action if action != '()' else ' '}"
            specs.append(f"'*{flag}[{_quote_zsh(_shorten(option.help))}]{value}'")
    if node.commands:
        specs += ["'1: :->command'", "'*:: :->rest'"]
    elif node.choices:
        specs.append(f"'*: :({' '.join(node.choices)})'")
    else:
        specs.append("'*: :_files'" if node.takes_file else "'*: : '")
    name = "_".join(("_logsteer", *node.words)).replace("-", "_")
    lines = " \\\n    ".join(specs)
    if not node.commands:
        return f"{name}() {{\n  _arguments \\\n    {lines}\n}}\n"
    listed = " ".join(f"'{word}:{_quote_zsh(text)}'" for word, text in node.commands.items())
    cases = "\n".join(
        f"        {word}) {name}_{word.replace('-', '_')} ;;" for word in node.commands
    )
    return (
        f"{name}() {{\n  local curcontext=$curcontext state line\n  _arguments -C \\\n    {lines}\n"
        f"  case $state in\n    command)\n      local -a commands=({listed})\n"
        f"      _describe command commands ;;\n    rest)\n      case $line[1] in\n{cases}\n"
        "      esac ;;\n  esac\n}\n"
    )


def _quote_zsh(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text).replace("'", "'\\''")


def _shorten(text: str) -> str:
    return " ".join(text.split())[:80]


# ------------------------------------------------------------------ fish


def _write_fish(nodes: Sequence[_Node]) -> str:
    lines = ["# Completion of logsteer in fish, for ~/.config/fish/completions/logsteer.fish",
             "complete -c logsteer -f"]  # fmt: skip
    for node in nodes:
        seen = [f"__fish_seen_subcommand_from {word}" for word in node.words]
        if node.commands:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(node.commands)}")
        where = f" -n {_quote_fish('; and '.join(seen))}" if seen else ""
        for name, text in node.commands.items():
            lines.append(f"complete -c logsteer{where} -a {name} -d {_quote_fish(text)}")
        if node.choices:
            lines.append(f"complete -c logsteer{where} -a {_quote_fish(' '.join(node.choices))}")
        if node.takes_file:
            lines.append(f"complete -c logsteer{where} -F")
        lines += [f"complete -c logsteer{where}{_write_fish_option(one)}" for one in node.options]
    return "\n".join(lines) + "\n"


def _write_fish_option(option: _Option) -> str:
    flags = "".join(
        f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}" for flag in option.flags
    )
    told = f" -d {_quote_fish(_shorten(option.help))}"
    if option.takes is None:
        return flags + told
    if option.choices:
        return f"{flags} -x -a {_quote_fish(' '.join(option.choices))}{told}"
    return f"{flags} {'-r -F' if option.is_file else '-x'}{told}"


def _quote_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

"""How the commands of client and server tell wrong usage."""

import argparse
import difflib
import re
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that tells wrong usage in two lines: what is wrong, and what may have been meant.

    A value such as -4,4 is not an option.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-\.?\d.*")
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words of one command, and leave none unread."""
        self._words = list(args or [])
        found, unread = super().parse_known_args(args, namespace)
        if unread:
            self.error(f"unknown: {' '.join(unread)}")
        return found, unread

    def error(self, message: str) -> NoReturn:
        """Tell what is wrong, and what comes nearest to a word that is not known; exit with 2."""
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        options = list(self._option_string_actions)
        flags = [word.partition("=")[0] for word in self._words if word.startswith("--")]
        known_by = str.startswith if self.allow_abbrev else str.__eq__
        wrong = next((f for f in flags if not any(known_by(o, f) for o in options)), "")
        known = re.findall(r"[^\s',]+", choice[2]) if choice else options
        near = difflib.get_close_matches(choice[1] if choice else wrong, known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        self.exit(2, f"error: {message}\n{hint}See {self.prog} --help\n")

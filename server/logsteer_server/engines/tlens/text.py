"""The text of a growing continuation, and where a stop string ends it."""

from collections.abc import Sequence
from typing import Any

CONTEXT_TOKENS = 8
"""Tokens of the prompt that are decoded with the first new ones, for the spaces between them."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4
"""Bytes of a character, and so the tokens that one may take; more that give none are no text."""


class GrowingText:
    """Text that grows by tokens; what comes out of it never has to be taken back.

    A token's text depends on the one before it (a leading space) and may be part of a character.
    So each new piece is what decoding adds to tokens whose text is already out, and it waits until
    its last character is whole. Special tokens are left out.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str], include_stop: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._begin = 0
        self._done = len(self._ids)
        self._stop = stop
        self._include_stop = include_stop
        # A stop string may begin in one token and end in a later one.
        self._held = max(map(len, stop), default=1) - 1
        self._text = ""
        self._out = 0

    def add(self, token: int) -> bool:
        """Take a token in, and return whether a stop string ends the text here."""
        self._ids.append(token)
        before = self._decode(self._ids[self._begin : self._done])
        text = self._decode(self._ids[self._begin :])
        waits = len(text) <= len(before) or text.endswith(INCOMPLETE)
        if waits and len(self._ids) - self._done <= LONGEST_CHARACTER:
            return False
        self._begin, self._done = self._done, len(self._ids)
        return self._extend(text[len(before) :])

    def end(self) -> bool:
        """Take in what is left of a character that no token completed, and return as `add` does."""
        before = self._decode(self._ids[self._begin : self._done])
        text = self._decode(self._ids[self._begin :])
        self._begin = self._done = len(self._ids)
        return self._extend(text[len(before) :])

    def _extend(self, piece: str) -> bool:
        searched = max(0, len(self._text) - self._held)
        self._text += piece
        found = [
            (at, at + len(stop) if self._include_stop else at)
            for stop in self._stop
            if (at := self._text.find(stop, searched)) >= 0
        ]
        if found:
            _, end = min(found)
            self._text = self._text[:end]
        return bool(found)

    def take(self, is_last: bool) -> str:
        """Return the text that is new and certain; all that is left where it is the last."""
        end = len(self._text) if is_last else max(self._out, len(self._text) - self._held)
        piece = self._text[self._out : end]
        self._out = end
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

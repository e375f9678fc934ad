"""Tokens of a text that arrives in pieces, the same as those of the whole, in bounded memory.

The text that waits is encoded again together with some text before it that is done already, so
the tokens at the seam are formed as in the whole text. Tokens near the end of what has arrived
wait, because what follows may still change them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from logsteer_server.text.sums import Counts, count_text
from logsteer_server.text.tokenizer import EncodedText, TextCodec


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """Tokens in the order of the text, and what text each covers."""

    ids: list[int]
    counts: Counts

    def split(self, length: int) -> Iterator["EncodedPiece"]:
        """Yield the piece in pieces of so many tokens, the last maybe shorter."""
        for start in range(0, len(self.ids), length):
            own = slice(start, start + length)
            yield EncodedPiece(self.ids[own], self.counts[own])


class IncrementalEncoder:
    """Encodes one text. `seams_moved` counts the seams at which no token began.

    `chunk_chars` is the text encoded at once, `margin_chars` what waits at the end and what is
    encoded again at the start.
    """

    def __init__(
        self, codec: TextCodec, chunk_chars: int = 65_536, margin_chars: int = 1_024
    ) -> None:
        self.seams_moved = 0
        self._codec = codec
        self._chunk_chars = chunk_chars
        self._margin_chars = margin_chars
        self._text = ""
        self._done = 0

    def feed(self, text: str) -> EncodedPiece:
        """Return the tokens that are certain after this piece of text; often none."""
        self._text += text
        if len(self._text) - self._done < self._chunk_chars + self._margin_chars:
            return EncodedPiece([], count_text("", []))
        return self._release(len(self._text) - self._margin_chars)

    def finish(self) -> EncodedPiece:
        """Return the tokens that are left when the text has ended."""
        return self._release(len(self._text))

    def _release(self, limit: int) -> EncodedPiece:
        encoded = self._encode_open()
        starts = [start for start, _ in encoded.offsets]
        final = limit == len(self._text)
        seam = limit if final else self._find_seam(starts, limit)
        taken = [i for i, s in enumerate(starts) if s >= self._done and (final or s < seam)]
        before = self._text[self._done - 1] if self._done else ""
        piece = self._text[self._done : seam]
        offsets = [(a - self._done, b - self._done) for a, b in (encoded.offsets[i] for i in taken)]
        result = EncodedPiece([encoded.ids[i] for i in taken], count_text(piece, offsets, before))
        keep = self._find_seam(starts, max(0, seam - self._margin_chars))
        self._text, self._done = self._text[keep:], seam - keep
        return result

    def _encode_open(self) -> EncodedText:
        """Encode the text at hand so that a token begins where the last released one ended."""
        encoded = self._codec.encode([self._text])[0]
        if self._done and all(start != self._done for start, _ in encoded.offsets):
            if self._done == len(self._text):
                return encoded
            self.seams_moved += 1
            self._text, self._done = self._text[self._done :], 0
            return self._codec.encode([self._text])[0]
        return encoded

    def _find_seam(self, starts: list[int], limit: int) -> int:
        """Return the last token start up to `limit` that begins a word, or else the last one."""
        candidates = [start for start in starts if start <= limit]
        for start in reversed(candidates):
            if start and self._text[start].isspace() and not self._text[start - 1].isspace():
                return start
        return candidates[-1] if candidates else 0

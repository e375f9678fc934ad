"""Encode a text that arrives in pieces to the tokens of the whole, in bounded memory.

Pending text is encoded together with some text before it, so that the tokens at the seam are the
same as in the whole text. Tokens near the end of the received text stay pending, because later text
may change them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from logsteer_server.text.sums import Counts, count_text
from logsteer_server.text.tokenizer import EncodedText, TextCodec


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """Tokens in the order of the text, and the counts of the text that each covers."""

    ids: list[int]
    counts: Counts

    def split(self, length: int) -> Iterator["EncodedPiece"]:
        """Yield pieces of `length` tokens; the last may be shorter."""
        for start in range(0, len(self.ids), length):
            own = slice(start, start + length)
            yield EncodedPiece(self.ids[own], self.counts[own])


class IncrementalEncoder:
    """Encode one text. `seams_moved`: number of seams at which no token began.

    `chunk_chars`: characters encoded at once. `margin_chars`: characters that stay pending at the
    end, and that are encoded again at the start.
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
        """Add a piece of text; return the tokens that are final, often no tokens."""
        self._text += text
        if len(self._text) - self._done < self._chunk_chars + self._margin_chars:
            return EncodedPiece([], count_text("", []))
        return self._release(len(self._text) - self._margin_chars)

    def finish(self) -> EncodedPiece:
        """End the text; return the remaining tokens."""
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
        """Encode the pending text so that a token begins where the last released one ended."""
        encoded = self._codec.encode([self._text])[0]
        if self._done and all(start != self._done for start, _ in encoded.offsets):
            if self._done == len(self._text):
                return encoded
            self.seams_moved += 1
            self._text, self._done = self._text[self._done :], 0
            return self._codec.encode([self._text])[0]
        return encoded

    def _find_seam(self, starts: list[int], limit: int) -> int:
        """Return the last token start up to `limit` that begins a word, else the last one."""
        candidates = [start for start in starts if start <= limit]
        for start in reversed(candidates):
            if start and self._text[start].isspace() and not self._text[start - 1].isspace():
                return start
        return candidates[-1] if candidates else 0

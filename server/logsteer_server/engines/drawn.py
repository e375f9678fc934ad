"""What both engines keep of a prompt's continuation: its tokens, their values, and their text.

Axis letters: N tokens, W values of a token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from logsteer_server.contract.jobs import (
    ALTERNATIVES,
    TOP_IDS,
    TOP_LOGPROBS,
    GenerateJob,
    GenerateOutput,
)
from logsteer_server.numerics.drawing import spec_of_draw
from logsteer_server.numerics.rows import RowSpec, unpack

CONTEXT_TOKENS = 8
"""Tokens of the prompt that are decoded with the first new ones, for the spaces between them."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4
"""Bytes of a character, and so the tokens that one may take; more that give none are no text."""


class GrowingText:
    """Text that grows by tokens; what comes out of it never has to be taken back.

    A token's text depends on the one before it (a leading space) and may be part of a character.
    So each new piece is what decoding adds to tokens whose text is already out, and it waits until
    its last character is whole. Special tokens are left out with `skip_special`.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stop: Sequence[str],
        include_stop: bool,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._begin = 0
        self._done = len(self._ids)
        self._stop = stop
        self._include_stop = include_stop
        self._skip_special = skip_special
        # A stop string may begin in one token and end in a later one.
        self._held = max(map(len, stop), default=1) - 1
        self._text = ""
        self._out = 0

    def add(self, token: int, may_end: bool = True) -> bool:
        """Take a token in, and return whether a stop string ends the text here, if it may."""
        self._ids.append(token)
        piece = self._decode_piece()
        waits = not piece or piece.endswith(INCOMPLETE)
        if waits and len(self._ids) - self._done <= LONGEST_CHARACTER:
            return False
        if piece:
            self._begin = self._done
        self._done = len(self._ids)
        return self._extend(piece, may_end)

    def add_all(self, tokens: Sequence[int]) -> None:
        """Take in all tokens of a text without stop strings.

        They are decoded at once, unless bytes are no character, whose text depends on the steps.
        """
        whole = self._decode([*self._ids, *tokens])
        if INCOMPLETE in whole:
            for token in tokens:
                self.add(token)
        else:
            self._text = whole[len(self._decode(self._ids)) :]
            self._ids += tokens
            self._begin = self._done = len(self._ids)

    def end(self) -> bool:
        """Take in what is left of a character that no token completed, and return as `add` does."""
        piece = self._decode_piece()
        self._begin = self._done = len(self._ids)
        return self._extend(piece, may_end=True)

    def _decode_piece(self) -> str:
        """Return what the tokens add whose text is not out to the text before them."""
        before = self._decode(self._ids[self._begin : self._done])
        return self._decode(self._ids[self._begin :])[len(before) :]

    def _extend(self, piece: str, may_end: bool) -> bool:
        searched = max(0, len(self._text) - self._held)
        self._text += piece
        found = [
            (at, at + len(stop) if self._include_stop else at)
            for stop in self._stop
            if may_end and (at := self._text.find(stop, searched)) >= 0
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
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special))


class DrawnValues:
    """Hold the values of tokens that no output has had yet; `spec` says what they are.

    They are in one buffer: an array for each token would break up the memory that an engine's cache
    leaves and takes at each step, and none of it could be used again.
    """

    def __init__(self, spec: RowSpec) -> None:
        self._spec, self._width = spec, spec.width
        self._dtype = np.float64 if spec.double else np.float32
        self._buffer = bytearray()

    def add(self, values_NW: np.ndarray) -> None:
        """Take in the values of the next N tokens; others may follow them in a row."""
        self._buffer += values_NW[:, : self._width].astype(self._dtype).tobytes()

    def take(self) -> dict[str, Any]:
        """Return those of all tokens, as fields of a `GenerateOutput`.

        All of them have no entries where the job asks for no log-probabilities.
        """
        values_NW = np.frombuffer(self._buffer, self._dtype).reshape(-1, max(1, self._width))
        self._buffer = bytearray()
        columns, none_N0 = unpack(values_NW, self._spec), values_NW[:, :0]
        if listed := self._spec.listed:
            columns[TOP_IDS] = np.array([listed], np.int32).repeat(len(values_NW), axis=0)
            columns[TOP_LOGPROBS] = columns.pop(ALTERNATIVES)
        return {
            "logprobs": columns.pop("logprob", none_N0.ravel()),
            "top_ids": columns.pop(TOP_IDS, none_N0.astype(np.int32)),
            "top_logprobs": columns.pop(TOP_LOGPROBS, none_N0),
            "columns": columns,
        }


class DrawnTokens:
    """The tokens drawn for a job, until an output takes them.

    Their text is decoded as they come only where somebody waits for it: a stream or a stop string.
    """

    def __init__(self, job: GenerateJob, eos_ids: tuple[int, ...], tokenizer: Any) -> None:
        self._job = job
        self._end_ids = job.stop_ids if job.ignore_eos else (*job.stop_ids, *eos_ids)
        self._hidden_ids = () if job.include_stop else self._end_ids
        self._grows = job.stream or bool(job.stop)
        prompt = job.tokens[-CONTEXT_TOKENS:].tolist()
        self._text = GrowingText(tokenizer, prompt, job.stop, job.include_stop, job.skip_special)
        self.spec = spec_of_draw(job, eos_ids)
        self._values = DrawnValues(self.spec)
        self._ids: list[int] = []
        self.num_tokens = 0

    def add(self, token: int, values_1W: np.ndarray | None) -> str | None:
        """Take a token in, with what was read with it.

        Returns why the continuation ends with it: `stop` or `length`; None where it does not.
        """
        self.num_tokens += 1
        self._ids.append(token)
        if values_1W is not None:
            self._values.add(values_1W)
        may_end = self.num_tokens > self._job.min_tokens
        has_stop = self._grows and token not in self._hidden_ids and self._text.add(token, may_end)
        if token in self._end_ids or has_stop:
            return "stop"
        if self.num_tokens < self._job.max_tokens:
            return None
        return "stop" if self._grows and self._text.end() else "length"

    def take(self, finish_reason: str | None, **others: Any) -> GenerateOutput:
        """Return all tokens that no output has had yet; with a reason, the last output.

        `others` are further fields of the output.
        """
        ids, self._ids = self._ids, []
        if finish_reason:
            if not self._grows:
                self._text.add_all([token for token in ids if token not in self._hidden_ids])
            self._text.end()
        text = self._text.take(finish_reason is not None)
        token_ids = np.array(ids, dtype=np.int32)
        return GenerateOutput(
            token_ids, text, finish_reason=finish_reason, **self._values.take(), **others
        )

"""The state of a continuation on both engines: its tokens, their values, and their text.

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
"""Tokens of the prompt that are decoded with the first new ones, which may begin with a space."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4
"""Most bytes of a character, and so most tokens of one; longer invalid sequences are output."""


class GrowingText:
    """Decode tokens to text incrementally, so that output text never changes later.

    A token's text depends on the token before it (a leading space) and may be part of a character.
    So each new piece is the text that a token adds to the decoding of earlier ones, and it is held
    back until its last character is complete. `skip_special` leaves special tokens out.
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
        self._decoded = len(self._ids)
        self._stop = stop
        self._include_stop = include_stop
        self._skip_special = skip_special
        # A stop string may begin in one token and end in a later one.
        self._held = max(map(len, stop), default=1) - 1
        self._text = ""
        self._num_output = 0

    def add(self, token: int, may_end: bool = True) -> bool:
        """Add a token; return whether a stop string ends the text. `may_end`: look for them."""
        self._ids.append(token)
        piece = self._decode_piece()
        is_incomplete = not piece or piece.endswith(INCOMPLETE)
        if is_incomplete and len(self._ids) - self._decoded <= LONGEST_CHARACTER:
            return False
        if piece:
            self._begin = self._decoded
        self._decoded = len(self._ids)
        return self._extend(piece, may_end)

    def add_all(self, tokens: Sequence[int]) -> None:
        """Add all tokens of a text without stop strings.

        They are decoded at once, unless there are invalid bytes, whose text depends on the steps.
        """
        whole = self._decode([*self._ids, *tokens])
        if INCOMPLETE in whole:
            for token in tokens:
                self.add(token)
        else:
            self._text = whole[len(self._decode(self._ids)) :]
            self._ids += tokens
            self._begin = self._decoded = len(self._ids)

    def end(self) -> bool:
        """Add the rest of an incomplete character; return as `add` does."""
        piece = self._decode_piece()
        self._begin = self._decoded = len(self._ids)
        return self._extend(piece, may_end=True)

    def _decode_piece(self) -> str:
        """Return the text of the tokens after the last piece."""
        before = self._decode(self._ids[self._begin : self._decoded])
        return self._decode(self._ids[self._begin :])[len(before) :]

    def _extend(self, piece: str, may_end: bool) -> bool:
        searched = max(0, len(self._text) - self._held)
        self._text += piece
        matches = [
            (at, at + len(stop) if self._include_stop else at)
            for stop in self._stop
            if may_end and (at := self._text.find(stop, searched)) >= 0
        ]
        if matches:
            _, end = min(matches)
            self._text = self._text[:end]
        return bool(matches)

    def pop(self, is_last: bool) -> str:
        """Return the new text that can no longer change; at the end, all new text."""
        end = len(self._text) if is_last else max(self._num_output, len(self._text) - self._held)
        piece = self._text[self._num_output : end]
        self._num_output = end
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special))


class DrawnValues:
    """The values of the tokens since the last output; `spec` names them.

    One buffer holds them: small arrays kept between steps fragment the heap, so that a cache copied
    at each step always needs new memory.
    """

    def __init__(self, spec: RowSpec) -> None:
        self._spec, self._width = spec, spec.width
        self._dtype = np.float64 if spec.double else np.float32
        self._buffer = bytearray()

    def add(self, values_NW: np.ndarray) -> None:
        """Add the values of the next N tokens; columns beyond the spec's width are ignored."""
        self._buffer += values_NW[:, : self._width].astype(self._dtype).tobytes()

    def pop(self) -> dict[str, Any]:
        """Return and clear the values, as fields of a `GenerateOutput`.

        All fields are empty for a job without log-probabilities.
        """
        values_NW = np.frombuffer(self._buffer, self._dtype).reshape(-1, max(1, self._width))
        self._buffer = bytearray()
        columns, empty_N0 = unpack(values_NW, self._spec), values_NW[:, :0]
        if listed := self._spec.listed:
            columns[TOP_IDS] = np.array([listed], np.int32).repeat(len(values_NW), axis=0)
            columns[TOP_LOGPROBS] = columns.pop(ALTERNATIVES)
        return {
            "logprobs": columns.pop("logprob", empty_N0.ravel()),
            "top_ids": columns.pop(TOP_IDS, empty_N0.astype(np.int32)),
            "top_logprobs": columns.pop(TOP_LOGPROBS, empty_N0),
            "columns": columns,
        }


class DrawnTokens:
    """The tokens generated for a job since its last output.

    Text is decoded token by token only for a stream or stop strings, otherwise at the end.
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
        """Add a token with its values.

        Return the finish reason if the continuation ends with it, `stop` or `length`; else None.
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

    def pop(self, finish_reason: str | None, **others: Any) -> GenerateOutput:
        """Return the output with the tokens since the last one; with a reason, the final output.

        `others`: further fields of the output.
        """
        ids, self._ids = self._ids, []
        if finish_reason:
            if not self._grows:
                self._text.add_all([token for token in ids if token not in self._hidden_ids])
            self._text.end()
        text = self._text.pop(finish_reason is not None)
        token_ids = np.array(ids, dtype=np.int32)
        return GenerateOutput(
            token_ids, text, finish_reason=finish_reason, **self._values.pop(), **others
        )

"""Texts as windows to score, and the windows' log-probabilities as sums."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from logsteer.errors import APIError, api_error
from logsteer.schemas.perplexity import exp_mean
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import ScoreJob, ScoreOutput
from logsteer_server.contract.plan import Readings
from logsteer_server.interventions.interventions import Interventions
from logsteer_server.tasks.columns import ColumnOptions, show_columns
from logsteer_server.tasks.planning import Steps
from logsteer_server.tasks.problems import ItemProblems
from logsteer_server.text.incremental import EncodedPiece, IncrementalEncoder
from logsteer_server.text.sums import Counts, TextSums, count_ids, count_text
from logsteer_server.text.tokenizer import ENCODED_AT_ONCE, TextCodec, split_sizes
from logsteer_server.text.windows import Window, WindowCutter, Windowing, make_cutter

READ_AT_ONCE = 65_536
"""Tokens of the windows that are cut in one step."""


@dataclass(frozen=True, slots=True)
class TextWindow:
    """One window of one text, as a job; positions count the text's own tokens."""

    text: int
    start: int
    end: int
    counts_R3: Counts
    job: ScoreJob

    @property
    def num_scored(self) -> int:
        """Tokens that this window scores."""
        return self.job.num_scored


class TextWindows:
    """Cuts one text, whole or in pieces, into windows to score; `options` fit the model.

    Errors: APIError `invalid_request` for options that cannot be met.
    """

    def __init__(
        self,
        text: int,
        options: Windowing,
        read: ColumnOptions,
        codec: TextCodec,
        info: EngineInfo,
        *,
        is_ids: bool = False,
    ) -> None:
        self.num_tokens = 0
        self._read = read
        self._text = text
        self._vocab_size = info.vocab_size
        self._codec = codec
        self._bos_policy = options.bos
        # Rolling has its prefix token in the first window; the script of exl3 puts nothing there.
        if options.protocol == "rolling" or (options.protocol == "exl3" and options.bos == "auto"):
            self._bos_policy = "never"
        if is_ids and options.bos == "auto":  # they are taken as they are
            self._bos_policy = "never"
        self._in_front: list[int] | None = None
        self._counts = count_text("", [])[:0]
        self._counts_from = 0
        self._cutter = self._make_cutter(options)

    def _make_cutter(self, options: Windowing) -> WindowCutter:
        special_id = None
        if options.protocol == "rolling":
            if options.bos == "never":
                detail = "protocol rolling puts a prefix token in front; bos: never excludes that."
                raise api_error("invalid_request", detail, param="bos")
            special_id = self._codec.prefix_id()
        elif options.protocol == "llamacpp":
            special_id = next(iter(self._codec.bos_ids(options.bos)), None)
        return make_cutter(options, special_id)

    @property
    def tokens_at_once(self) -> int:
        """Tokens of a text that are fed together so that their windows have few tokens, too."""
        length = self._cutter.context_length
        return max(1, READ_AT_ONCE * min(self._cutter.stride, length) // length)

    def feed(self, piece: EncodedPiece) -> list[TextWindow]:
        """Return the windows that these tokens complete."""
        if piece.ids and max(piece.ids) >= self._vocab_size:
            detail = f"The text has token {max(piece.ids)}, the model's vocabulary is smaller."
            raise api_error("invalid_request", detail)
        ids = piece.ids
        if self._in_front is None and ids:
            self._in_front = self._codec.bos_ids(self._bos_policy, ids)
            ids = [*self._in_front, *ids]
        self.num_tokens += len(piece.ids)
        self._counts = np.concatenate([self._counts, piece.counts])
        return self._to_jobs(self._cutter.feed(ids))

    def finish(self) -> list[TextWindow]:
        """Return the windows that are left when the text has ended."""
        return self._to_jobs(self._cutter.finish())

    def _to_jobs(self, windows: Sequence[Window]) -> list[TextWindow]:
        shift = len(self._in_front or ())
        jobs = []
        for window in windows:
            first, end = window.first_scored - shift, window.end - shift
            counts = self._counts[first - self._counts_from : end - self._counts_from]
            tokens, targets = list(window.tokens), list(window.targets)
            if self._read.reads_end:
                tokens.append(targets[-1])
                targets.append(0)
            job = ScoreJob(
                np.array(tokens, dtype=np.int32),
                np.array(targets, dtype=np.int32),
                self._read.columns,
                policy=self._read.policy,
                double=self._read.double,
                reads_end=self._read.reads_end,
            )
            jobs.append(TextWindow(self._text, max(0, window.start - shift), end, counts, job))
        keep_from = min(max(self._counts_from, self._cutter.begin - shift), self.num_tokens)
        self._counts = self._counts[keep_from - self._counts_from :]
        self._counts_from = keep_from
        return jobs


def cut_texts(
    texts: Sequence[str | list[int]],
    options: Windowing,
    read: ColumnOptions,
    codec: TextCodec,
    info: EngineInfo,
    problems: ItemProblems | None = None,
) -> Steps[tuple[list[TextWindow], list[int]]]:
    """Cut whole texts; return their windows in order, and the number of tokens of each text.

    `options` fit the model. What is wrong with a text, which then has no window, is added to
    `problems`; the first is raised where that is None. Errors: those of `TextWindows`.
    """
    problems = ItemProblems("texts") if problems is None else problems
    windows: list[TextWindow] = []
    lengths: list[int] = []
    num_planned = 0
    for part in split_sizes([len(text) for text in texts], ENCODED_AT_ONCE):
        own = texts[part.start : part.stop]
        for index, text, encoded in zip(part, own, _encode(own, codec, info), strict=True):
            is_ids = not isinstance(text, str)
            cut = TextWindows(index, options, read, codec, info, is_ids=is_ids)
            first = len(windows)
            with problems.catch(index):
                if not text:
                    raise api_error("invalid_request", "The text is empty: leave it out.")
                if isinstance(encoded, APIError):
                    raise encoded
                whole = encoded
                for piece in whole.split(cut.tokens_at_once):
                    found = cut.feed(piece)
                    windows += found
                    num_planned += sum(window.job.num_expected for window in found)
                    yield num_planned
                windows += cut.finish()
            if index in problems:
                del windows[first:]
            lengths.append(cut.num_tokens)
    return windows, lengths


def _encode(
    texts: Sequence[str | list[int]], codec: TextCodec, info: EngineInfo
) -> Iterator[EncodedPiece | APIError]:
    """Yield the tokens of each text, or what is wrong with those that it is given by."""
    written = [text for text in texts if isinstance(text, str)]
    encoded = iter(codec.encode(written))
    for text in texts:
        if isinstance(text, str):
            ids, offsets = next(encoded)
            yield EncodedPiece(ids, count_text(text, offsets))
        elif text and max(text) >= info.vocab_size:  # before it is decoded
            detail = f"There is no token {max(text)}; the model's vocabulary ends at "
            yield api_error("invalid_request", f"{detail}{info.vocab_size - 1}.")
        else:
            yield EncodedPiece(text, count_ids(text, codec))


class StreamedText:
    """Windows of a text that arrives in pieces. Memory does not grow with the text.

    `options` fit the model. Errors: those of `TextWindows`.
    """

    def __init__(
        self, options: Windowing, read: ColumnOptions, codec: TextCodec, info: EngineInfo
    ) -> None:
        self._encoder = IncrementalEncoder(codec)
        self._windows = TextWindows(0, options, read, codec, info)

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._windows.num_tokens

    def feed(self, text: str) -> list[TextWindow]:
        """Return the windows that this piece of text completes."""
        return self._windows.feed(self._encoder.feed(text))

    def finish(self) -> list[TextWindow]:
        """Return the windows that are left when the text has ended."""
        return self._windows.feed(self._encoder.finish()) + self._windows.finish()

    @property
    def flags(self) -> list[str]:
        """`seams_moved` where tokens at a seam may differ from those of the whole text."""
        return ["seams_moved"] if self._encoder.seams_moved else []


@dataclass(slots=True)
class TextScores:
    """What has been scored of one text so far."""

    sums: TextSums = field(default_factory=TextSums)
    windows: list[dict[str, Any]] = field(default_factory=list)
    positions: list[npt.NDArray[np.int32]] = field(default_factory=list)
    starts: list[npt.NDArray[np.int32]] = field(default_factory=list)
    """Of each scored token's window, so that the order is not that in which windows come."""
    token_ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    columns: list[dict[str, npt.NDArray[Any]]] = field(default_factory=list)
    readings: list[npt.NDArray[np.float32]] = field(default_factory=list)
    front: tuple[int, npt.NDArray[np.float32]] | None = None
    """The position of the first scored token, and what was read of the tokens in front of it."""

    def add(self, window: TextWindow, output: ScoreOutput, keep_tokens: bool) -> dict[str, Any]:
        """Count a scored window in; return its entry, as `WindowScore`."""
        count = window.num_scored
        logprobs = output.columns["logprob"][:count]
        own = TextSums()
        own.add_scores(logprobs, window.counts_R3)
        self.sums.merge(own)
        entry = {
            "text": window.text,
            "start": window.start,
            "end": window.end,
            "num_scored": count,
            "sum_logprob": own.sum_logprob,
            "sum_squared_logprob": own.sum_squared_logprob,
        }
        if keep_tokens:
            first = window.end - count
            self.positions.append(np.arange(first, window.end, dtype=np.int32))
            self.starts.append(np.full(count, window.start, dtype=np.int32))
            self.token_ids.append(window.job.targets[:count])
            self.columns.append({name: read[:count] for name, read in output.columns.items()})
            if output.readings is not None:
                in_front, values = np.split(output.readings.values_TGR, [-count])
                self.readings.append(values)
                if self.front is None or first < self.front[0]:
                    self.front = first, in_front
        return entry

    def list_tokens(self, asked: Sequence[str], interventions: Interventions) -> dict[str, Any]:
        """Return every scored token, as `TokenScores`, in the order of the text and its windows."""
        none = np.zeros(0, np.int32)
        positions = np.concatenate([none, *self.positions])
        order = np.lexsort((np.concatenate([none, *self.starts]), positions))
        names = list(dict.fromkeys(["logprob", *asked]))
        parts = self.columns or [dict.fromkeys(names, np.zeros(0, np.float32))]
        read = {name: np.concatenate([part[name] for part in parts])[order] for name in names}
        readings, num_front = None, 0
        if self.front is not None:
            _, in_front = self.front
            read_order = np.concatenate(self.readings)[order]
            readings, num_front = Readings(0, np.concatenate([in_front, read_order])), len(in_front)
        return {
            "positions": positions[order],
            "token_ids": np.concatenate([none, *self.token_ids])[order],
            **show_columns(read, names),
            **interventions.show_readings(readings, num_front),
        }


def summarize_progress(scores: Sequence[TextScores]) -> dict[str, Any]:
    """Return the totals so far, as a `WindowEvent` has them."""
    total = merge_sums(scores)
    return {
        "sum_logprob": total.sum_logprob,
        "num_scored": total.num_scored,
        "perplexity": exp_mean(-total.sum_logprob, total.num_scored),
    }


def merge_sums(scores: Sequence[TextScores]) -> TextSums:
    """Return the sums of all texts together."""
    total = TextSums()
    for score in scores:
        total.merge(score.sums)
    return total

"""`/perplexity`: log-likelihood of whole texts, window by window, and of a text as it arrives."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from logsteer.errors import APIError, api_error
from logsteer.schemas import (
    InterventionFields,
    PerplexityRequest,
    PerplexityStreamQuery,
    list_conversations,
)
from logsteer.schemas.perplexity import WindowOptions, exp_mean
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import NO_TOKENS, ScoreJob, ScoreOutput
from logsteer_server.contract.plan import Readings
from logsteer_server.interventions.interventions import Interventions, Stores
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.tasks.comparison import REFERENCE_COLUMNS, Comparison, compare_parts
from logsteer_server.tasks.planning import Cover, ItemProblems, Planner
from logsteer_server.tasks.policies import plan_policy, refuse_adjustments
from logsteer_server.tasks.run import Batch, BodyTask, Event, check_count, take_each
from logsteer_server.tasks.targets import describe_rows, show_columns
from logsteer_server.text.chat import ChatForm
from logsteer_server.text.incremental import EncodedPiece, IncrementalEncoder
from logsteer_server.text.prompts import find_longest_prompt
from logsteer_server.text.sums import Counts, TextSums, count_ids, count_text
from logsteer_server.text.tokenizer import (
    ENCODED_AT_ONCE,
    EncodedText,
    TextCodec,
    check_ids,
    split_sizes,
)
from logsteer_server.text.windows import Window, WindowCutter, fit_windows

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
        options: WindowOptions,
        read: ScoreJob,
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
        self._shift: int | None = None
        """How many tokens precede the text; -1 where its own first is the prefix."""
        self._counts = count_text("", [])
        self._counts_from = 0
        self._cutter = self._make_cutter(options)

    def _make_cutter(self, options: WindowOptions) -> WindowCutter:
        special_id = None
        if options.protocol == "rolling":
            if options.bos == "never":
                detail = "protocol rolling puts a prefix token in front; bos: never excludes that."
                raise api_error("invalid_request", detail, param="bos")
            special_id = self._codec.prefix_id()
        elif options.protocol == "llamacpp":
            special_id = next(iter(self._codec.bos_ids(options.bos)), None)
        return WindowCutter(options, special_id)

    def cut(self, whole: EncodedPiece) -> Iterator[list[TextWindow]]:
        """Yield the windows of a whole text, of a few tokens at a time."""
        length = self._cutter.context_length
        at_once = max(1, READ_AT_ONCE * min(self._cutter.stride, length) // length)
        yield from map(self.feed, whole.split(at_once))
        yield self.finish()

    def feed(self, piece: EncodedPiece) -> list[TextWindow]:
        """Return the windows that these tokens complete."""
        check_ids(piece.ids, self._vocab_size)
        ids = piece.ids
        if self._shift is None and ids:
            front = self._codec.bos_ids(self._bos_policy, ids)
            self._shift, ids = len(front), [*front, *ids]
            if ids[0] == self._cutter.prefix_id:
                self._shift, ids = -1, ids[1:]
        self.num_tokens += len(piece.ids)
        self._counts = np.concatenate([self._counts, piece.counts])
        return self._to_jobs(self._cutter.feed(ids))

    def finish(self) -> list[TextWindow]:
        """Return the remaining windows at the end of the text."""
        return self._to_jobs(self._cutter.finish())

    def _to_jobs(self, windows: Sequence[Window]) -> list[TextWindow]:
        shift = self._shift or 0
        jobs = []
        for window in windows:
            first, end = window.first_scored - shift, window.end - shift
            counts = self._counts[first - self._counts_from : end - self._counts_from]
            tokens, targets = list(window.tokens), list(window.targets)
            if self._read.reads_end:
                tokens.append(targets[-1])
                targets.append(0)
            read, scored = np.array(tokens, dtype=np.int32), np.array(targets, dtype=np.int32)
            job = replace(self._read, tokens=read, targets=scored)
            # A prefix that is the text's own first token is in its first window.
            start = window.start and max(0, window.start - shift)
            jobs.append(TextWindow(self._text, start, end, counts, job))
        keep_from = min(max(self._counts_from, self._cutter.begin - shift), self.num_tokens)
        self._counts = self._counts[keep_from - self._counts_from :]
        self._counts_from = keep_from
        return jobs


def cut_texts(
    texts: Sequence[str | list[int]],
    options: WindowOptions,
    read: ScoreJob,
    codec: TextCodec,
    info: EngineInfo,
    cover: Cover,
    problems: ItemProblems | None = None,
) -> tuple[list[TextWindow], list[int]]:
    """Cut whole texts; return their windows in order, and the number of tokens of each text.

    `options` fit the model. The problem of a text, which then has no window, is added to
    `problems`; the first is raised if that is None. Errors: as `TextWindows`.
    """
    problems = ItemProblems("texts") if problems is None else problems
    windows: list[TextWindow] = []
    lengths: list[int] = []
    num_planned = 0
    for part in split_sizes([len(text) for text in texts], ENCODED_AT_ONCE):
        own = texts[part.start : part.stop]
        encoded = iter(codec.encode([text for text in own if isinstance(text, str)]))
        for index, text in zip(part, own, strict=True):
            is_ids = not isinstance(text, str)
            own_windows = TextWindows(index, options, read, codec, info, is_ids=is_ids)
            first = len(windows)
            with problems.catch(index):
                for found in own_windows.cut(_count(text, encoded, codec, info)):
                    windows += found
                    num_planned += sum(window.job.num_expected for window in found)
                    cover(num_planned)
            if index in problems:
                del windows[first:]
            lengths.append(own_windows.num_tokens)
    return windows, lengths


def _count(
    text: str | list[int], encoded: Iterator[EncodedText], codec: TextCodec, info: EngineInfo
) -> EncodedPiece:
    """Return a text's tokens, the next ones encoded or its own. Errors: as `check_ids`."""
    if isinstance(text, str):
        ids, offsets = next(encoded)
        return EncodedPiece(ids, count_text(text, offsets))
    check_ids(text, info.vocab_size)  # before they are decoded
    return EncodedPiece(text, count_ids(text, codec))


@dataclass(slots=True)
class TextScores:
    """The scores of one text so far."""

    sums: TextSums = field(default_factory=TextSums)
    windows: list[dict[str, Any]] = field(default_factory=list)
    kept: list[tuple[TextWindow, ScoreOutput]] = field(default_factory=list)
    """The windows whose tokens are shown, as they came."""

    def add(self, window: TextWindow, output: ScoreOutput, keep_tokens: bool) -> dict[str, Any]:
        """Add a scored window; return its entry, as `WindowScore`."""
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
            self.kept.append((window, replace(output, activations=None)))
        return entry

    def list_tokens(self, asked: Sequence[str], interventions: Interventions) -> dict[str, Any]:
        """Return every scored token, as `TokenScores`, in the order of the text and its windows."""
        kept = sorted(self.kept, key=lambda one: (one[0].start, one[0].end))
        spans = [(window.end - window.num_scored, window.end) for window, _ in kept]
        positions = np.concatenate([NO_TOKENS, *(np.arange(*s, dtype=np.int32) for s in spans)])
        order = np.argsort(positions, kind="stable")
        names = list(dict.fromkeys(["logprob", *asked]))
        parts = [
            {name: output.columns[name][: window.num_scored] for name in names}
            for window, output in kept
        ] or [dict.fromkeys(names, np.zeros(0, np.float32))]
        read = {name: np.concatenate([part[name] for part in parts])[order] for name in names}
        readings, num_front = None, 0
        found = [output.readings.values_TGR for _, output in kept if output.readings is not None]
        if found:
            num_front = len(found[0]) - kept[0][0].num_scored
            own = [values[-w.num_scored :] for values, (w, _) in zip(found, kept, strict=True)]
            in_order = np.concatenate(own)[order]
            readings = Readings(0, np.concatenate([found[0][:num_front], in_order]))
        return {
            "positions": positions[order],
            "token_ids": np.concatenate(
                [NO_TOKENS, *(window.job.targets[: window.num_scored] for window, _ in kept)]
            )[order],
            **show_columns(read, names),
            **interventions.show_readings(readings, num_front),
        }


def summarize_progress(scores: Sequence[TextScores]) -> dict[str, Any]:
    """Return the totals so far, as a `WindowEvent`."""
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


BYTES_PER_WINDOW = 256
"""Of an answer that lists windows."""

WINDOWS_IN_FLIGHT = 64
"""Running windows of one streamed text: enough to fill an engine's step, and cheap to hold."""


W = TypeVar("W", bound=PerplexityRequest | PerplexityStreamQuery)


class WindowTask(BodyTask[W]):
    """Scores windows of texts and sums them up; the base of both endpoints."""

    kind = "perplexity"

    def __init__(self, body: W, models: ModelRegistry, stores: Stores, num_texts: int) -> None:
        super().__init__(body, models, stores)
        self._scores = [TextScores() for _ in range(num_texts)]
        self._windows: list[TextWindow] = []
        self._windows_done = 0
        self._windows_total: int | None = None
        self._shows_events = self.streams

    def _take(self, index: int, output: ScoreOutput) -> Event | None:
        """Add a scored window; return its event if the answer is a stream of them."""
        window = self._windows[index]
        score = self._scores[window.text]
        entry = score.add(window, output, getattr(self._body, "tokens", False))
        entry |= self.interventions.show_activations(output.activations)
        if getattr(self._body, "windows", False):
            score.windows.append(entry)
        self._windows_done += 1
        if not self._shows_events:
            return None
        document = {
            "window": entry,
            "windows_done": self._windows_done,
            "windows_total": self._windows_total,
        }
        return Event("window", document | summarize_progress(self._scores))

    def _summarize(self, flags: Sequence[str]) -> dict[str, Any]:
        """Return results and total, each with these flags besides its own."""
        summaries = [score.sums.summarize() for score in self._scores]
        total = merge_sums(self._scores).summarize()
        for summary in (*summaries, total):
            summary["flags"] += flags
        return {"results": summaries, "total": total}


class PerplexityTask(WindowTask[PerplexityRequest]):
    """Log-likelihood and perplexity of whole texts, window by window.

    With a reference, the model is compared with that on every row.
    """

    def __init__(self, body: PerplexityRequest, models: ModelRegistry, stores: Stores) -> None:
        conversations = list_conversations(body.messages) if body.messages else []
        super().__init__(body, models, stores, len(body.texts or conversations))
        self._conversations = conversations
        self._reference = None if body.reference is None else models.find(body.reference)
        self._comparison: Comparison | None = None
        self._problems = ItemProblems(
            "texts" if body.texts else "messages",
            body.on_error,
            is_one=bool(body.messages) and conversations[0] is not (body.messages or [])[0],
        )

    def check_limits(self, settings: Settings) -> None:
        """Bound the number of texts. Errors: APIError `payload_too_large`."""
        check_count("texts", len(self._scores), settings.max_items)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Score all windows; with a reference, as `compare_parts` does."""
        if self._reference is not None:
            self._comparison = Comparison(self.model, self._reference)
        body = self._body
        planner.cover_text(find_longest_prompt(body.texts or [], self._conversations))
        windows = self._windows = await planner.run(self._cut, planner)
        self._windows_total = len(windows)
        if body.tokens:
            rows = sum(window.num_scored for window in windows)
            planner.expect_rows(rows, 1 + len(body.columns))
            contexts = sum(window.job.prompt_len for window in windows if not window.start)
            planner.expect_readings(self.interventions, len(self._scores), rows, contexts)
        if body.windows:
            planner.expect_bytes(len(windows) * BYTES_PER_WINDOW)
        if not windows and self._problems:
            return
        plain = [window.job for window in windows]
        jobs = await planner.run(self.interventions.apply, plain)
        planner.expect_captured(self.interventions, jobs)
        if self._comparison is None:
            yield Batch(jobs, take_each(self._take), cache=body.cache)
            return
        batches = compare_parts(
            jobs, plain, self._comparison, planner, self._scratch, REFERENCE_COLUMNS,
            take_each(self._take),
        )  # fmt: skip
        async with aclosing(batches):
            async for batch in batches:
                yield batch

    def _cut(self, planner: Planner) -> list[TextWindow]:
        info = self.info
        if self._comparison is not None:
            info = replace(info, context_length=self._comparison.context_length)
        body = self._body
        self.interventions = Interventions.resolve(body, self._stores, info, self.codec)
        reads_end = bool(self.interventions.probes)
        policy = plan_policy(body.policy, self.codec, info)
        refuse_adjustments(policy)
        read = describe_rows(body.columns, policy, body.precision, reads_end=reads_end)
        self.windowing = fit_windows(body, info.context_length)
        if reads_end and self.windowing.protocol == "rolling":
            _check_room(self.windowing, info.context_length)
        form = ChatForm.of(body, is_whole=True)
        texts = list(body.texts or ())
        for index, text in enumerate(self.codec.render_each(self._conversations, form)):
            if isinstance(text, APIError):
                self._problems.add(index, text)
            texts.append("" if isinstance(text, APIError) else text)
        windowing: WindowOptions = self.windowing
        if self._conversations and body.bos == "auto" and body.protocol in ("sliding", "disjoint"):
            # It stands in the template, or nowhere.
            windowing = windowing.model_copy(update={"bos": "never"})
        windows, lengths = cut_texts(
            texts, windowing, read, self.codec, info, planner.cover, self._problems
        )
        for score, length in zip(self._scores, lengths, strict=True):
            score.sums.num_tokens = length
        return windows

    def _take(self, index: int, output: ScoreOutput) -> Event | None:
        if self._comparison is not None:
            self._comparison.add(output, self._windows[index].num_scored)
        return super()._take(index, output)

    def report(self) -> dict[str, Any]:
        """Return the sums of each text and of all, with windows and tokens where asked for."""
        document = self._summarize([])
        for result, score in zip(document["results"], self._scores, strict=True):
            if self._body.windows:
                result["windows"] = sorted(score.windows, key=lambda entry: entry["start"])
            if self._body.tokens:
                tokens = score.list_tokens(self._body.columns, self.interventions)
                pieces = map(self.codec.piece, tokens["token_ids"].tolist())
                result["tokens"] = tokens | {"tokens": list(pieces)}
        good = [one for n, one in enumerate(document["results"]) if n not in self._problems]
        document["results"] = self._problems.fill(good, self.request_id)
        divergence = self._comparison.summarize() if self._comparison else None
        return {**document, "divergence": divergence}


def _check_room(windowing: WindowOptions, limit: int) -> None:
    """Make sure that a model can read the last token of a full window of `rolling`, too."""
    if windowing.context_length == limit:
        detail = (
            f"Probes read a window's last token, too: with protocol rolling that is {limit + 1} "
            f"tokens, and this model reads {limit}. Send context_length: {limit - 1}, or less."
        )
        raise api_error("context_too_long", detail, param="context_length")


class PerplexityStreamTask(WindowTask[PerplexityStreamQuery]):
    """Scores one text of any length as fast as it arrives, in bounded memory."""

    def __init__(
        self,
        query: PerplexityStreamQuery,
        pieces: AsyncIterator[str],
        models: ModelRegistry,
        stores: Stores,
    ) -> None:
        super().__init__(query, models, stores, 1)
        self.streams = True
        self._pieces = pieces
        self._flags: list[str] = []

    def check_limits(self, _settings: Settings) -> None:
        """Do nothing: the plan bounds running windows; reading bounds bytes."""

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Score windows while the text arrives; the last ones open the stream of events.

        Errors: APIError `invalid_request` for a text without a token.
        """
        query, info = self._body, self.info
        given = InterventionFields(
            steering=query.steering, override=query.override, adapter=query.adapter
        )
        self.interventions = await planner.capacity.call(
            Interventions.resolve, given, self._stores, info, self.codec
        )
        read = describe_rows((), precision=query.precision)
        self.windowing = fit_windows(query, info.context_length)
        encoder = IncrementalEncoder(self.codec)
        text = TextWindows(0, self.windowing, read, self.codec, info)
        waiting: list[TextWindow] = []
        limit = WINDOWS_IN_FLIGHT
        async for piece in self._pieces:
            encoded = await planner.capacity.call(encoder.feed, piece)
            waiting += await planner.capacity.call(text.feed, encoded)
            while len(waiting) >= limit:
                ready, waiting = waiting[:limit], waiting[limit:]
                yield await planner.capacity.call(self._batch, ready, silent=True)
        encoded = await planner.capacity.call(encoder.finish)
        waiting += await planner.capacity.call(lambda: text.feed(encoded) + text.finish())
        self._scores[0].sums.num_tokens = text.num_tokens
        if not text.num_tokens:
            raise api_error("invalid_request", "The body is empty: send the text as UTF-8.")
        self._flags = ["seams_moved"] if encoder.seams_moved else []
        self._windows_total = self._windows_done + len(waiting)
        yield await planner.capacity.call(self._batch, waiting, silent=False)

    def _batch(self, windows: list[TextWindow], *, silent: bool) -> Batch:
        self._windows = windows
        self._shows_events = not silent
        if not self._windows_done:
            self.interventions.check_reach([window.job for window in windows])
        jobs = [self.interventions.change(window.job) for window in windows]
        return Batch(jobs, take_each(self._take), cache=self._body.cache, silent=silent)

    def report(self) -> dict[str, Any]:
        """Return the sums of the text."""
        return {**self._summarize(self._flags), "divergence": None}

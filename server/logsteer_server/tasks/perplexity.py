"""`/perplexity`: log-likelihood of whole texts, window by window, and of a text as it arrives."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from logsteer.errors import APIError, api_error
from logsteer.schemas import (
    InterventionFields,
    PerplexityRequest,
    PerplexityStreamQuery,
    list_conversations,
)
from logsteer_server.contract.jobs import ScoreOutput
from logsteer_server.interventions.interventions import Interventions, Stores
from logsteer_server.models.model import ResidentModel
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.tasks.columns import ColumnOptions
from logsteer_server.tasks.comparison import (
    Comparison,
    compare_jobs,
    count_bytes,
    export_files,
    export_jobs,
)
from logsteer_server.tasks.continuations import find_longest_prompt
from logsteer_server.tasks.planning import Planner, Steps
from logsteer_server.tasks.problems import ItemProblems
from logsteer_server.tasks.run import Batch, Event, Task, check_count, take_each
from logsteer_server.tasks.texts import (
    StreamedText,
    TextScores,
    TextWindow,
    cut_texts,
    merge_sums,
    summarize_progress,
)
from logsteer_server.text.chat import ChatForm
from logsteer_server.text.windows import Windowing

BYTES_PER_WINDOW = 256
"""Of an answer that lists windows."""

WINDOWS_IN_FLIGHT = 64
"""Windows of one streamed text at work: enough to fill an engine's step, and little to hold."""


class WindowTask(Task):
    """Scores windows of texts and sums them up; what the two endpoints share."""

    kind = "perplexity"

    def __init__(self, model: ResidentModel, num_texts: int, *, streams: bool) -> None:
        super().__init__(model, streams=streams)
        self._scores = [TextScores() for _ in range(num_texts)]
        self._windows_done = 0
        self._windows_total: int | None = None
        self._shows_events = streams

    def _take_window(
        self, window: TextWindow, output: ScoreOutput, *, windows: bool, tokens: bool
    ) -> Event | None:
        """Count a scored window in; return its event where the answer is a stream of them."""
        score = self._scores[window.text]
        entry = score.add(window, output, tokens)
        if windows:
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


COMPARED_AT_ONCE = 4
"""Requests with a reference whose files have room beside one another, if they take all they may."""


class PerplexityTask(WindowTask):
    """Log-likelihood and perplexity of whole texts, window by window.

    With a reference, the model is compared with that on every row.
    """

    def __init__(self, body: PerplexityRequest, models: ModelRegistry, stores: Stores) -> None:
        conversations = list_conversations(body.messages) if body.messages else []
        count = len(body.texts or conversations)
        super().__init__(models.find(body.model), count, streams=body.stream)
        self._conversations = conversations
        self.precision = body.precision
        self._body = body
        self._stores = stores
        self._reference = None if body.reference is None else models.find(body.reference)
        self._comparison: Comparison | None = None
        self._scratch = models.scratch
        self._windows: list[TextWindow] = []
        self._problems = ItemProblems(
            "texts" if body.texts else "messages",
            body.on_error,
            is_one=bool(body.messages) and conversations[0] is not (body.messages or [])[0],
        )

    def check_limits(self, settings: Settings) -> None:
        """Bound the number of texts. Errors: APIError `payload_too_large`."""
        check_count("texts", len(self._scores), settings.max_items)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Score all windows; with a reference, as many at a time as its files have room for.

        Both models then reserve what the largest part needs before the stream of events opens.
        """
        if self._reference is not None:
            self._comparison = Comparison(self.model, self._reference)
        settings, body = planner.settings, self._body
        planner.cover_text(find_longest_prompt(body.texts or [], self._conversations))
        windows = self._windows = await planner.advance(self._cut())
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
        jobs = await planner.advance(self.interventions.apply(plain))
        if self._comparison is None:
            yield Batch(jobs, take_each(self._take), cache=body.cache)
            return
        parts = list(self._comparison.split(jobs, settings.max_reference_bytes // COMPARED_AT_ONCE))
        own = [jobs[part.start : part.stop] for part in parts]
        room = max((sum(job.num_expected for job in part) for part in own), default=0)
        reference, vocab_size = self._comparison.reference, self._comparison.vocab_size
        # What the largest part needs is taken for all, before the stream of events opens.
        size = max((count_bytes(part, vocab_size) for part in own), default=0)
        with self._scratch.take(size):
            for part, compared in zip(parts, own, strict=True):
                async with export_files(compared, vocab_size, planner) as files:
                    batch = export_jobs(compared, files)
                    yield Batch(batch, model=reference, purpose="reference", silent=True, room=room)
                    take = take_each(partial(self._take_compared, part.start))
                    yield Batch(compare_jobs(compared, files), take, room=room)

    def _cut(self) -> Steps[list[TextWindow]]:
        info = self.info
        if self._comparison is not None:
            info = replace(info, context_length=self._comparison.context_length)
        body = self._body
        self.interventions = Interventions.resolve(body, self._stores, info, self.codec)
        reads_end = bool(self.interventions.probes)
        read = ColumnOptions.of(body.columns, body.policy, body.precision, reads_end=reads_end)
        self.windowing = Windowing.of(body).fit(info.context_length)
        if reads_end and self.windowing.protocol == "rolling":
            _check_room(self.windowing, info.context_length)
        form = ChatForm.of(body, is_whole=True)
        texts = list(body.texts or ())
        for index, text in enumerate(self.codec.render_each(self._conversations, form)):
            if isinstance(text, APIError):
                self._problems.add(index, text)
            texts.append("" if isinstance(text, APIError) else text)
        windowing = self.windowing
        if self._conversations and body.bos == "auto" and body.protocol in ("sliding", "disjoint"):
            windowing = replace(windowing, bos="never")  # it stands in the template, or nowhere
        steps = cut_texts(texts, windowing, read, self.codec, info, self._problems)
        windows, lengths = yield from steps
        for score, length in zip(self._scores, lengths, strict=True):
            score.sums.num_tokens = length
        return windows

    def _take_compared(self, first: int, index: int, output: ScoreOutput) -> Event | None:
        assert self._comparison is not None
        self._comparison.add(output, self._windows[first + index].num_scored)
        return self._take(first + index, output)

    def _take(self, index: int, output: ScoreOutput) -> Event | None:
        body, window = self._body, self._windows[index]
        return self._take_window(window, output, windows=body.windows, tokens=body.tokens)

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


def _check_room(windowing: Windowing, limit: int) -> None:
    """Make sure that a model can read the last token of a full window of `rolling`, too."""
    if windowing.context_length == limit:
        detail = (
            f"Probes read a window's last token, too: with protocol rolling that is {limit + 1} "
            f"tokens, and this model reads {limit}. Send context_length: {limit - 1}, or less."
        )
        raise api_error("context_too_long", detail, param="context_length")


class PerplexityStreamTask(WindowTask):
    """Scores one text of any length as fast as it arrives, in bounded memory."""

    def __init__(
        self,
        query: PerplexityStreamQuery,
        pieces: AsyncIterator[str],
        models: ModelRegistry,
        stores: Stores,
    ) -> None:
        super().__init__(models.find(query.model), 1, streams=True)
        self.precision = query.precision
        self._query = query
        self._pieces = pieces
        self._stores = stores
        self._windows: list[TextWindow] = []
        self._flags: list[str] = []

    def check_limits(self, _settings: Settings) -> None:
        """Do nothing: windows at work are bounded by the plan, bytes where they are read."""

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Score windows while the text arrives; the last ones open the stream of events.

        Errors: APIError `invalid_request` for a text without a token.
        """
        query, info = self._query, self.info
        given = InterventionFields(
            steering=query.steering, override=query.override, adapter=query.adapter
        )
        self.interventions = await planner.capacity.call(
            Interventions.resolve, given, self._stores, info, self.codec
        )
        read = ColumnOptions.of((), precision=query.precision)
        self.windowing = Windowing.of(query).fit(info.context_length)
        text = StreamedText(self.windowing, read, self.codec, info)
        waiting: list[TextWindow] = []
        limit = WINDOWS_IN_FLIGHT
        async for piece in self._pieces:
            waiting += await planner.capacity.call(text.feed, piece)
            while len(waiting) >= limit:
                ready, waiting = waiting[:limit], waiting[limit:]
                yield await planner.capacity.call(self._batch, ready, silent=True)
        waiting += await planner.capacity.call(text.finish)
        self._scores[0].sums.num_tokens = text.num_tokens
        if not text.num_tokens:
            raise api_error("invalid_request", "The body is empty: send the text as UTF-8.")
        self._flags = text.flags
        self._windows_total = self._windows_done + len(waiting)
        yield await planner.capacity.call(self._batch, waiting, silent=False)

    def _batch(self, windows: list[TextWindow], *, silent: bool) -> Batch:
        self._windows = windows
        self._shows_events = not silent
        if not self._windows_done:
            list(self.interventions.check_reach([window.job for window in windows]))
        jobs = [self.interventions.change(window.job) for window in windows]
        return Batch(jobs, take_each(self._take), cache=self._query.cache, silent=silent)

    def _take(self, index: int, output: ScoreOutput) -> Event | None:
        return self._take_window(self._windows[index], output, windows=False, tokens=False)

    def report(self) -> dict[str, Any]:
        """Return the sums of the text."""
        return {**self._summarize(self._flags), "divergence": None}

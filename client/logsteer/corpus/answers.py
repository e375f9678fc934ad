"""Chunks of rows -> requests; their answers -> a line for each row.

    {"row": 0, "result": {"targets": [...], "best": 0, ...}}
    {"row": 1, "error": {"code": "context_too_long", "detail": "…", "param": "targets[2]"}}

Lines have nothing of when and how they came to be: no times, no request ids.
"""

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import BaseModel, Field
from pydantic_core import from_json, to_json

from logsteer._calls import ApiCall, Download
from logsteer._endpoints import ENDPOINTS
from logsteer.corpus.rows import ITEM_FIELDS, Chunk, Row, RowForm
from logsteer.errors import (
    DIVISIBLE,
    AnswerError,
    APIError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    LogsteerError,
    RequestTimeoutError,
    problem_error,
)
from logsteer.schemas import TextResult, TextScore
from logsteer.schemas.perplexity import SUMS, summarize_sums

USAGE = ("prompt_tokens", "scored_tokens", "generated_tokens")
"""Counts of an answer's `usage` that are summed up."""
FINGERPRINT = (
    "engine", "engine_version", "weights_digest", "tokenizer_digest", "dtype", "logits_dtype",
    "quantization", "vocab_size",
)  # fmt: skip
"""What of an answer's provenance is the same for all rows of a file."""
_PLACE = re.compile(r"^(items|texts|prompts|prompt_ids|messages)(\[\d+\])?\.?")
"""Of a problem's `param`: which of a request's items it is about."""
MAX_DETAIL = 2000
"""Characters of an error's detail in a line."""
TOO_LONG = (DeadlineError, RequestTimeoutError, InternalError)
"""What fails with some of several rows, and has failed as often as it is tried."""

Ask: TypeAlias = Callable[[ApiCall[Download]], Awaitable[bytes]]
"""Sends a call to some server, and returns what it answered. What may pass is waited for."""


@dataclass(slots=True)
class RowCounts:
    """Counts of rows that are finished; those of parts add up to those of the whole.

    `failed_at_end` is how many of the last rows failed with none between them that did not.
    """

    rows: int = 0
    failed: int = 0
    usage: dict[str, int] = field(default_factory=lambda: dict.fromkeys(USAGE, 0))
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0))
    failed_at_end: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that the model has read and made."""
        return self.usage["prompt_tokens"] + self.usage["generated_tokens"]

    def add(self, other: "RowCounts") -> None:
        """Count other rows in, which come behind these."""
        whole = other.failed_at_end == other.rows
        self.failed_at_end = other.failed_at_end + (self.failed_at_end if whole else 0)
        self.rows += other.rows
        self.failed += other.failed
        for name, count in other.usage.items():
            self.usage[name] += count

    def add_text(self, sums: Sequence[float]) -> None:
        """Add a text's SUMS. One by one, so that their digits do not depend on requests."""
        for name, value in zip(SUMS, sums, strict=True):
            self.sums[name] += value


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """The lines of a chunk's rows, in their order, and counts of them.

    `first_error` is the first failed row and what was wrong with it; `texts` are the SUMS
    of each text of `perplexity`, which the tally lacks.
    """

    chunk: Chunk
    lines: bytes
    tally: RowCounts
    identity: Mapping[str, Any] | None
    first_error: tuple[int, Mapping[str, Any]] | None
    texts: Sequence[Sequence[float]]


async def score_chunk(form: RowForm, chunk: Chunk, ask: Ask) -> ScoredChunk:
    """Return the lines of a chunk: a result or an error for each row.

    Errors: those of `ask` that are not for some rows; AnswerError.
    """
    return await _ChunkRun(form, chunk, ask).finish()


class _ChunkRun:
    """One chunk on its way: its items, and the line of each row as it comes."""

    def __init__(self, form: RowForm, chunk: Chunk, ask: Ask) -> None:
        self._form = form
        self._chunk = chunk
        self._ask = ask
        self._items: list[Row | None] = []
        self._ids: list[Any] = []
        self._lines: list[bytes] = [b""] * len(chunk.rows)
        self._failed: dict[int, Mapping[str, Any]] = {}
        self._tally = RowCounts(rows=len(chunk.rows))
        self._identity: Mapping[str, Any] | None = None
        self._texts: list[list[float]] = []

    async def finish(self) -> ScoredChunk:
        """Return the lines of all rows."""
        for place, raw in enumerate(self._chunk.rows):
            own, item = self._form.read_row(raw)
            self._ids.append(own)
            self._items.append(None if isinstance(item, InvalidRequestError) else item)
            if isinstance(item, InvalidRequestError):
                self._fail(place, item)
        for part in self._divide():
            await self._answer(part)
        tally = self._tally
        tally.failed = len(self._failed)
        while tally.failed_at_end < tally.rows and tally.rows - 1 - tally.failed_at_end in (
            self._failed
        ):
            tally.failed_at_end += 1
        first = min(self._failed, default=None)
        error = None if first is None else (self._chunk.first + first, self._failed[first])
        return ScoredChunk(
            self._chunk, b"".join(self._lines), tally, self._identity, error, self._texts
        )

    def _divide(self) -> list[list[int]]:
        """Return the places of rows that go into one request each, in their order.

        All that are valid, but for what a request has one of: the text of protocol exl3. Those of
        a request are of one form; draws that follow from a row's number take neighbours.
        """
        places = [place for place, item in enumerate(self._items) if item is not None]
        if not self._form.kind.is_seeded:
            if self._form.options.get("protocol") == "exl3":
                return [[place] for place in places]
            is_item = self._form.kind.fields is ITEM_FIELDS
            forms: dict[str, list[int]] = {}
            for place in places:
                name = "items" if is_item else next(iter(self._items[place] or ()))
                forms.setdefault(name, []).append(place)
            return list(forms.values())
        parts: list[list[int]] = []
        before = ""
        for place in places:
            (name,) = self._items[place] or ("",)
            if parts and parts[-1][-1] == place - 1 and name == before:
                parts[-1].append(place)
            else:
                parts.append([place])
            before = name
        return parts

    async def _answer(self, places: Sequence[int]) -> None:
        """Have these rows answered, in halves where they are refused or take too long together."""
        try:
            answer = await self._ask(self._build(places))
        except (*DIVISIBLE, *TOO_LONG) as error:
            if len(places) == 1:
                self._fail(places[0], error)
                return
            middle = len(places) // 2
            await self._answer(places[:middle])
            await self._answer(places[middle:])
            return
        document = read_answer(answer, len(places))
        identity = identify(document)
        if self._identity is not None and identity != self._identity:
            raise AnswerError(describe_difference(self._identity, identity))
        self._identity = identity
        for place, result in zip(places, document["results"], strict=True):
            if "problem" in result:
                self._fail(place, problem_error(result["problem"]))
            else:
                self._write(place, b"result", to_json(result))
        for name in USAGE:
            self._tally.usage[name] += document["usage"].get(name, 0)
        if self._form.kind.result is TextResult:
            for result in document["results"]:
                if "problem" in result:
                    continue
                sums = [result[name] for name in SUMS]
                self._texts.append([math.nan if value is None else value for value in sums])

    def _build(self, places: Sequence[int]) -> ApiCall[Download]:
        form = self._form
        body = {**form.options, "on_error": "report"}
        items = [self._items[place] or {} for place in places]
        if form.kind.fields is ITEM_FIELDS:
            body["items"] = items
        elif form.kind.text == "text":
            (name,) = items[0]
            values = [item[name] for item in items]
            body |= {"texts": values} if name == "text" else {"messages": values}
        else:
            (name,) = items[0]
            body["seed"] += (self._chunk.first + places[0]) * body.get("n", 1)
            values = [item[name] for item in items]
            body["prompts" if name == "prompt" else name] = values
        endpoint = ENDPOINTS[form.endpoint]
        return ApiCall(
            endpoint.method, endpoint.path, Download, to_json(body), file_type="application/json"
        )

    def _fail(self, place: int, error: LogsteerError) -> None:
        code = error.code if isinstance(error, APIError) else "deadline_exceeded"
        param = error.param if isinstance(error, APIError) else None
        if param is not None:  # of `items[17].targets[2]` the part that is the row's
            param = _PLACE.sub("", param) or None
        document = {"code": code, "detail": error.detail[:MAX_DETAIL], "param": param}
        self._failed[place] = document
        self._write(place, b"error", to_json(document))

    def _write(self, place: int, name: bytes, value: bytes) -> None:
        own = b""
        if self._form.id_column is not None:
            own = b'"id":%b,' % to_json(self._ids[place])
        line = b'{"row":%d,%b"%b":%b}\n' % (self._chunk.first + place, own, name, value)
        self._lines[place] = line


def read_answer(answer: bytes, count: int) -> Row:
    """Return the document of an answer with so many results. Errors: AnswerError."""
    try:
        document: Row = from_json(answer)
        found = len(document["results"])
        _ = document["usage"]["prompt_tokens"]
    except (ValueError, KeyError, TypeError) as error:
        raise AnswerError(
            f"the answer has no results: {error!r}; is it a logsteer server of this version?"
        ) from error
    if found != count:
        raise AnswerError(f"{count} rows, {found} results: a fault of the server")
    return document


def identify(document: Row) -> dict[str, Any]:
    """Return what computed an answer: the model, its weights, and what was changed of them."""
    provenance = document.get("provenance") or {}
    found = {"model": document.get("model")}
    found |= {name: provenance.get(name) for name in FINGERPRINT}
    for name in ("override", "adapter"):
        if document.get(name):
            found[name] = document[name].get("sha256")
    if document.get("steering"):
        found["steering"] = [vector.get("sha256") for vector in document["steering"]["vectors"]]
    return found


def describe_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Say in what two models differ."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    told = "; ".join(f"{name}: {one.get(name)!r}, now {other.get(name)!r}" for name in names)
    return f"the rows so far were answered by another model ({told})"


class FileScores(BaseModel):
    """The summary of a file's rows. `failed` of the `rows` have an error in place of a result.

    Tokens are those of the answers that were written. `total` is of the texts of `perplexity`, all
    together. `seconds` are those of all runs of the job, `resumed_rows` were there at the beginning
    of the last one, and `retries` are calls that it made again.
    """

    endpoint: str
    model: str | None
    rows: int
    failed: int
    prompt_tokens: int
    scored_tokens: int
    generated_tokens: int
    total: TextScore | None = None
    seconds: float
    rows_per_s: float
    tokens_per_s: float
    resumed_rows: int = 0
    retries: int = 0
    answered_by: dict[str, Any] | None = Field(
        default=None, description="The model and what was changed of it, by digests."
    )


def sum_up(
    form: RowForm, tally: RowCounts, identity: Mapping[str, Any] | None, seconds: float
) -> FileScores:
    """Return the summary of a job's rows."""
    answered = tally.rows - tally.failed
    total = None
    if form.kind.result is TextResult and answered:
        total = TextScore(**summarize_sums(tally.sums))
    return FileScores(
        endpoint=form.endpoint,
        model=None if identity is None else identity["model"],
        rows=tally.rows,
        failed=tally.failed,
        **tally.usage,
        total=total,
        seconds=seconds,
        rows_per_s=tally.rows / max(seconds, 1e-9),
        tokens_per_s=tally.tokens / max(seconds, 1e-9),
        answered_by=None if identity is None else dict(identity),
    )

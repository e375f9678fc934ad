"""Chunks of rows -> requests; their answers -> a line for each row.

    {"row": 0, "result": {"targets": [...], "best": 0, ...}}
    {"row": 1, "error": {"code": "context_too_long", "detail": "…", "param": "targets[2]"}}

Lines have nothing of when and how they came to be: no times, no request ids.
"""

import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import BaseModel, Field
from pydantic_core import from_json, to_json

from logsteer._calls import ApiCall, Download
from logsteer._endpoints import ENDPOINTS
from logsteer.corpus.rows import Row, RowForm
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
from logsteer.extras.files import Chunk
from logsteer.schemas import TextScore
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

    def add(self, scored: "ScoredChunk") -> None:
        """Count the rows of the next chunk in."""
        count = len(scored.chunk.rows)
        last = max((place for place in range(count) if place not in scored.failed), default=None)
        self.failed_at_end = self.failed_at_end + count if last is None else count - 1 - last
        self.rows += count
        self.failed += len(scored.failed)
        for name, more in scored.usage.items():
            self.usage[name] += more
        # One by one, so that the digits of a sum do not depend on requests.
        for sums in scored.texts:
            for name in SUMS:
                self.sums[name] += sums[name]


async def score_chunk(form: RowForm, chunk: Chunk, ask: Ask) -> "ScoredChunk":
    """Return a chunk with a result or an error for each row.

    Errors: those of `ask` that are not for some rows; AnswerError.
    """
    scored = ScoredChunk(form, chunk, ask)
    for part in scored.divide():
        await scored.answer(part)
    return scored


class ScoredChunk:
    """A chunk of rows, and the line of each as it comes.

    `failed` is place -> what was wrong with the row; `usage` what the answers add up to,
    `identity` the model that gave them; `texts` are the SUMS of each text of `perplexity`.
    """

    def __init__(self, form: RowForm, chunk: Chunk, ask: Ask) -> None:
        self.chunk = chunk
        self.failed: dict[int, Mapping[str, Any]] = {}
        self.usage = dict.fromkeys(USAGE, 0)
        self.identity: Mapping[str, Any] | None = None
        self.texts: list[Mapping[str, float]] = []
        self._form = form
        self._ask = ask
        self._lines = [b""] * len(chunk.rows)
        self._ids: list[Any] = []
        self._items: list[Row] = []
        for place, raw in enumerate(chunk.rows):
            own, item = form.read_row(raw)
            self._ids.append(own)
            self._items.append({} if isinstance(item, InvalidRequestError) else item)
            if isinstance(item, InvalidRequestError):
                self._fail(place, item)

    @property
    def lines(self) -> bytes:
        """The lines of all rows, in their order."""
        return b"".join(self._lines)

    @property
    def first_error(self) -> tuple[int, Mapping[str, Any]] | None:
        """The first failed row, and what was wrong with it."""
        first = min(self.failed, default=None)
        return None if first is None else (self.chunk.first + first, self.failed[first])

    def divide(self) -> list[list[int]]:
        """Return the places of rows that go into one request each, in their order.

        All that are valid, but for what a request has one of: the text of protocol exl3. Those of
        a request are of one form; draws that follow from a row's number take neighbours.
        """
        parts: dict[tuple[str, int], list[int]] = {}
        seen: Counter[str] = Counter()
        for place, item in enumerate(self._items):
            if place not in self.failed:
                name, own = self._form.name_values(item), 0
                if self._form.options.get("protocol") == "exl3":
                    own = place
                elif self._form.kind.is_seeded:
                    own = place - seen[name]  # the same for neighbours alone
                seen[name] += 1
                parts.setdefault((name, own), []).append(place)
        return list(parts.values())

    async def answer(self, places: Sequence[int]) -> None:
        """Have these rows answered, in halves where they are refused or take too long together.

        Errors: those of `score_chunk`.
        """
        try:
            answer = await self._ask(self._build(places))
        except (*DIVISIBLE, *TOO_LONG) as error:
            if len(places) == 1:
                self._fail(places[0], error)
                return
            middle = len(places) // 2
            await self.answer(places[:middle])
            await self.answer(places[middle:])
            return
        document = read_answer(answer, len(places))
        identity = identify(document)
        if self.identity is not None and identity != self.identity:
            raise AnswerError(describe_difference(self.identity, identity))
        self.identity = identity
        for place, result in zip(places, document["results"], strict=True):
            try:
                check_result(self._form, self._items[place], result)
            except LogsteerError as error:
                self._fail(place, error)
                continue
            self._write(place, b"result", to_json(result))
            if not self._form.kind.parts:
                self.texts.append({
                    name: math.nan if result[name] is None else result[name] for name in SUMS
                })  # fmt: skip
        for name in USAGE:
            self.usage[name] += document["usage"].get(name, 0)

    def _build(self, places: Sequence[int]) -> ApiCall[Download]:
        form = self._form
        items = [self._items[place] for place in places]
        name = form.name_values(items[0])
        values = items if name == "items" else [item[next(iter(item))] for item in items]
        body = {**form.options, "on_error": "report", name: values}
        if form.kind.is_seeded:
            body["seed"] += (self.chunk.first + places[0]) * body.get("n", 1)
        endpoint = ENDPOINTS[form.endpoint]
        return ApiCall(
            endpoint.method, endpoint.path, Download, to_json(body), file_type="application/json"
        )

    def _fail(self, place: int, error: LogsteerError) -> None:
        code = "internal" if isinstance(error, AnswerError) else "deadline_exceeded"
        param = None
        if isinstance(error, APIError):
            # Of `items[17].targets[2]` the part that is the row's.
            code, param = error.code, _PLACE.sub("", error.param or "") or None
        document = {"code": code, "detail": error.detail[:MAX_DETAIL], "param": param}
        self.failed[place] = document
        self._write(place, b"error", to_json(document))

    def _write(self, place: int, name: bytes, value: bytes) -> None:
        own = b""
        if self._form.id_column is not None:
            own = b'"id":%b,' % to_json(self._ids[place])
        line = b'{"row":%d,%b"%b":%b}\n' % (self.chunk.first + place, own, name, value)
        self._lines[place] = line


def check_result(form: RowForm, item: Row, result: Any) -> None:
    """Check that a row's result has what was asked for.

    Errors: what the server says is wrong with the row; AnswerError for a result that lacks a part.
    """
    if not isinstance(result, dict):
        raise AnswerError("the result is not an object: a fault of the server")
    if isinstance(result.get("problem"), dict):
        raise problem_error(result["problem"])
    parts = form.kind.parts
    if not parts:
        for name in SUMS:
            if not isinstance(result.get(name, ""), int | float | None):
                raise AnswerError(f"the result has no number {name}: a fault of the server")
        return
    asked = (
        form.options.get("n", 1)
        if form.kind.is_seeded
        else len(item.get("targets") or item["target_ids"])
    )
    found = result.get(parts)
    count = len(found) if isinstance(found, list) else 0
    if count != asked:
        raise AnswerError(f"{asked} {parts} were asked for, got {count}: a fault of the server")


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
    total = None
    if not form.kind.parts and tally.rows > tally.failed:
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

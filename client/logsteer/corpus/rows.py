"""What a job asks of each row of a file.

{"q": "2 + 2 =", "a": " 4"}                 a row, with fields {"context": "q", "targets": "a"}
{"context": "2 + 2 =", "targets": [" 4"]}   its item of `/logprob`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

from pydantic import Field
from pydantic_core import from_json

from logsteer._calls import checked, read_request
from logsteer.errors import InvalidRequestError
from logsteer.schemas import LogprobItem, Message
from logsteer.schemas.common import OneForm, TokenId

Row: TypeAlias = dict[str, Any]


class TextItem(OneForm):
    """A text to score, or a conversation."""

    forms: ClassVar[tuple[str, ...]] = ("text", "messages")

    text: str | None = Field(default=None, min_length=1)
    messages: list[Message] | None = Field(default=None, min_length=1)


class PromptItem(OneForm):
    """A prompt to continue."""

    forms: ClassVar[tuple[str, ...]] = ("prompt", "prompt_ids", "messages")

    prompt: str | None = Field(default=None, min_length=1)
    prompt_ids: list[TokenId] | None = Field(default=None, min_length=1)
    messages: list[Message] | None = Field(default=None, min_length=1)


@dataclass(frozen=True)
class RowKind:
    """How an endpoint takes rows.

    `item` has the fields of a row, `text` is the one that a text stands for, `sample` the part of a
    request that the rows go into. A result has `parts`, which are counted; "" for the sums of a
    text. `refused` are options that are for one request, not for each of many rows: name -> why.
    """

    item: type[LogprobItem | OneForm]
    text: str
    sample: Mapping[str, Any]
    parts: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    is_seeded: bool = False


_STREAM = {"stream": "results are written when they are whole; leave it out"}
_REFERENCE = {"reference": "a comparison is of a whole request, not of each row; leave it out"}
_SCORED = RowKind(
    LogprobItem, "context", {"items": [{"context": "a", "targets": ["b"]}]}, "targets"
)
_CONTINUED = RowKind(
    PromptItem, "prompt", {"prompts": ["a"]}, "completions", _STREAM, is_seeded=True
)
KINDS: Mapping[str, RowKind] = {
    "logprob": _SCORED,
    "diagnostics": _SCORED,
    "gradient": _SCORED,
    "perplexity": RowKind(TextItem, "text", {"texts": ["a"]}, refused=_STREAM | _REFERENCE),
    "generate": _CONTINUED,
    "steer": _CONTINUED,
}
"""Endpoint -> how it takes rows."""


@dataclass(frozen=True)
class RowForm:
    """What a job asks of each row.

    Args:
        endpoint: one of KINDS.
        options: of the request, the same for all rows; checked.
        model: id of the model, where it is said.
        fields: field of an item -> column that holds it; a field that is not named has its own.
        id_column: column whose value is given again with the result.
        targets: those of rows that have none.

    Errors: InvalidRequestError for options that do not fit the endpoint.

    """

    endpoint: str
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    id_column: str | None = None
    targets: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.endpoint not in KINDS:
            raise _refuse(f"{self.endpoint!r} takes no rows; {', '.join(KINDS)} do", "endpoint")
        kind = self.kind
        known = kind.item.model_fields
        if unknown := [name for name in self.fields if name not in known]:
            raise _refuse(f"{unknown[0]} is not a field of a row; {', '.join(known)} are", "fields")
        if self.targets and kind is not _SCORED:
            raise _refuse(f"{self.endpoint} takes no targets; leave them out", "targets")
        options = {name: value for name, value in self.options.items() if name != "model"}
        own = {"on_error": "each row has its result or its error; leave it out"}
        for name, why in {**kind.refused, **own}.items():
            if name in options:
                raise _refuse(f"{name}: {why}", name)
        if kind.is_seeded:
            options["seed"] = options.get("seed") or 0
        model = self.options.get("model", self.model)
        named = {} if model is None else {"model": model}
        asked = read_request(self.endpoint, {**options, **kind.sample, **named})
        checked = asked.model_dump(mode="json", exclude_unset=True)
        for name in kind.sample:
            del checked[name]
        object.__setattr__(self, "options", checked)

    @cached_property
    def _keys(self) -> list[tuple[str, str]]:
        """Fields of an item, and the column of each."""
        return [(name, self.fields.get(name, name)) for name in self.kind.item.model_fields]

    @property
    def kind(self) -> RowKind:
        """How the endpoint takes rows."""
        return KINDS[self.endpoint]

    @property
    def columns(self) -> list[str]:
        """Columns that may be read."""
        own = [column for _, column in self._keys]
        return own if self.id_column is None else [*own, self.id_column]

    def describe(self) -> dict[str, Any]:
        """Return what the lines of a row follow from, beside the row and the model."""
        return {
            "endpoint": self.endpoint,
            "options": dict(self.options),
            "fields": dict(self.fields),
            "id_column": self.id_column,
            "targets": list(self.targets),
        }

    def read_row(self, raw: bytes) -> tuple[Any, Row | InvalidRequestError]:
        """Return the id of a row, and its item as a dictionary, or why it has none."""
        try:
            row = from_json(raw)
        except ValueError as error:
            return None, _refuse(f"no JSON: {error}", None)
        if isinstance(row, str):
            row = {self.fields.get(self.kind.text, self.kind.text): row}
        if not isinstance(row, dict):
            return None, _refuse("no object, such as {" + f'"{self.kind.text}": "…"' + "}", None)
        own = None if self.id_column is None else row.get(self.id_column)
        item = {name: row[key] for name, key in self._keys if row.get(key) is not None}
        try:
            return own, self._check(item)
        except InvalidRequestError as error:
            return own, error

    def name_values(self, item: Row) -> str:
        """Return the field of a request that takes items such as this one."""
        if self.kind is _SCORED:
            return "items"
        (name,) = item
        return {"text": "texts", "prompt": "prompts"}.get(name, name)

    def _check(self, item: Row) -> Row:
        if not item:
            names = [column for _, column in self._keys[:3]]
            raise _refuse(f"no {' or '.join(names)} in this row; name columns by fields", None)
        if isinstance(item.get("targets"), str):
            item["targets"] = [item["targets"]]
        if self.targets and "targets" not in item and "target_ids" not in item:
            item["targets"] = list(self.targets)
        checked(self.kind.item, item)
        return item


def _refuse(detail: str, param: str | None) -> InvalidRequestError:
    return InvalidRequestError("invalid_request", detail, param=param)

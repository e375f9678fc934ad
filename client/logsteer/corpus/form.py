"""What a job asks of each row, and which item of its endpoint a row is.

{"q": "2 + 2 =", "a": " 4"}                 a row, with fields {"context": "q", "targets": "a"}
{"context": "2 + 2 =", "targets": [" 4"]}   its item of `/logprob`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json

from logsteer._calls import read_request
from logsteer.errors import InvalidRequestError
from logsteer.schemas import (
    ItemGradients,
    ItemScore,
    LogprobItem,
    Message,
    PromptCompletions,
    TextResult,
)
from logsteer.schemas.faults import describe_faults

Row: TypeAlias = dict[str, Any]
ITEM_FIELDS = ("context", "context_ids", "messages", "targets", "target_ids")
PROMPT_FIELDS = ("prompt", "prompt_ids", "messages")


@dataclass(frozen=True)
class RowKind:
    """How an endpoint takes rows: the fields of a row, the one that a text stands for, the answer.

    `refused` are options that are for one request, not for each of many rows: name -> why.
    """

    fields: tuple[str, ...]
    text: str
    result: type[BaseModel]
    refused: Mapping[str, str] = field(default_factory=dict)
    is_seeded: bool = False


_STREAM = {"stream": "results are written when they are whole; leave it out"}
_REFERENCE = {"reference": "a comparison is of a whole request, not of each row; leave it out"}
KINDS: Mapping[str, RowKind] = {
    "logprob": RowKind(ITEM_FIELDS, "context", ItemScore),
    "diagnostics": RowKind(ITEM_FIELDS, "context", ItemScore),
    "gradient": RowKind(ITEM_FIELDS, "context", ItemGradients),
    "perplexity": RowKind(("text", "messages"), "text", TextResult, _STREAM | _REFERENCE),
    "generate": RowKind(PROMPT_FIELDS, "prompt", PromptCompletions, _STREAM, is_seeded=True),
    "steer": RowKind(PROMPT_FIELDS, "prompt", PromptCompletions, _STREAM, is_seeded=True),
}
"""Endpoint -> how it takes rows."""

_ITEM = TypeAdapter(LogprobItem)
_IDS = TypeAdapter(list[int])
_MESSAGES = TypeAdapter(list[Message])


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
        if unknown := [name for name in self.fields if name not in kind.fields]:
            known = ", ".join(kind.fields)
            raise _refuse(f"{unknown[0]} is not a field of a row; {known} are", "fields")
        if self.targets and kind.fields != ITEM_FIELDS:
            raise _refuse(f"{self.endpoint} takes no targets; leave them out", "targets")
        options = {name: value for name, value in self.options.items() if name != "model"}
        own = {"on_error": "each row has its result or its error; leave it out"}
        for name, why in {**kind.refused, **own}.items():
            if name in options:
                raise _refuse(f"{name}: {why}", name)
        if kind.is_seeded:
            options["seed"] = options.get("seed") or 0
        sample = _SAMPLES[kind.text]
        model = self.options.get("model", self.model)
        named = {} if model is None else {"model": model}
        asked = read_request(self.endpoint, {**options, **sample, **named})
        checked = asked.model_dump(mode="json", exclude_unset=True)
        for name in sample:
            del checked[name]
        object.__setattr__(self, "options", checked)

    @cached_property
    def _keys(self) -> list[tuple[str, str]]:
        """Fields of an item, and the column of each."""
        return [(name, self.fields.get(name, name)) for name in self.kind.fields]

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

    def _check(self, item: Row) -> Row:
        kind = self.kind
        if not item:
            names = " or ".join(self.fields.get(name, name) for name in kind.fields[:3])
            raise _refuse(f"no {names} in this row; name columns by fields", None)
        try:
            if kind.fields is ITEM_FIELDS:
                if isinstance(item.get("targets"), str):
                    item["targets"] = [item["targets"]]
                if self.targets and "targets" not in item and "target_ids" not in item:
                    item["targets"] = list(self.targets)
                _ITEM.validate_python(item)
            else:
                _check_text(item)
        except ValidationError as invalid:
            first = next(describe_faults(invalid.errors(include_url=False)))
            raise _refuse(first.text, first.param) from invalid
        return item


_SAMPLES: Mapping[str, dict[str, Any]] = {
    "context": {"items": [{"context": "a", "targets": ["b"]}]},
    "text": {"texts": ["a"]},
    "prompt": {"prompts": ["a"]},
}


def _check_text(item: Row) -> None:
    """Check the one field of a text or a prompt. Errors: ValidationError, InvalidRequestError."""
    if len(item) > 1:
        raise _refuse(f"give one of {', '.join(item)}", next(iter(item)))
    ((name, value),) = item.items()
    if name == "messages":
        _MESSAGES.validate_python(value, strict=True)
    elif name == "prompt_ids":
        _IDS.validate_python(value, strict=True)
    elif not isinstance(value, str):
        raise _refuse(f"{name} is {value!r:.60}, no text", name)
    if not value:
        raise _refuse(f"{name} is empty", name)


def _refuse(detail: str, param: str | None) -> InvalidRequestError:
    return InvalidRequestError("invalid_request", detail, param=param)

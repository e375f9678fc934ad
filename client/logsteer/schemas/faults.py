"""What is wrong with a message: the faults that its schema finds, as sentences about fields.

Users see neither regular expressions nor the words of the library that finds the faults.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from logsteer.schemas.common import REFUSAL

MAX_NAME = 80
"""Characters of a name from a request that a sentence repeats: what looks for a resemblance takes
time by the square of them."""

FOREIGN: Mapping[str, str] = {
    "act_name": "hook",
    "alpha": "steering.vectors[].scale",
    "best_of": "n",
    "choices": "items[].targets",
    "coeff": "steering.vectors[].scale",
    "coefficient": "steering.vectors[].scale",
    "context": "items[].context",
    "continuation": "items[].targets",
    "continuations": "items[].targets",
    "do_sample": "temperature",
    "hook_name": "hook",
    "hook_point": "hook",
    "input_ids": "prompt_ids",
    "inputs": "prompts",
    "layer": "layers",
    "layer_ids": "layers",
    "lora": "adapter",
    "max_gen_toks": "max_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_seq_len": "context_length",
    "method_name": "method",
    "model_id": "model",
    "model_name": "model",
    "multiplier": "steering.vectors[].scale",
    "num_return_sequences": "n",
    "num_samples": "n",
    "prompt": "prompts|items[].context",
    "prompt_token_ids": "prompt_ids",
    "scaling_factor": "steering.vectors[].scale",
    "seqlen": "context_length",
    "steering_vectors": "steering.vectors",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "strength": "steering.vectors[].scale",
    "target": "items[].targets",
    "targets": "items[].targets",
    "text": "texts",
    "top_logprobs": "top",
    "until": "stop",
    "window_size": "context_length",
}
"""Fields of other libraries -> what the same is called here, and where it stands; | divides two."""
_NOTES: Mapping[str, str] = {"do_sample": ", 0 for the most probable tokens"}

_NAME = "must begin with a letter or digit and contain only letters, digits, `.`, `_` and `-`"
PATTERNS: Mapping[str, str] = {
    r"^(shared/)?[A-Za-z0-9][A-Za-z0-9._-]*$": f"{_NAME}, after `shared/` for one that all share",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": _NAME,
    r"^[A-Za-z0-9][A-Za-z0-9._:-]*$": _NAME.replace("`_`", "`_`, `:`"),
    r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$": f"{_NAME.replace('`.`, ', '')}, at most 64",
    r"^store://[A-Za-z0-9][A-Za-z0-9._-]*$": f"must be store://NAME; NAME {_NAME}",
    r"^store://([A-Za-z0-9_-][A-Za-z0-9._=-]*/)*[A-Za-z0-9_-][A-Za-z0-9._=-]*$": "must be "
    "store://PATH, names of letters, digits, `.`, `_`, `=` and `-` with `/` between",
    r"^redis(s|\+unix)?://": "must begin with redis://, rediss:// or redis+unix://",
    r"^[a-z][a-z0-9+.-]*://": "must be a URL",
    r"^[0-9a-f]{64}$": "must be a SHA-256, 64 digits of 0 to 9 and a to f",
    r"^[0-9]{1,8}$": "must be the id of a token, such as 277",
    r"^(0|[1-9][0-9]{0,5})$": "must be the number of a layer, such as 0; `hook` names the hook",
    r"^[A-Za-z0-9_.]+$": "must be the name of a hook, such as resid_post",
}
"""What the patterns of schemas and settings ask for."""

_KINDS: Mapping[str, str] = {
    "bool_parsing": "true or false", "bool_type": "true or false", "dict_type": "an object",
    "float_parsing": "a number", "float_type": "a number", "int_from_float": "a whole number",
    "int_parsing": "a whole number", "int_parsing_size": "a whole number",
    "int_type": "a whole number", "list_type": "a list", "mapping_type": "an object",
    "model_attributes_type": "an object", "model_type": "an object", "none_required": "null",
    "string_type": "a text", "string_unicode": "a text in UTF-8", "tuple_type": "a list",
}  # fmt: skip
"""What a value of the wrong kind has to be."""

_RANGES: Mapping[str, str] = {
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be {ge} or more",
    "json_type": "must be JSON",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be {le} or less",
    "missing": "is missing",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
}
_TAG = re.compile(r"str|int|float|bool|list|dict|none|nullable|json|[A-Z]\w*|.*[\[\]{}-].*")
"""What names a branch of a union in a fault's place, where fields have their names."""


class Fault(NamedTuple):
    """What is wrong with a field; None: with the whole message. `text` is a sentence."""

    param: str | None
    text: str


class _Found(NamedTuple):
    """A fault at a path. `union` is how much of that leads to a choice of kinds; None: to none."""

    path: tuple[int | str, ...]
    union: int | None
    entry: Mapping[str, Any]


def describe_faults(
    entries: Iterable[Mapping[str, Any]], kind: type[BaseModel] | None = None
) -> Iterator[Fault]:
    """Yield what is wrong with a message of this kind, given the faults that pydantic found.

    Of a value that may be of several kinds one sentence is made: that of the kind that it resembles
    most, or that it has to be one of them.
    """
    groups: dict[tuple[Any, ...], list[_Found]] = {}
    for number, entry in enumerate(entries):
        found = _place(entry)
        key = (number,) if found.union is None else ("union", *found.path[: found.union])
        groups.setdefault(key, []).append(found)
    for group in groups.values():
        deepest = max(len(found.path) for found in group)
        nearest = [found for found in group if len(found.path) == deepest]
        nouns = [noun for found in nearest if (noun := _find_kind(found.entry))]
        if len(nouns) < len(nearest):  # of some kind it is, but for its contents
            nearest = [found for found in nearest if not _find_kind(found.entry)][:1]
        elif len(nouns) > 1:
            kinds = " or ".join(dict.fromkeys(nouns))
            yield Fault(name_field(nearest[0].path), _write(nearest[0].path, f"must be {kinds}"))
            continue
        yield _describe(nearest[0], kind)


def explain(invalid: ValidationError, kind: type[BaseModel]) -> str:
    """Return everything that is wrong with a message of this kind, in sentences."""
    entries = invalid.errors(include_url=False, include_input=False)
    return " ".join(fault.text for fault in describe_faults(entries, kind))


def name_field(path: Sequence[int | str]) -> str | None:
    """Return `items[0].targets` for ("items", 0, "targets"); None for no path."""
    name = ""
    for part in path:
        name += f"[{part}]" if isinstance(part, int) else f".{part[:MAX_NAME]}"
    return name.removeprefix(".") or None


def _place(entry: Mapping[str, Any]) -> _Found:
    path: list[int | str] = []
    union = None
    is_unknown = entry["type"] == "extra_forbidden"
    parts = entry["loc"]
    for number, part in enumerate(parts):
        is_name = isinstance(part, int) or (is_unknown and number == len(parts) - 1)
        if is_name or not _TAG.fullmatch(part):
            path.append(part)
        elif part != "[key]" and union is None:
            union = len(path)
    return _Found(tuple(path), union, entry)


def _find_kind(entry: Mapping[str, Any]) -> str | None:
    """Return the kind that a value has to be of, where it is of the wrong one."""
    if entry["type"] == "literal_error":
        return str(entry["ctx"]["expected"])
    return _KINDS.get(entry["type"])


def _write(path: Sequence[int | str], predicate: str) -> str:
    return f"{name_field(path) or 'The message'} {predicate}."


def _describe(found: _Found, kind: type[BaseModel] | None) -> Fault:
    path, entry = found.path, found.entry
    field, given, context = name_field(path), entry["type"], entry.get("ctx") or {}
    if given == REFUSAL:  # raised by the whole message
        return Fault(str(context["param"]), str(entry["msg"]))
    if given == "missing" and not path:
        return Fault(None, "The body is empty; send JSON.")
    if given == "extra_forbidden":
        return Fault(field, f"{field}: there is no such field; {_suggest(path, kind)}")
    if given == "value_error":  # a check of ours, in its words
        reason = str(entry["msg"]).removeprefix("Value error, ")
        return Fault(field, f"{field}: {reason}." if field else f"{reason}.")
    if given == "json_invalid":
        return Fault(field, f"{field or 'The body'} is not valid JSON: {context.get('error')}.")
    if given == "string_pattern_mismatch":
        asked = PATTERNS.get(context.get("pattern", ""), "does not have the form that it needs")
        return Fault(field, _write(path, asked))
    if noun := _find_kind(entry):
        return Fault(field, _write(path, f"must be {noun}"))
    if context.get("min_length") == 1:
        return Fault(field, _write(path, "must not be empty"))
    return Fault(field, _write(path, _RANGES.get(given, "does not fit").format(**context)))


def _suggest(path: Sequence[int | str], kind: type[BaseModel] | None) -> str:
    """Return what to send in place of an unknown field: what it resembles, or is called here."""
    name = str(path[-1])[:MAX_NAME]
    known = _list_fields(path[:-1], kind)
    if close := difflib.get_close_matches(name, known, 1):
        return f"did you mean `{close[0]}`?"
    for ours in FOREIGN.get(name, "").split("|"):
        own = ours.rpartition(".")[2]
        if own in known:
            return f"send `{own}`{_NOTES.get(name, '')}."
        if ours.partition(".")[0].removesuffix("[]") in known:
            return f"send `{ours}`{_NOTES.get(name, '')}."
    return "remove it."


def _list_fields(path: Sequence[int | str], kind: type[BaseModel] | None) -> set[str]:
    """Return the fields of what stands at a path of a message of this kind."""
    models = list(_list_models(kind))
    for part in path:
        if isinstance(part, str):
            fields = [model.model_fields.get(part) for model in models]
            models = [m for field in fields if field for m in _list_models(field.annotation)]
    return {name for model in models for name in model.model_fields}


def _list_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the messages that a field of this annotation may have."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _list_models(part)

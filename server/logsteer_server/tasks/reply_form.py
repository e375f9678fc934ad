"""Structured outputs: check that a JSON Schema can be forced, and that a reply conforms to it.

A grammar forces the form while tokens are sampled. xgrammar, which compiles it, silently ignores
keywords that it does not support. This module refuses such schemas and names the keyword; the
supported ones were determined by testing each keyword with texts that violate it. A reply that
ended by itself is validated again.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import product
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from logsteer.errors import api_error

MAX_SCHEMA = 2**16
"""Most characters of a JSON Schema."""
MAX_ATOMS, MAX_ALL_ATOMS = 2**9, 2**13
"""Most characters of a regular expression with its repetitions expanded, and of all expressions in
all samples. vLLM compiles a schema between two steps, once a sample: `(a|b)*a(a|b){2000}` takes
3 s."""
NESTED = 4
MAX_LEFT_OUT, MAX_COUNTED = 2**8, 2**6
"""Most optional properties of an object, and of an object with minProperties or maxProperties.
2,000 of the former, or 300 of the latter, take minutes to compile."""
MAX_CHECKS = 2**18
"""Most keywords checked on a reply: about a second. Nested `oneOf` may take years."""
_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\d{0,9},?\d{0,9}\}|\(\?<?[=!]|.", re.DOTALL)

_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_FORCED = {
    "object": {
        "properties", "required", "additionalProperties", "unevaluatedProperties",
        "patternProperties", "propertyNames", "minProperties", "maxProperties",
    },
    "array": {"items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"},
    "string": {"pattern", "minLength", "maxLength", "format"},
    "number": _BOUNDS,
    "integer": _BOUNDS,
    "boolean": set(),
    "null": set(),
}  # fmt: skip
"""Type -> keywords that are forced together with it."""
_ALONE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""Keywords that are forced only without other keywords."""
_UNFORCED = {
    "$dynamicRef", "$recursiveRef", "additionalItems", "contains", "dependencies", "if", "not",
    "dependentRequired", "dependentSchemas", "multipleOf", "uniqueItems",
}  # fmt: skip
_KEYWORDS = {"type", *_ALONE, *_UNFORCED}.union(*_FORCED.values()) - {"format"}
"""Keywords that constrain a text; all others are annotations."""
_REST = ("additionalProperties", "unevaluatedProperties", "unevaluatedItems")
_APART = [
    *product(("pattern", "format"), ("minLength", "maxLength")),
    *product(("patternProperties", "propertyNames"), ("properties",)),
    *product(("propertyNames",), ("patternProperties", "unevaluatedProperties")),
]
"""Pairs of keywords of which the grammar ignores one."""
_FORMATS = {
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri",
    "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
}  # fmt: skip
_ANCHORS = {rf"\{letter}" for letter in "AzZ"}
_MISREAD = {"(?=", "(?!", "(?<=", "(?<!", '"', *(rf"\{letter}" for letter in '"\\nrtfv')} | _ANCHORS
"""Parts of a regular expression that the grammar misinterprets: lookaround, characters that JSON
escapes, and Python's anchors, which it treats as letters."""


def check_forced(schema: str, samples: int, param: str) -> None:
    """Refuse a JSON Schema with an unforced part, or whose grammar would be slow to compile.

    Errors: APIError `invalid_request`, which names `param` and the fault.
    """
    try:
        fault = next(_find_faults(schema, samples), None)
    except (AttributeError, KeyError, TypeError) as error:
        fault = f"a value that no JSON Schema has ({error!s:.80})"
    except CycleError:
        fault = "a `$ref` that leads back to itself before it allows any text"
    if fault is not None:
        detail = f"{param}: its JSON Schema has {fault}; write it without that."
        raise api_error("invalid_request", detail, param=param)


def check_regex(pattern: str, samples: int, param: str) -> None:
    """Refuse a regular expression that the grammar misinterprets, or that is slow to match.

    Errors: APIError `invalid_request`, which names `param` and the fault.
    """
    fault = next((found for found in _PART.findall(pattern) if found in _ANCHORS), None)
    size = _count_atoms(pattern)
    limit = MAX_ATOMS if re.search(r"(?<!\\)[*+{]", pattern) else MAX_ALL_ATOMS
    if size > limit or size * samples > MAX_ALL_ATOMS:
        fault = f"{size} characters unfolded, at most {limit}, {MAX_ALL_ATOMS} in all samples"
    try:
        if _count_nested(_parser.parse(pattern)) > 2:
            fault = "repetitions without an end within one another, or of what may be empty"
    except (re.error, RecursionError, OverflowError) as error:
        fault = f"a fault, {error!s:.80}"
    if fault is not None:
        detail = f"{param}: the regular expression has {fault}; write it without that."
        raise api_error("invalid_request", detail, param=param)


def _count_nested(part: Any) -> float:
    """Return how deeply unbounded repetitions are nested in a parsed expression.

    A repetition of something that may be empty counts as infinitely deep: to match 400 characters
    with `(a*)*` takes 10 s.
    """
    deepest = 0.0
    for kind, given in part:
        values = given if isinstance(given, tuple) else ()
        inner = [
            each for value in values for each in (value if isinstance(value, list) else [value])
        ]
        nested = max(
            (_count_nested(each) for each in inner if hasattr(each, "getwidth")), default=0
        )
        if "REPEAT" in str(kind) and given[1] == _constants.MAXREPEAT:
            nested += 1 if given[2].getwidth()[0] else math.inf
        deepest = max(deepest, nested)
    return deepest


def _find_faults(schema: str, samples: int) -> Iterator[str]:
    """Yield the faults of a schema, each schema in it checked once.

    Errors: AttributeError, KeyError, TypeError for an invalid schema; CycleError.
    """
    if len(schema) > MAX_SCHEMA:
        yield f"{len(schema)} characters, at most {MAX_SCHEMA} are compiled"
    root = json.loads(schema)
    todo, leads, total = [root], dict[int, list[int]](), 0
    for part in todo:  # grows
        if not isinstance(part, dict) or id(part) in leads:
            continue
        yield from (f"{fault}, which cannot be forced" for fault in _find_unforced(part))
        named, properties = part.get("patternProperties", {}), part.get("properties", {})
        for size in map(_count_atoms, [*named, part.get("pattern", "")]):
            total += size * samples
            if size > MAX_ATOMS:
                yield f"a pattern that unfolds to {size} characters, at most {MAX_ATOMS} do"
        left_out = len(properties) - len(part.get("required", ()))
        is_counted = "minProperties" in part or "maxProperties" in part
        if left_out > (MAX_COUNTED if is_counted else MAX_LEFT_OUT):
            limit = f"{MAX_LEFT_OUT}, and {MAX_COUNTED} beside minProperties or maxProperties"
            yield f"an object of which {left_out} properties are not required, at most {limit}"
        choices = [each for name in ("anyOf", "oneOf", "allOf") for each in part.get(name, ())]
        if "$ref" in part:
            choices = [_look_up(root, part["$ref"])]
            if choices == [None]:
                yield f"a `$ref` to nothing in it, {part['$ref']!r:.80}"
        leads[id(part)] = list(map(id, choices))
        inner = [*properties.values(), *named.values(), *part.get("prefixItems", ()), *choices]
        todo += inner + [part.get(name) for name in ("items", *_REST)]
        if "propertyNames" in part:
            todo.append({"type": "string"} | part["propertyNames"])
    if total > MAX_ALL_ATOMS:
        yield f"patterns that unfold to {total} characters, all samples, at most {MAX_ALL_ATOMS} do"
    TopologicalSorter(leads).prepare()


def _find_unforced(part: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of one schema that are not forced, without its subschemas. Errors: as
    `_find_faults`.
    """
    given = part.get(
        "type", "object" if "properties" in part else "array" if "items" in part else []
    )
    types = [given] if isinstance(given, str) else given
    forced = {"type"}.union(*(_FORCED[name] for name in types))
    alone = next((name for name in _ALONE if name in part), None)
    if alone is not None:
        forced = {alone, "type"} if alone in ("enum", "const") else {alone}
        yield from (f"`{alone}` without an entry" for _ in (0,) if part[alone] == [])
    for name in sorted(part.keys() & _KEYWORDS - forced):
        lacks_type = "" if name in _UNFORCED else " without its `type`"
        yield f"`{name}` beside `{alone}`" if alone else f"`{name}`{lacks_type}"
    yield from ("`allOf` of several" for _ in part.get("allOf", ())[1:])
    yield from (f"`{one}` beside `{other}`" for one, other in _APART if {one, other} <= part.keys())
    described = part.get("properties", {})
    for name in part.get("required", ()):
        if name not in described:
            yield f"`required` {name!r:.80} without its entry in `properties`"
    named = list(part.get("patternProperties", ()))
    yield from ("`patternProperties` of several patterns" for _ in named[1:])
    for pattern in (part.get("pattern", ""), *named):
        yield from (
            f"{found} in a pattern" for found in _PART.findall(pattern) if found in _MISREAD
        )
    if "string" in types and part.get("format", "date") not in _FORMATS:
        yield f"the `format` {part['format']!r:.80}"


def _look_up(root: Any, reference: str) -> Any:
    """Resolve a reference as xgrammar does; return None if it does not exist."""
    first, *names = reference.split("/")
    found = root if first == "#" else None
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _count_atoms(pattern: str) -> int:
    """Count the characters and classes of a regular expression with its repetitions expanded.

    Nested repetitions count `NESTED` times: ([a-z]{1,30}){1,30} takes 2 s to compile.
    """
    sizes, weights, last, weight = [0], [1], 0, 1
    for part in _PART.findall(pattern):
        if part == "(":
            sizes.append(0)
            weights.append(1)
            continue
        if part in ("|", "?", "*", "+"):
            continue
        if part == ")" and len(sizes) > 1:
            last, weight = sizes.pop(), weights.pop()
            weights[-1] = max(weights[-1], weight)
        elif found := re.fullmatch(r"\{(\d*),?(\d*)\}", part):
            sizes[-1] -= last
            last *= weight * int(found[2] or found[1] or 1)
            weights[-1], weight = NESTED, 1
        else:
            last, weight = 1, 1
        sizes[-1] += last
    return sum(sizes)


def check_reply(schema: str, text: str) -> None:
    """Refuse a reply that does not conform to its JSON Schema.

    Patterns are left to the grammar: matching them in Python may take years. Errors: APIError
    `unsupported_by_engine`.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.validators import create
    from referencing import Registry

    count = itertools.count(1)

    def bound(check: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            if next(count) > MAX_CHECKS:
                raise ValueError("it takes too long to tell")
            return () if "patternProperties" in given[-1] else check(*given)

        return run

    own = {name: bound(check) for name, check in Draft202012Validator.VALIDATORS.items()}
    kind = create({}, own | {"pattern": lambda *_: ()})  # no schema has a name of its own
    try:
        faults = kind(json.loads(schema), registry=Registry()).iter_errors(json.loads(text))
        reason = next((f"{fault.json_path}: {fault.message:.200}" for fault in faults), None)
    except (ValueError, RecursionError) as error:
        reason = str(error)[:200]
    if reason is not None:
        detail = (
            f"The reply does not follow its JSON Schema: {reason}. The engine's grammar let it "
            "through: say the schema by other keywords, or send another seed."
        )
        raise api_error("unsupported_by_engine", detail)

"""JSON Schemas that replies follow: what of them can be forced, and whether a reply does.

A grammar forces the form while tokens are drawn. xgrammar, which makes it, silently leaves out what
it has no rules for. Such a schema is refused here, by the keyword's name; what is forced was found
by trying each keyword on texts that break it. A reply that ended by itself is checked again.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import Any

from logsteer.errors import APIError, api_error

MAX_SCHEMA = 2**16
"""Characters of a JSON Schema that is forced."""
MAX_ATOMS, MAX_ALL_ATOMS = 2**9, 2**13
"""Characters of a regular expression with its repetitions written out, and of all of them in all
samples. vLLM reads a schema between two steps, once a sample: `(a|b)*a(a|b){2000}` takes 3 s."""
NESTED = 4
MAX_LEFT_OUT, MAX_COUNTED = 2**8, 2**6
"""Properties of an object that may be left out, and those of one that says how many it has. 2,000
of the former, or 300 of the latter, take minutes to compile, one schema after another."""
MAX_CHECKS = 2**18
"""Keywords that a reply is compared with: about a second. `oneOf` within itself may take years."""
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
}  # fmt: skip
"""What is forced beside each type."""
_ALONE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""What is forced without anything beside it; in this order, the first that is there."""
_APART = [
    *product(("pattern", "format"), ("minLength", "maxLength")),
    *product(("patternProperties", "propertyNames"), ("properties",)),
    *product(("propertyNames",), ("patternProperties", "unevaluatedProperties")),
]
"""Pairs of which one is left out where both are there."""
_FORMATS = {
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri",
    "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
}  # fmt: skip
_UNFORCED_IN_PATTERNS = frozenset(
    ("(?=", "(?!", "(?<=", "(?<!", '"', *(rf"\{letter}" for letter in '"\\nrtfvAzZ'))
)
"""Parts of a regular expression that the grammar reads as something else: what looks ahead, what
JSON has to escape, and anchors of Python's that are letters to it."""


def check_cost(schema: str, samples: int, param: str) -> None:
    """Refuse a JSON Schema whose grammar would take long to make.

    Errors: APIError `invalid_request`, which names `param`.
    """

    def refuse(found: str, limit: object) -> APIError:
        detail = f"{param}: its JSON Schema has {found}, at most {limit} are compiled: simplify it."
        return api_error("invalid_request", detail, param=param)

    if len(schema) > MAX_SCHEMA:
        raise refuse(f"{len(schema)} characters", MAX_SCHEMA)
    total, parts = 0, [json.loads(schema)]
    while parts:
        part = parts.pop()
        if not isinstance(part, dict):
            parts += part if isinstance(part, list) else []
            continue
        parts += part.values()
        named = part.get("patternProperties")
        for pattern in (part.get("pattern"), *(named if isinstance(named, dict) else ())):
            if isinstance(pattern, str):
                size = _count_atoms(pattern)
                total += size * samples
                if size > MAX_ATOMS:
                    raise refuse(f"a pattern that unfolds to {size} characters", MAX_ATOMS)
        if isinstance(properties := part.get("properties"), dict):
            required = part.get("required")
            left_out = len(properties) - (len(required) if isinstance(required, list) else 0)
            is_counted = "minProperties" in part or "maxProperties" in part
            if left_out > (MAX_COUNTED if is_counted else MAX_LEFT_OUT):
                limit = f"{MAX_LEFT_OUT}, and {MAX_COUNTED} beside minProperties or maxProperties,"
                raise refuse(f"an object of which {left_out} properties are not required", limit)
    if total > MAX_ALL_ATOMS:
        raise refuse(f"patterns that unfold to {total} characters, all samples", MAX_ALL_ATOMS)


def _count_atoms(pattern: str) -> int:
    """Count the characters and classes of a regular expression, its repetitions written out.

    One within another counts `NESTED` times: ([a-z]{1,30}){1,30} takes 2 s to compile.
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


def check_forced(schema: str, param: str) -> None:
    """Refuse a JSON Schema of which the grammar would leave out a part.

    Errors: APIError `invalid_request`, which names `param`, and the keyword with its place.
    """
    root = json.loads(schema)
    todo: list[tuple[str, Any]] = [("#", root)]
    leads: dict[int, list[int]] = {}
    for place, part in todo:  # grows
        if not isinstance(part, dict) or id(part) in leads:
            continue
        alone = next((name for name in _ALONE if name in part), None)
        found = part.get(alone)
        try:
            fault = _find_fault(part, alone)
        except (AttributeError, TypeError):
            fault = "a value that no JSON Schema has"
        choices: list[tuple[str, Any]] = []
        if alone == "$ref":
            choices = [(str(found), _look_up(root, found))]
            fault = fault or (None if choices[0][1] is not None else f"no place {found!r:.80}")
        elif alone in ("anyOf", "oneOf", "allOf") and isinstance(found, list):
            choices = [(f"{place}/{alone}/{n}", each) for n, each in enumerate(found)]
        if fault:
            detail = (
                f"{param}: its JSON Schema has {fault} at {place[:80]}, which cannot be forced: "
                "leave it out, or say it by types with keywords of their own, by enum, or by anyOf "
                "of whole schemas."
            )
            raise api_error("invalid_request", detail, param=param)
        leads[id(part)] = [id(each) for _, each in choices]
        todo += choices or _list_inner(place, part)
    try:
        TopologicalSorter(leads).prepare()
    except CycleError as error:
        detail = (
            f"{param}: its JSON Schema has a $ref that leads back to itself before it allows any "
            "text, so that no reply follows it: let it refer to another schema."
        )
        raise api_error("invalid_request", detail, param=param) from error


def _find_fault(part: dict[str, Any], alone: str | None) -> str | None:
    """Return what of a schema is not forced, without those within it."""
    asserted = part.keys() & _list_assertions()
    given = part.get("type", [])
    types = [given] if isinstance(given, str) else given
    if unknown := set(types) - {*_FORCED, "boolean", "null"}:
        return f"`type` {min(unknown)!r:.80}"
    if alone is not None:
        beside = sorted(asserted - {alone} - ({"type"} if alone in ("enum", "const") else set()))
        if beside:
            return f"`{beside[0]}` beside `{alone}`"
        if part[alone] == []:
            return f"`{alone}` without an entry"
        return "`allOf` of several" if alone == "allOf" and len(part[alone]) > 1 else None
    types = types or ["object"] * ("properties" in part) or ["array"] * ("items" in part)
    unforced = sorted(asserted - {"type"}.union(*(_FORCED.get(name, ()) for name in types)))
    if unforced:
        needs_type = not types and any(unforced[0] in names for names in _FORCED.values())
        return f"`{unforced[0]}`" + " without `type`" * needs_type
    for first, second in _APART:
        if first in part and second in part:
            return f"`{first}` beside `{second}`"
    if missing := {*part.get("required", ())} - {*part.get("properties", ())}:
        return f"`required` {min(missing)!r:.80} without its entry in `properties`"
    named = part.get("patternProperties", {})
    if len(named) > 1:
        return "`patternProperties` of several patterns"
    for pattern in (part.get("pattern", ""), *named):
        if read_wrong := _UNFORCED_IN_PATTERNS.intersection(_PART.findall(pattern)):
            return f"{min(read_wrong)} in the pattern {pattern!r:.80}"
    if "string" in types and part.get("format", "date") not in _FORMATS:
        return f"the `format` {part['format']!r:.80}"
    return None


@cache
def _list_assertions() -> frozenset[str]:
    """Return the keywords of JSON Schema, of any draft, that a text may break."""
    from jsonschema import Draft4Validator, Draft201909Validator, Draft202012Validator

    drafts = (Draft4Validator, Draft201909Validator, Draft202012Validator)
    return frozenset(name for draft in drafts for name in draft.VALIDATORS) - {"format"}


def _look_up(root: Any, reference: Any) -> Any:
    """Return what a reference names, as xgrammar looks for it; None: nothing."""
    names = reference.split("/") if isinstance(reference, str) else [""]
    for name in names[1:]:
        root = root.get(name) if isinstance(root, dict) else None
    return root if names[0] == "#" else None


def _list_inner(place: str, part: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the schemas of what stands in an object or a list, with their places."""
    found = []
    for name, value in part.items():
        if name in ("properties", "patternProperties") and isinstance(value, dict):
            found += [(f"{place}/{name}/{key}", each) for key, each in value.items()]
        elif name == "prefixItems" and isinstance(value, list):
            found += [(f"{place}/{name}/{n}", each) for n, each in enumerate(value)]
        elif name == "propertyNames" and isinstance(value, dict):
            found.append((f"{place}/{name}", {"type": "string"} | value))
        elif name in _FORCED["object"] | _FORCED["array"]:
            found.append((f"{place}/{name}", value))
    return found


def check_reply(schema: str, text: str) -> None:
    """Refuse a reply that its JSON Schema does not describe.

    Patterns are the grammar's alone: Python's may take years. Errors: APIError
    `unsupported_by_engine`.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.validators import create
    from referencing import Registry

    num_checks = 0

    def bound(check: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            nonlocal num_checks
            num_checks += 1
            if num_checks > MAX_CHECKS:
                raise ValueError("it takes too long to tell")
            return () if "patternProperties" in given[-1] else check(*given)

        return run

    own = {name: bound(check) for name, check in Draft202012Validator.VALIDATORS.items()}
    validator = create({}, own | {"pattern": lambda *_: ()})  # no schema has a name of its own
    try:
        instance = json.loads(text)
        faults: Iterator[Any] = validator(json.loads(schema), registry=Registry()).iter_errors(
            instance
        )
        reason = next((f"{fault.json_path}: {fault.message:.200}" for fault in faults), None)
    except (ValueError, RecursionError) as error:
        reason = str(error)[:200]
    if reason is not None:
        detail = (
            f"The reply does not follow its JSON Schema: {reason}. The engine's grammar let it "
            "through: say the schema by other keywords, or send another seed."
        )
        raise api_error("unsupported_by_engine", detail)

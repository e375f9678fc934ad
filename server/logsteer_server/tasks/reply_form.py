"""Structured outputs: check that a reply can be forced into a form, and that it has that form.

llguidance forces the form while the vLLM engine samples, and refuses what it does not support. Here
it does the latter before a request is planned, and reads whole replies again, byte by byte.
"""

import json
from typing import Any

from logsteer.errors import api_error
from logsteer.schemas.openai import SamplingRequest
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import ReplyForm
from logsteer_server.interventions.references import check_feature
from logsteer_server.tasks.tool_calls import find_form

MAX_FORM, MAX_ALL_FORMS = 2**16, 2**18
"""Most characters of a form, and of those of all samples, each of which compiles its own."""
MAX_GRAMMAR = 20_000
"""Most symbols of a compiled grammar: some 0.1 s and 10 MB."""
LARGEST = {
    "minItems": 2**12,
    "maxItems": 2**12,
    "multipleOf": 2**12,
    "properties": 2**8,
    "patternProperties": 2**6,
}
"""Largest number, or most entries, of keywords that compile in more than proportional time."""
DATA = ("const", "enum")
"""Keywords with instances, not schemas."""
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""JSON without white space between its parts, which a model may never end."""


def plan_form(request: SamplingRequest, samples: int, info: EngineInfo) -> ReplyForm | None:
    """Return the form that all `samples` of a request must have; None for any reply.

    Errors: APIError `invalid_request` for a form that cannot be forced, or takes long to compile;
    `unsupported_by_engine`.
    """
    form = find_form(request)
    if form is None:
        return None
    is_tool = getattr(request, "tool_choice", "none") not in ("none", "auto")
    param = "tool_choice" if is_tool else "response_format"
    check_feature("structure", info, param)
    kind, text = form
    try:
        if len(text) > MAX_FORM or len(text) * samples > MAX_ALL_FORMS:
            limits = f"at most {MAX_FORM}, and {MAX_ALL_FORMS} in all samples"
            raise ValueError(f"it has {len(text)} characters, {limits}")
        if kind == "json":
            text = json.dumps(_close(json.loads(text)) | COMPACT)
        matcher = _compile((kind, text))
        matcher.compute_bitmask()
        if fault := matcher.get_error():
            raise ValueError(fault)
    except (ValueError, RecursionError) as error:
        told = str(error).partition("\n<state>")[0].replace("NoExtensionBias", "no text has it")
        reason = " ".join(told.split())[:400]
        detail = f"{param}: this form cannot be forced: {reason}. Write it without that."
        raise api_error("invalid_request", detail, param=param) from error
    return kind, text


def _close(part: Any) -> Any:
    """Return a schema whose objects have the described properties alone, unless it says otherwise.

    Errors: ValueError for a keyword beyond `LARGEST`.
    """
    if isinstance(part, list):
        return list(map(_close, part))
    if not isinstance(part, dict):
        return part
    for name, largest in LARGEST.items():
        size = part.get(name)
        size = len(size) if isinstance(size, dict) else size
        if isinstance(size, int | float) and size > largest:
            raise ValueError(f"`{name}` has {size}, at most {largest}")
    closed = {name: value if name in DATA else _close(value) for name, value in part.items()}
    if "properties" in part or "patternProperties" in part:
        closed.setdefault("additionalProperties", False)
    return closed


def _compile(form: ReplyForm) -> Any:
    """Return llguidance's matcher of a form, whose tokens are bytes."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    kind, text = form
    write = LLMatcher.grammar_from_json_schema if kind == "json" else LLMatcher.grammar_from_regex
    limits = LLParserLimits(max_grammar_size=MAX_GRAMMAR)
    return LLMatcher(LLTokenizer("byte"), write(text), log_level=0, limits=limits)


def check_reply(form: ReplyForm, text: str) -> None:
    """Refuse a reply without its form: llguidance ends one where its lexer reaches a limit.

    Errors: APIError `unsupported_by_engine`.
    """
    matcher = _compile(form)
    if not (matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()):
        detail = (
            "The reply does not have its form: the engine could not follow that to the end. Say it "
            "by simpler patterns or fewer alternatives, or send another seed."
        )
        raise api_error("unsupported_by_engine", detail)

"""Writes the client's code that follows from other code: `make client`.

`_async_methods.py` follows from the table of endpoints: a method's parameters are the fields of its
endpoint's messages, its docstring their descriptions. Those of `CONVENIENCES` have parameters of
their own, too, and do what is written by hand in `_async_caller`. What blocks follows from what
awaits: the files of `BLOCKING` are written from their twins by unasync, which takes `async` and
`await` away.
"""

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from logsteer import _endpoints, schemas
from logsteer._calls import Parameter, find_texts, list_parameters, takes_texts
from logsteer._endpoints import ENDPOINTS, Content, Endpoint
from logsteer.schemas.chat import CHAT_FIELDS


@dataclass(frozen=True)
class Convenience:
    """A method that is written by hand as `_NAME`, with options of an endpoint: all `without` some.

    `own` are its own parameters, with type and default as they are written.
    """

    name: str
    endpoint: str
    own: tuple[Parameter, ...]
    without: frozenset[str]
    answer: str
    summary: str
    notes: str = ""


_TARGETS = Parameter("targets", "str | Sequence[str]", "Texts to score; one string is one target.")
_ITEMS = Parameter(
    "items",
    "str | Sequence[str | ActivationItem | Mapping[str, Any]]",
    "Texts, one string being one text; or objects with `token_ids` or `messages`.",
)
_LAYERS = Parameter(
    "layers", "Sequence[int] | None", "Layers to read, 0-based; None with `sae`.", default="None"
)
CONVENIENCES = (
    Convenience(
        "score",
        "logprob",
        (Parameter("context", "str", "The text before the targets."), _TARGETS),
        frozenset({"items", "on_error", *CHAT_FIELDS}),
        "ItemScore",
        "Score targets after one context: `logprob` for a single item.",
    ),
    Convenience(
        "get_log_prob",
        "logprob",
        (
            Parameter("prompts", "str | Sequence[str]", "Contexts; one string is one prompt."),
            _TARGETS,
            Parameter(
                "space",
                "SpacePolicy",
                "`best`: each target with or without one leading space, whichever is more "
                "probable; `both`: each of the two; or `as_given`.",
                True,
                default='"best"',
            ),
        ),
        frozenset(
            {"items", "on_error", "columns", "policy", "top", "per_token", "probes", "space"}
            | {*CHAT_FIELDS}
        ),
        "LogProbs",
        "Return one record per prompt and target, prompt by prompt, in the order given.",
        "A record is a dictionary with attributes: prompt, target, sequence (the text that was "
        "scored), log_prob, prob, num_tokens, perplexity (exp of minus the summed log_prob), "
        "token_perplexity, boundary and log_prob_any_space. With space `both` a target has two: "
        "with one leading space, then without. One request scores them all; each prompt is "
        "computed once.",
    ),
    Convenience(
        "sample",
        "generate",
        (
            Parameter(
                "source",
                "PromptSource",
                "A list of prompts or of rows, a path of JSON lines or Parquet, or `KIND:NAME` of "
                "`logsteer.extras.datasets`.",
            ),
            Parameter(
                "field", "str", "The field that holds a row's prompt.", True, default="PROMPT"
            ),
            Parameter(
                "count", "int | None", "Prompts to draw; None: all in order.", True, default="None"
            ),
            Parameter(
                "with_replacement",
                "bool",
                "Whether a prompt may be drawn again.",
                True,
                default="False",
            ),
            Parameter(
                "max_prompts_pool",
                "int | None",
                "Rows of the source that are drawn from, its first ones; None: all.",
                True,
                default="None",
            ),
            Parameter(
                "reward",
                "Reward | None",
                "Called with a row of the source, its prompt and the text of a continuation; "
                "returns a number, or what is awaited for it. `reward_error` of a sample says "
                "sample's `reward_error`.",
                True,
                default="None",
            ),
            Parameter("batch_size", "int", "Prompts of one request.", True, default="32"),
            Parameter("concurrency", "int", "Requests under way at once.", True, default="4"),
            Parameter(
                "max_failures",
                "int",
                "Failed requests in a row after which no further one is sent.",
                True,
                default="8",
            ),
            Parameter("progress", "bool", "Whether a terminal shows a bar.", True, default="True"),
        ),
        frozenset({"prompts", "prompt_ids", "messages", "on_error"}),
        "Samples",
        "Continue prompts drawn from a source, and give each continuation its reward.",
        "Each of a prompt's `n` continuations has its own seed, which follows from `seed` (default "
        "0) and does not depend on the batch. A failed request loses its own prompts; a refused "
        "one is halved, until only the refused prompt is lost. A warning and the result's "
        "`failures` name them. Raises the first error if no sample was drawn. "
        "`logsteer.score_file` draws the same continuations of a file's prompts, and resumes where "
        "it was interrupted.",
    ),
    Convenience(
        "teacher",
        "logprob",
        (
            Parameter(
                "sequences", "Sequence[Sequence[int]]", "Token ids of prompts with completions."
            ),
            Parameter("prompt_lengths", "Sequence[int]", "Tokens of each one's prompt, unscored."),
            Parameter("top", "int", "Most probable tokens listed at each token.", default="64"),
            Parameter(
                "alternatives",
                "Sequence[Any] | None",
                "For each sequence the tokens [T, K] whose log-probabilities are read.",
                default="None",
            ),
            Parameter(
                "temperature", "float", "All are of softmax(logits / temperature).", default="1.0"
            ),
        ),
        frozenset(
            {"items", "top", "policy", "columns", "detokenize", "vocabulary", "per_token", "probes"}
            | {"boundary", "space", "bos", "on_error", "on_overflow", "step_tokens", *CHAT_FIELDS}
        ),
        "TeacherScores",
        "Return a teacher's log-probabilities of completions as numpy arrays, for distillation.",
        "One request of ids, answered by arrays alone. Every sequence has the same number K of "
        "alternatives.",
    ),
    Convenience(
        "activations",
        "activations",
        (_ITEMS, _LAYERS),
        frozenset({"items", "layers"}),
        "Activations",
        "Return the activations of texts as numpy arrays: of each token, the last, or their mean.",
        "With `sae`, the strongest features of each token. A path is a text like any other here; "
        "`capture` reads files.",
    ),
    Convenience(
        "capture",
        "captures.start",
        (
            Parameter(
                "source",
                "PromptSource",
                "A list of texts or of rows, a path of JSON lines or Parquet, `KIND:NAME` of "
                "`logsteer.extras.datasets`, or `store://PATH` of the server.",
            ),
            Parameter("name", "str", "What the data set of activations is called."),
            Parameter("layers", "Sequence[int]", "Layers to read, 0-based."),
            Parameter(
                "directory",
                "str | PathLike[str] | None",
                "Where the shards and their index are downloaded to; None: they stay on the "
                "server.",
                default="None",
            ),
            Parameter(
                "field",
                "str",
                "The field that holds a row's text or conversation.",
                True,
                default='"text"',
            ),
            Parameter("progress", "bool", "Whether a terminal shows a bar.", True, default="True"),
        ),
        frozenset({"name", "items", "layers", "source"}),
        "CaptureIndex",
        "Capture the activations of a source's rows on the server, wait for it, return its index.",
        "The server reads on if the caller is gone, and resumes after a restart: the same call "
        "again waits for the same job, and downloads what is missing. "
        "`ActivationShards.of_directory` of `logsteer.extras.activations` reads the directory.",
    ),
    Convenience(
        "activation_loader",
        "captures.index",
        (
            Parameter("name", "str", "What the data set of activations is called."),
            Parameter("batch_size", "int", "Rows of a batch."),
            Parameter(
                "shuffle_buffer",
                "int",
                "Rows that are mixed at a time; 0: all in order.",
                default="0",
            ),
            Parameter(
                "layer", "int | None", "Whose activations; None: the only one.", default="None"
            ),
            Parameter(
                "directory",
                "str | PathLike[str] | None",
                "Where shards are kept that were downloaded; None: they are read from the server "
                "each time.",
                default="None",
            ),
            Parameter("seed", "int", "Of the order.", True, default="0"),
            Parameter(
                "repeat", "bool", "Whether it begins again at the end.", True, default="False"
            ),
        ),
        frozenset({"name"}),
        "Any",
        "Return a torch `IterableDataset` of batches [batch, width] of captured activations.",
        "`iter` of it is what SAELens' SAETrainer takes as `data_provider` and "
        "dictionary_learning's trainSAE as `data`. It takes torch.",
    ),
)


WIDTH = 100
HERE = Path(__file__).parent / "logsteer"
METHODS = "_async_methods.py"
BLOCKING = {
    "_async_caller.py": "_sync_caller.py",
    METHODS: "_sync_methods.py",
    "async_client.py": "client.py",
}
"""File that awaits -> the file that is written from it, which blocks."""
_WITHOUT_ASYNC = {
    "aclose": "close", "aclosing": "closing", "aiter_bytes": "iter_bytes",
    "aread": "read", "async_chunks": "chunks", "anext": "next", "asyncio": "time",
    "sample_in_tasks": "sample_in_threads", "_async_caller": "_sync_caller",
    "_async_methods": "_sync_methods",
}  # fmt: skip
"""Names that differ, beside those with Async in front."""
_OWN_WORDS = {
    "The client for asyncio: the arguments and methods of `logsteer.client.Client`.":
        "The client that blocks; `logsteer.async_client` has its twin for asyncio.",
    "A client for asyncio of one server.":
        "A blocking client of one server; threads may share it.",
}  # fmt: skip
"""What is true of one client only -> what is of the other."""

RESOURCES = {
    "vectors": "VectorMethods",
    "overrides": "Overrides",
    "adapters": "Adapters",
    "saes": "Saes",
    "captures": "Captures",
    "variants": "Variants",
}
"""Resource -> the class with its methods; a further method of vectors is written by hand."""

_SOURCES: Mapping[Content, str] = {
    "text": "AsyncSource", "file": "AsyncSource | bytes", "form": "str | PathLike[str]",
}  # fmt: skip
_ALIASES = {
    repr(value): name for name, value in vars(schemas).items() if get_origin(value) is Literal
}
"""The names that the schemas have for sets of values."""
_LIKE = {schemas.Steering: "SteeringLike", schemas.ContrastPair: "PairLike"}
"""What has shorter forms -> the name of all of them."""


EVENTS_NOTE = (
    "The request is sent when the first event is requested. Close the generator to stop early."
)

_HEAD = '''"""The methods of `AsyncClient` that ask one endpoint each.

Written by `make client` from the table of endpoints and the schemas: change those.
"""

# mypy: disable-error-code="no-any-return"
# What an endpoint is answered with is of the type that the table of endpoints has for it.

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from os import PathLike
from typing import Any

from logsteer._async_caller import AsyncCaller, AsyncStoreMethods
from logsteer._endpoints import GenerateEvent, PerplexityEvent, SelftestEvent, SteerEvent
from logsteer._pairs import LogProbs
from logsteer._calls import NOT_GIVEN, NotGiven
from logsteer._upload import AsyncSource
from logsteer.extras.activations import Activations
from logsteer.extras.datasets import PROMPT
from logsteer.extras.datasets import Source as PromptSource
from logsteer.extras.sampling import Reward, Samples
from logsteer.extras.teacher import TeacherScores
from logsteer.schemas import (
{schemas}
)
'''


def render_methods() -> str:
    """Return the source of `_async_methods.py`."""
    text = "".join(_write_classes())
    used = sorted(name for name in schemas.__all__ if re.search(rf"\b{name}\b", text))
    return _tidy(_HEAD.format(schemas="\n".join(f"    {name}," for name in used)) + text)


def render_blocking(name: str, text: str) -> str:
    """Return the source of the module that blocks, from that of the one that awaits, `name`.

    Takes unasync and ruff, which those who change the project have.
    """
    import unasync  # type: ignore[import-untyped]

    for words, own in _OWN_WORDS.items():
        text = text.replace(words, own)
    text = re.sub(r"\bAsync(?=[A-Z])(?!Generator|Iterator)", "", text)  # in docstrings, too
    rule = unasync.Rule("/awaits/", "/blocks/", _WITHOUT_ASYNC)
    with TemporaryDirectory() as directory:
        source = Path(directory, "awaits", name)
        source.parent.mkdir()
        source.write_text(text)
        unasync.unasync_files([str(source)], [rule])
        made = Path(directory, "blocks", name).read_text()
    note = f"\n\nWritten by `make client` from `{name}`: change that."
    if name == METHODS:
        note = ""  # it says what it is written from
    return _tidy(made.replace('\n"""\n', f'{note}\n"""\n', 1) if note else made)


def _tidy(text: str) -> str:
    """Return the source with its imports and lines as ruff has them."""
    for command in (
        ["check", "--select=D200,I,UP028", "--fix-only", "--unsafe-fixes", "--quiet"],
        ["format"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", __file__, "-"],
            input=text, capture_output=True, text=True, check=True,
        )  # fmt: skip
        text = done.stdout
    return text


def render_all() -> dict[Path, str]:
    """Return every file that is written, with its source."""
    methods = render_methods()
    return {HERE / METHODS: methods} | {
        HERE / blocks: render_blocking(
            awaits, methods if awaits == METHODS else (HERE / awaits).read_text()
        )
        for awaits, blocks in BLOCKING.items()
    }


def _write_classes() -> Iterator[str]:
    yield "\n\nclass AsyncClientMethods(AsyncCaller):\n"
    yield '    """Methods of the client itself."""\n'
    for endpoint in ENDPOINTS.values():
        if "." not in endpoint.name:
            yield from _write_endpoint(endpoint)
    yield from map(_write_convenience, CONVENIENCES)
    for resource, name in RESOURCES.items():
        stored = [ENDPOINTS[f"{resource}.{verb}"].answer for verb in ("list", "get")]
        answers = ", ".join(answer.__name__ for answer in stored if answer)
        yield f"\n\nclass Async{name}(AsyncStoreMethods[{answers}]):\n"
        yield f'    """Methods of `AsyncClient.{resource}`."""\n\n'
        yield f'    _name = "{resource}"\n'
        for endpoint in ENDPOINTS.values():
            if endpoint.name.startswith(f"{resource}."):
                yield from _write_endpoint(endpoint)


def _write_endpoint(endpoint: Endpoint) -> Iterator[str]:
    """Yield the method of an endpoint, and the one that yields its events."""
    name = endpoint.name.rpartition(".")[2]
    arguments = [_spell_parameter(parameter) for parameter in list_parameters(endpoint)]
    values = ", ".join([f'"{endpoint.name}"', *(f"{one.name}={one.name}" for one in arguments)])
    if endpoint.summary:
        answer, body = "bytes", f"file = await self._ask({values})\nreturn file.data"
        if endpoint.answer:
            answer, body = endpoint.answer.__name__, f"return await self._ask({values})"
        doc = endpoint.summary, endpoint.notes
        yield _write_method(f"async def {name}", arguments, answer, doc, body)
    if endpoint.events_summary:
        doc = endpoint.events_summary, f"{endpoint.notes} {EVENTS_NOTE}".strip()
        name = f"{name}_events" if endpoint.answer else name
        answer = f"AsyncGenerator[{_name_event(endpoint)}, None]"
        body = f"return self._listen({values})"
        yield _write_method(f"def {name}", arguments, answer, doc, body)


def _write_convenience(convenience: Convenience) -> str:
    options = [
        _spell_parameter(replace(parameter, named=True, required=False))
        for parameter in list_parameters(ENDPOINTS[convenience.endpoint])
        if parameter.name not in convenience.without
    ]
    arguments = [*convenience.own, *options]
    values = [one.name for one in convenience.own] + [f"{one.name}={one.name}" for one in options]
    body = f"return await self._{convenience.name}({', '.join(values)})"
    doc = convenience.summary, convenience.notes
    head = f"async def {convenience.name}"
    return _write_method(head, arguments, convenience.answer, doc, body)


def _write_method(
    head: str, arguments: list[Parameter], answer: str, doc: tuple[str, str], body: str
) -> str:
    parameters = ["self"]
    for argument in arguments:
        if argument.named and "*" not in parameters:
            parameters.append("*")
        default = "" if argument.default is None else f" = {argument.default}"
        parameters.append(f"{argument.name}: {argument.type}{default}")
    lines = [f"{head}({', '.join(parameters)}) -> {answer}:"]
    lines += [textwrap.indent(part, "    ") for part in (_write_docstring(*doc, arguments), body)]
    return "\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def _write_docstring(summary: str, notes: str, arguments: list[Parameter]) -> str:
    width = WIDTH - 8
    parts = [_fill(f'"""{summary}', width)]
    if notes:
        parts.append(_fill(notes, width))
    if arguments:
        lines = [
            textwrap.indent(_fill(f"{one.name}: {one.description}", width - 8, "    "), "    ")
            for one in arguments
        ]
        parts.append("\n".join(["Args:", *lines]))
    return "\n\n".join(parts) + '\n"""'


def _fill(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _spell_parameter(parameter: Parameter) -> Parameter:
    """Return the parameter with its type, description and default as they are written."""
    if parameter.source is not None:
        spelled = _SOURCES[parameter.source]
    elif takes_texts(parameter):
        rest = get_args(parameter.type) if get_origin(parameter.type) in (Union, UnionType) else ()
        texts = _spell(find_texts(parameter.type))
        spelled = f"str | {texts}" + (" | None" if NoneType in rest else "")
    else:
        spelled = _spell(parameter.type)
    # Python's word for what JSON calls null.
    text = parameter.description.replace("null", "None").replace("Null", "None")
    if parameter.default is not None:
        text += f" Default {parameter.default}."
    default = None
    if not parameter.required:
        none = " | None" if spelled.endswith(" | None") else ""
        default, spelled = "NOT_GIVEN", f"{spelled.removesuffix(none)} | NotGiven{none}"
    return replace(parameter, type=spelled, description=text, default=default)


def _spell(kind: Any) -> str:
    """Return a type as callers may give it: any sequence for a list, a mapping for an object."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is NoneType:
        return "None"
    if origin in (Union, UnionType):
        return " | ".join(map(_spell, parts))
    if origin is list:
        return f"Sequence[{_spell(parts[0])}]"
    if origin is dict:
        return f"Mapping[{', '.join(map(_spell, parts))}]"
    if origin is Literal:
        return _ALIASES[repr(kind)]
    if kind in _LIKE:
        return _LIKE[kind]
    name: str = kind.__name__
    return f"{name} | Mapping[str, Any]" if issubclass(kind, BaseModel) else name


def _name_event(endpoint: Endpoint) -> str:
    types = set(endpoint.events.values())
    return next(n for n, value in vars(_endpoints).items() if set(get_args(value)) == types)


if __name__ == "__main__":
    for written, source in render_all().items():
        written.write_text(source)

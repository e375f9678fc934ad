"""Sequences of tokens in answers and what was read of each: what notebooks and plots draw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from logsteer.schemas import (
    Completion,
    ItemScore,
    LogprobAnswer,
    PerplexityAnswer,
    PromptCompletions,
    TargetScore,
    TextResult,
)
from logsteer.schemas.common import Float, RowColumns


@dataclass(frozen=True)
class Strip:
    """A sequence of T tokens: its title, their log-probabilities [T], columns and probes.

    `places` are further arrays [T] by name, such as ids.
    """

    title: str
    tokens: Sequence[str]
    logprobs: Sequence[Float]
    found: RowColumns
    places: Mapping[str, Sequence[int]]


@singledispatch
def list_strips(answer: Any, name: str = "") -> list[Strip]:
    """Return the sequences of tokens of an answer, `name` in front of their titles."""
    noun = "prompt"
    if isinstance(answer, LogprobAnswer | PerplexityAnswer):
        noun = "item" if isinstance(answer, LogprobAnswer) else "text"
    results = getattr(answer, "results", ())
    return [
        strip
        for number, result in enumerate(results)
        for strip in list_strips(result, f"{name}{noun} {number}, " if len(results) > 1 else name)
    ]


@list_strips.register
def _(target: TargetScore, name: str = "") -> list[Strip]:
    if not target.tokens or not target.logprobs:
        return []
    places = {} if target.token_ids is None else {"id": target.token_ids}
    return [Strip(f"{name}{target.target!r}", target.tokens, target.logprobs, target, places)]


@list_strips.register
def _(item: ItemScore, name: str = "") -> list[Strip]:
    return [strip for target in item.targets for strip in list_strips(target, name)]


@list_strips.register
def _(text: TextResult, name: str = "") -> list[Strip]:
    if (found := text.tokens) is None:
        return []
    tokens = found.tokens or [f"{number} " for number in found.token_ids]
    places = {"position": found.positions, "id": found.token_ids}
    return [Strip(name, tokens, found.logprobs, found, places)]


@list_strips.register
def _(made: Completion, name: str = "") -> list[Strip]:
    return [Strip(name, made.tokens, made.logprobs, made, {"id": made.token_ids})]


@list_strips.register
def _(result: PromptCompletions, name: str = "") -> list[Strip]:
    strips = []
    for number, made in enumerate(result.completions):
        if result.baseline is None:
            strips += list_strips(made, f"{name}completion {number}")
            continue
        strips += list_strips(made, f"{name}steered completion {number}")
        strips += list_strips(result.baseline[number], f"{name}unsteered completion {number}")
    return strips

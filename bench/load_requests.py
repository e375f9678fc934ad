"""The requests of `bench/load.py`, and what of their answers has to be equal."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

TOLERANCE = 1e-3
"""Nats by which a sum over a request's tokens may differ from that of the quiet server."""
WORDS = [
    "the",
    "little",
    "cat",
    "ran",
    "to",
    "see",
    "a",
    "big",
    "red",
    "ball",
    "and",
    "then",
    "went",
    "home",
    "with",
    "her",
    "friend",
]


@dataclass(frozen=True)
class Plan:
    """A request, and what is done with its answer. `refused`: the status that it is to have."""

    kind: str
    path: str
    body: Any
    refused: int | None = None


class RefusalError(Exception):
    """A problem document, as an answer or as the last event of a stream."""

    def __init__(self, status: int, problem: dict[str, Any], retry_after: float) -> None:
        super().__init__(f"{status} {problem.get('code')}: {problem.get('detail')}")
        self.status = status
        self.problem = problem
        self.retry_after = retry_after


def write_text(rng: random.Random, words: int) -> str:
    """Return so many words."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def draw_plans(rng: random.Random, models: Sequence[str], count: int) -> list[Plan]:
    """Draw requests of all kinds; equal ones are drawn again and again."""
    plans = []
    for n in range(count):
        model = models[n % len(models)]
        vector = [round(rng.gauss(0, 0.3), 3) for _ in range(WIDTHS[model])]
        steering = {"vectors": [{"data": {"1": vector}, "scale": rng.choice([0.5, 1.0])}]}
        item = {"context": write_text(rng, 12), "targets": [" cat", " red ball", " went home"]}
        text = write_text(rng, 400)
        generation = {"prompts": [write_text(rng, 6)], "max_tokens": 16, "seed": n}
        score = {"model": model, "items": [item]}
        drawn = {"model": model, "stream": True, **generation}
        clamp = {"data": {"1": vector}, "op": "clamp", "params": {"min": 1e308}}
        poison = {"model": model, "prompts": ["a"], "steering": {"vectors": [clamp]}}
        steered = {"steering": steering}
        plans += [
            Plan("score", "/logprob", score),
            Plan("steered score", "/logprob", score | steered),
            Plan("perplexity", f"/perplexity/stream?model={model}&context_length=64", text),
            Plan("steer", "/steer", drawn | steered),
            Plan("slow", "/generate", drawn),
            Plan("cancel", "/generate", drawn | {"n": 4}),
            Plan("sweep", "/sweep", score | steered | {"scales": [-1, 0, 1]}),
            Plan("upload", f"/vectors/load-{n}", vector),
            Plan("poison", "/steer", poison, 422),
            Plan("poison", "/logprob", {"model": model, "items": [{"context": 1}] * 50}, 422),
        ]
    return plans


WIDTHS = {"demo": 128, "bridge": 128, "stories": 64}


def read_numbers(kind: str, document: dict[str, Any]) -> Any:
    """Return what of an answer has to be equal: ids and texts as they are, and numbers."""
    match kind:
        case "score" | "steered score":
            return [t["logprobs"] for r in document["results"] for t in r["targets"]]
        case "perplexity":
            return [document["total"]["sum_logprob"], document["total"]["num_tokens"]]
        case "steer" | "slow":
            found = [c for r in document["results"] for c in r["completions"]]
            return [[c["token_ids"] for c in found], [c["logprobs"] for c in found]]
        case "sweep":
            return [t["logprob"] for p in document["points"] for i in p["items"]
                    for t in i["targets"]]  # fmt: skip
    return None


def differs(found: Any, wanted: Any) -> bool:
    """Return whether two answers differ by more than rounding."""
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return True
        return any(differs(a, b) for a, b in zip(found, wanted, strict=True))
    if isinstance(wanted, float):
        return not isinstance(found, float) or abs(found - wanted) > TOLERANCE
    return bool(found != wanted)


JSON = {"Content-Type": "application/json"}


def check(answer: httpx.Response) -> dict[str, Any]:
    """Return an answer's document. Errors: RefusalError."""
    if answer.status_code == 200:
        document: dict[str, Any] = answer.json()
        return document
    try:
        problem = answer.json()
    except ValueError:
        problem = {"detail": answer.text[:200]}
    raise RefusalError(answer.status_code, problem, float(answer.headers.get("retry-after", 0)))

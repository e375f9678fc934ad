"""What the README says of the demo model: it knows its facts, through the service."""

import pytest

import corpus
from logsteer import Client

pytestmark = pytest.mark.engine


def share_right(client: Client, questions: dict[str, str]) -> float:
    answers = [f" {answer}" for answer in dict.fromkeys(questions.values())]
    items = [{"context": question, "targets": answers} for question in questions]
    results = client.logprob(items, per_token=False).results
    right = [
        answers[result.best or 0] == f" {answer}"
        for result, answer in zip(results, questions.values(), strict=True)
    ]
    return sum(right) / len(right)


def test_capitals_planets_and_symbols(vllm_client: Client) -> None:
    capitals = {f"The capital of {country} is": city for country, city in corpus.CAPITALS.items()}
    symbols = {
        f"The chemical symbol for {name} is": symbol for name, symbol in corpus.SYMBOLS.items()
    }
    planets = {
        f"The {nth} planet from the sun is": planet
        for nth, planet in zip(corpus.ORDINALS, corpus.PLANETS, strict=True)
    }
    assert len(capitals) >= 30
    assert len(symbols) >= 20
    assert share_right(vllm_client, capitals) >= 0.95
    assert share_right(vllm_client, symbols) >= 0.95
    assert share_right(vllm_client, planets) == 1


def test_paris_beats_london_and_berlin(vllm_client: Client) -> None:
    cities = [" London", " Paris", " Berlin"]
    assert vllm_client.score("The capital of France is", cities).best == 1

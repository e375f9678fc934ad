"""Variants: a steered model as a model id, for clients that can send nothing else."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from logsteer import Client
from tests.contract.steering import LAYER, VECTOR
from tests.refusals import refused

pytestmark = pytest.mark.engine

PROMPT = "Once upon a time"
ITEM = {"context": PROMPT, "targets": [" there was"]}
SPEC = f"mild:6@{LAYER}"
STEERING = {"vectors": [{"name": "mild", "scale": 6.0, "layers": [LAYER]}]}
NAMES = ["gay", f"demo+{SPEC}"]


@pytest.fixture(params=["demo", "tlens_limited"], scope="module")
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of a server with a result cache."""
    with Client(request.getfixturevalue(f"{request.param}_server").url, max_retries=0) as found:
        yield found


@pytest.fixture
def outside(client: Client) -> Iterator[openai.OpenAI]:
    """The `openai` client, of a server with the variant `gay` of its model."""
    from safetensors.numpy import save

    client.vectors.put("mild", save({str(LAYER): VECTOR}), overwrite=True)
    client.variants.put("gay", steering=SPEC, description="in a good mood", overwrite=True)
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as found:
        yield found
    client.variants.delete("gay")
    client.vectors.delete("mild")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_alone_steers(client: Client, outside: openai.OpenAI, name: str) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 0}
    plain = outside.completions.create(model="demo", **asked)
    steered = outside.completions.create(model="demo", extra_body={"steering": STEERING}, **asked)
    found = outside.completions.create(model=name, **asked)
    assert (found.model, found.choices) == (name, steered.choices)
    assert found.choices != plain.choices
    receipt = found.model_extra and found.model_extra["steering"]
    assert (receipt["tokens_steered"] > 0, receipt["vectors"][0]["name"]) == (True, "mild")
    pieces = outside.completions.create(model=name, stream=True, **asked)
    assert "".join(piece.choices[0].text for piece in pieces) == steered.choices[0].text
    turns: Any = [{"role": "user", "content": PROMPT}]
    chat: dict[str, Any] = {"messages": turns, "max_tokens": 8, "temperature": 0}
    said = outside.chat.completions.create(model=name, **chat).choices
    own = outside.chat.completions.create(model="demo", extra_body={"steering": SPEC}, **chat)
    assert said == own.choices


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_request_that_it_stands_for(
    client: Client, outside: openai.OpenAI, name: str
) -> None:
    own = client.logprob([ITEM], steering=STEERING)
    found = client.logprob([ITEM], model=name)
    assert (found.results, found.model) == (own.results, name)
    assert found.steering is not None and found.steering.vectors[0].name == "mild"
    assert found.usage.cached_results == 1  # of the same content, and not of the model's own
    assert client.logprob([ITEM]).results != own.results
    drawn = client.generate([PROMPT], model=name, max_tokens=4, temperature=0)
    steered = client.steer([PROMPT], SPEC, max_tokens=4, temperature=0)
    assert drawn.results[0].completions[0].text == steered.results[0].completions[0].text
    events = list(client.perplexity_stream([PROMPT.encode()], model=name))
    assert events[-1].steering == client.perplexity([PROMPT], steering=SPEC).steering
    assert client.tokenize([PROMPT], model=name).results == client.tokenize([PROMPT]).results
    assert client.tokenize([PROMPT], model=name).model == name


def test_it_stands_among_the_models(client: Client, outside: openai.OpenAI) -> None:
    cards = {card.id: card for card in outside.models.list()}
    assert next(iter(cards)) == "demo"
    assert (cards["gay"].model_extra or {})["parent"] == "demo"
    assert outside.models.retrieve("gay").id == "gay"
    (card,) = client.models().variants
    assert card == client.variants.get("gay") == client.variants.list().variants[0]
    assert (card.model, card.steering, card.description) == ("demo", STEERING, "in a good mood")
    assert client.model("gay").variant_of == client.model(f"demo+{SPEC}").variant_of == "demo"


def test_what_changes_the_model_twice_or_not_at_all_is_refused(
    client: Client, outside: openai.OpenAI
) -> None:
    for name in NAMES:
        with refused("invalid_request", r"is demo with steering mild, and .* brings steering calm"):
            client.logprob([ITEM], model=name, steering="calm:2@1")
        with refused("invalid_request", "brings steering mild: leave that out, or name demo"):
            client.steer([PROMPT], SPEC, model=name)
        with refused("invalid_request", "takes no steering"):
            client.vectors.train("other", [("good", "bad")], model=name)
    with refused("invalid_request", "model 'demo.mild:x'.*not a number"):
        client.logprob([ITEM], model="demo+mild:x")
    for name in ("nobody", "no+mild", "../../vectors/names/mild", "shared/nobody"):
        with refused("unknown_model", "No model"):
            client.logprob([ITEM], model=name)
    with refused("unknown_vector", "nothing"):
        client.variants.put("empty", steering="nothing")
    with refused("exists", "resident model"):
        client.variants.put("demo", steering=SPEC)
    with refused("exists", "another request"):
        client.variants.put("gay", steering="mild:1")


def test_a_vector_in_use_stays(client: Client, outside: openai.OpenAI) -> None:
    with refused("in_use", "'mild' is named by the variants gay"):
        client.vectors.delete("mild")
    assert client.vectors.get("mild").name == "mild"

"""`steer`, `steer_events`, `sweep`, and steering while scoring: what each method sends."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from logsteer import AnswerError, InvalidRequestError, Steer
from logsteer.schemas import (
    LogprobItem,
    Message,
    Steering,
)

from .documents import (
    PERPLEXITY,
    SWEEP,
    logprob_answer,
    steer_answer,
    steering_receipt,
    target,
)
from .scripted import Caller, Script

TURN = {"role": "user", "content": "Hi"}
MOOD: dict[str, Any] = {"vectors": [{"name": "mood", "scale": 2}], "positions": "prompt"}


def answering(document: Any) -> Script:
    return Script(httpx.Response(200, json=document))


def sent(server: Script) -> Any:
    return json.loads(server.bodies[-1])


def test_steer(call: Caller) -> None:
    server = answering(steer_answer(2, baseline=True))
    options: Any = {"n": 2, "baseline": True, "stop": ("a", "b"), "seed": None}
    answer = call(server, lambda client: client.steer("I am", MOOD, **options), model="demo")
    result = answer.results[0]
    assert [one.text for one in result.completions] == ["glad 0", "glad 1"]
    assert [one.text for one in result.baseline] == ["sad 0", "sad 1"]
    assert answer.steering.layers["2"].relative_norm == 0.25
    assert (server.requests[0].method, server.requests[0].url.path) == ("POST", "/steer")
    assert sent(server) == {
        "model": "demo",
        "prompts": ["I am"],
        "steering": {"vectors": [{"name": "mood", "scale": 2}], "positions": "prompt"},
        "n": 2,
        "baseline": True,
        "stop": ["a", "b"],
        "seed": None,
    }


@pytest.mark.parametrize(
    ("given", "vectors"),
    [
        ("mood", [{"name": "mood", "scale": "recommended", "layers": "recommended"}]),
        (
            ("mood:4@2,5-6", "calm:-1"),
            [
                {"name": "mood", "scale": 4, "layers": [2, 5, 6]},
                {"name": "calm", "scale": -1, "layers": "recommended"},
            ],
        ),
        (Steer("mood", 4, layer=3), [{"name": "mood", "scale": 4, "layers": [3]}]),
        *(
            ({"vectors": [{"data": {3: data}, "scale": 2}]}, [{"data": {"3": [1.0]}, "scale": 2}])
            for data in ([1.0], np.ones(1, np.float32))
        ),
    ],
)
def test_forms_of_steering(call: Caller, given: Any, vectors: list[dict[str, Any]]) -> None:
    server = answering(steer_answer(1))
    answer = call(server, lambda client: client.steer("I am", given))
    assert sent(server)["steering"] == {"vectors": vectors}
    assert answer.text == "glad 0"
    assert answer.steering.layers[2] == answer.steering.layers["2"]
    with pytest.raises(KeyError):
        answer.steering.layers[7]
    assert repr(answer).startswith("SteerAnswer(texts=['glad 0']")
    assert max(map(len, repr(answer).splitlines())) <= 100


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("mood:x", "the scale 'x' is not a number"),
        ("mood@b", "not a list of layers"),
        ("", "has not the form"),
        ({"vectors": [{"name": "mood", "scale": "x"}]}, "a number that float32 holds"),
        ({"vectors": [{"name": "mood", "layers": [2, 2]}]}, "name each once"),
        ({"vectors": [{"name": "mood", "layers": [-1]}]}, "-1 is not a layer"),
        ({"vectors": [{"name": "mood", "layers": []}]}, "a list of layers"),
    ],
)
def test_what_is_no_steering_is_told(call: Caller, given: Any, says: str) -> None:
    server = answering(steer_answer(1))
    with pytest.raises(InvalidRequestError, match=says):
        call(server, lambda client: client.steer("I am", given))
    assert server.requests == []


def test_several_texts_are_texts(call: Caller) -> None:
    server = answering(steer_answer(2))
    answer = call(server, lambda client: client.steer(steering="mood", messages=[TURN], n=2))
    assert answer.texts == ["glad 0", "glad 1"]
    with pytest.raises(ValueError, match="2 completions"):
        answer.text  # noqa: B018
    assert "prompts" not in sent(server)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"prompt_ids": [[1, 2]]}, {"prompt_ids": [[1, 2]]}),
        (
            {"messages": [Message(role="user", content="Hi")]},
            {"messages": [{"role": "user", "content": "Hi"}]},
        ),
    ],
)
def test_what_stands_in_for_prompts(call: Caller, options: Any, fields: Any) -> None:
    server = answering(steer_answer())
    steering = Steering.model_validate({"vectors": [{"data": {"1": [0.5]}}]})
    call(server, lambda client: client.steer(None, steering, **options))
    assert sent(server) == {**fields, "steering": {"vectors": [{"data": {"1": [0.5]}}]}}


@pytest.mark.parametrize(
    ("prompt", "steering", "options", "reason"),
    [
        (None, MOOD, {}, "exactly one of prompts, prompt_ids, messages"),
        ("a", MOOD, {"prompt_ids": [[1]]}, "exactly one of prompts"),
        ("a", {}, {}, r"steering\.vectors"),
        ("a", {"vectors": [{"scale": 1.0}]}, {}, "exactly one of name, sha256, data"),
        ("a", MOOD, {"temperature": 3.0}, "temperature"),
    ],
)
def test_a_wrong_argument_is_told_before_anything_is_sent(
    call: Caller, prompt: Any, steering: Any, options: Any, reason: str
) -> None:
    server = answering(steer_answer())
    with pytest.raises(InvalidRequestError, match=reason):
        call(server, lambda client: client.steer(prompt, steering, **options))
    with pytest.raises(InvalidRequestError, match=reason):
        call(server, lambda client: client.steer_events(prompt, steering, **options))
    assert server.requests == []


def test_an_answer_without_a_receipt_is_none(call: Caller) -> None:
    document = {name: value for name, value in steer_answer().items() if name != "steering"}
    with pytest.raises(AnswerError, match="steering"):
        call(answering(document), lambda client: client.steer("I am", MOOD))


def test_sweep(call: Caller) -> None:
    server = answering(SWEEP)
    items = [LogprobItem(context="I am", targets=[" glad", " sad"])]
    options: Any = {"items": items, "texts": ("t",), "layers": [[2], [3]], "bos": "never"}
    answer = call(server, lambda client: client.sweep(MOOD, (-1, 0, 1), **options), model="demo")
    assert [(point.layers, point.scale) for point in answer.points[:2]] == [([2], -1), ([2], 0)]
    assert answer.points[0].items[0].targets[1].change is None
    assert answer.unsteered.texts[0].perplexity == 2.0
    assert (server.requests[0].method, server.requests[0].url.path) == ("POST", "/sweep")
    assert sent(server) == {
        "model": "demo",
        "items": [{"context": "I am", "targets": [" glad", " sad"]}],
        "texts": ["t"],
        "steering": MOOD,
        "scales": [-1.0, 0.0, 1.0],
        "layers": [[2], [3]],
        "bos": "never",
    }


def test_a_sweep_of_nothing_is_refused(call: Caller) -> None:
    server = answering(SWEEP)
    with pytest.raises(InvalidRequestError, match="something to score"):
        call(server, lambda client: client.sweep(MOOD, [1]))
    clamp = {"vectors": [{"name": "mood", "op": "clamp", "params": {"min": 0.0}}]}
    with pytest.raises(InvalidRequestError, match="no scale to sweep over"):
        call(server, lambda client: client.sweep(clamp, [1], texts=["a"]))
    assert server.requests == []


def test_scores_under_steering_have_a_receipt(call: Caller) -> None:
    document = logprob_answer([target("b", -1.0)]) | {"steering": steering_receipt()}
    server = answering(document)
    items = [{"context": "a", "targets": ["b"]}]
    answer = call(server, lambda client: client.logprob(items, steering=MOOD))
    assert answer.steering.vectors[0].name == "mood"
    assert sent(server) == {"items": items, "steering": MOOD}
    server = answering(PERPLEXITY | {"steering": steering_receipt()})
    answer = call(server, lambda client: client.perplexity("a", steering=MOOD))
    assert answer.steering.tokens_steered == 5
    assert sent(server) == {"texts": ["a"], "steering": MOOD}

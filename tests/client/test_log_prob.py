"""`get_log_prob`: the interface that older scripts were written against."""

import copy
import json
import math
import pickle

import httpx
import pytest

from logsteer import LogProb

from .documents import logprob_answer, target
from .scripted import Caller, Script

SCORES = logprob_answer(
    [target(" Paris", -1.0), target(" Rome", -2.0)],
    [target(" Paris", -4.0), target(" Rome", None, prob=None, perplexity=None)],
)
BOTH = logprob_answer(
    [
        target(
            "Paris", -3.0,
            variants={"with_space": target(" Paris", -1.0), "without_space": target("Paris", -3.0)},
        )
    ]
)  # fmt: skip


def test_records_go_prompt_by_prompt(call: Caller) -> None:
    server = Script(httpx.Response(200, json=SCORES))
    records = call(server, lambda client: client.get_log_prob(["p", "q"], [" Paris", " Rome"]))
    assert [(r.prompt, r.target, r.sequence, r.log_prob) for r in records] == [
        ("p", " Paris", " Paris", -1.0),
        ("p", " Rome", " Rome", -2.0),
        ("q", " Paris", " Paris", -4.0),
        ("q", " Rome", " Rome", None),
    ]
    assert records[1] == {
        "prompt": "p", "target": " Rome", "sequence": " Rome", "log_prob": -2.0, "prob": 0.25,
        "num_tokens": 5, "perplexity": math.exp(2), "token_perplexity": 2.0,
        "boundary": "exact", "log_prob_any_space": None,
    }  # fmt: skip
    assert records[3].prob is records[3].perplexity is records[3].token_perplexity is None
    assert json.loads(server.bodies[0]) == {
        "items": [{"context": text, "targets": [" Paris", " Rome"]} for text in ("p", "q")],
        "per_token": False,
        "columns": ["logprob"],
        "space": "best",
    }


def test_attributes_are_the_keys(call: Caller) -> None:
    server = Script(httpx.Response(200, json=logprob_answer([target("t", -1.0)])))
    (record,) = call(server, lambda client: client.get_log_prob("p", "t"))
    assert {name: getattr(record, name) for name in record} == record
    for twin in (pickle.loads(pickle.dumps(record)), copy.copy(record)):
        assert isinstance(twin, LogProb) and twin == record and twin.log_prob == -1.0
    with pytest.raises(KeyError):
        record["nothing"]


def test_both_variants_are_rows(call: Caller) -> None:
    server = Script(httpx.Response(200, json=BOTH))
    rows = call(server, lambda client: client.get_log_prob("It is", "Paris", space="both"))
    assert json.loads(server.bodies[0])["space"] == "both"
    assert [(r["target"], r["sequence"], r["log_prob"]) for r in rows] == [
        ("Paris", " Paris", -1.0),
        ("Paris", "Paris", -3.0),
    ]
    assert max(rows, key=lambda r: r["prob"] * r["num_tokens"])["sequence"] == " Paris"


def test_a_long_target_has_an_infinite_perplexity(call: Caller) -> None:
    server = Script(httpx.Response(200, json=logprob_answer([target("t", -1000.0)])))
    (record,) = call(server, lambda client: client.get_log_prob("p", "t"))
    assert (record.perplexity, record.token_perplexity) == (math.inf, 2.0)

"""`get_log_prob`: the interface that older scripts were written against."""

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest

from logsteer import Client, LogProb

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


def run_older_script(client: Any, out: Path) -> Any:
    """Score capitals as scripts of the older interface do; nothing here knows of this client."""
    prompts = ["The capital of France is", "The capital of Italy is"]
    targets = [" Paris", " Rome"]
    results = client.get_log_prob(prompts, targets)
    best = {}
    for prompt in prompts:
        rows = [r for r in results if r["prompt"] == prompt and r["log_prob"] is not None]
        rows.sort(key=lambda r: r["log_prob"], reverse=True)
        best[prompt] = rows[0]["sequence"].strip()
        for r in rows:
            assert set(r.keys()) >= {"sequence", "log_prob", "prob", "num_tokens", "perplexity"}
            assert abs(r["perplexity"] - math.exp(-r["log_prob"])) < 1e-9
            r["mean_log_prob"] = r["log_prob"] / r["num_tokens"]
            r.update(label=r.get("label", "none"))
    with out.open("w") as f:
        json.dump(results, f)
    table = pd.DataFrame(results)
    means = table.groupby("sequence")["log_prob"].mean().to_dict()
    copies = [dict(r.items()) for r in results]
    return best, means, copies


def test_an_older_script_runs_unchanged(tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=SCORES))
    with Client(transport=transport) as client:
        best, means, copies = run_older_script(client, out)
    assert best == {"The capital of France is": "Paris", "The capital of Italy is": "Paris"}
    assert means == {" Paris": -2.5, " Rome": -2.0}
    assert json.loads(out.read_text()) == copies
    assert [c["label"] for c in copies[:3]] == ["none"] * 3


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

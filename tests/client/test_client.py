"""What each method sends, and what it makes of the answer."""

import json
import struct
from typing import Any

import httpx
import msgpack
import pytest

from logsteer import (
    AnswerError,
    InvalidRequestError,
    UnavailableError,
)
from logsteer.schemas import LogprobItem

from .documents import (
    ANSWER,
    HEALTH,
    MODELS,
    PERPLEXITY,
    TOKENS,
    logprob_answer,
    target,
)
from .scripted import Caller, Script, problem


def answering(document: Any, status: int = 200) -> Script:
    return Script(httpx.Response(status, json=document))


def sent(server: Script) -> Any:
    return json.loads(server.bodies[-1])


def test_a_model_id_is_quoted(call: Caller) -> None:
    server = answering(MODELS["models"][0])
    assert call(server, lambda client: client.model("org/name v1")).id == "demo"
    assert server.requests[0].url.raw_path == b"/models/org%2Fname%20v1"
    with pytest.raises(InvalidRequestError, match="empty"):
        call(server, lambda client: client.model(""))


def test_readiness_is_an_answer_with_503_too(call: Caller, pauses: list[float]) -> None:
    server = answering({"ready": False, "models": {"demo": "loading"}}, status=503)
    answer = call(server, lambda client: client.ready())
    assert (answer.ready, answer.models) == (False, {"demo": "loading"})
    assert len(server.requests) == 1
    with pytest.raises(UnavailableError):
        call(Script(problem("model_loading", 503)), lambda client: client.ready())


def test_logprob_sends_what_was_given_and_no_more(call: Caller) -> None:
    server = answering(logprob_answer([target("b", -1.0)]))
    items = [
        {"context": "a", "targets": ["b"]},
        LogprobItem.model_validate({"context_ids": [1, 2], "target_ids": [[3]]}),
    ]
    answer = call(
        server, lambda client: client.logprob(items, top=2, columns=("logprob",), model="m")
    )
    assert answer.results[0].targets[0].logprob == -1.0
    assert (server.requests[0].method, server.requests[0].url.path) == ("POST", "/logprob")
    assert server.requests[0].headers["Content-Type"] == "application/json"
    assert sent(server) == {
        "model": "m",
        "items": [
            {"context": "a", "targets": ["b"]},
            {"context_ids": [1, 2], "target_ids": [[3]]},
        ],
        "top": 2,
        "columns": ["logprob"],
    }


def test_the_default_model_gives_way(call: Caller) -> None:
    server = answering(TOKENS)
    call(server, lambda client: client.tokenize("x"), model="mine")
    assert sent(server)["model"] == "mine"
    call(server, lambda client: client.tokenize("x", model="other"), model="mine")
    assert sent(server)["model"] == "other"
    call(server, lambda client: client.tokenize("x"))
    assert "model" not in sent(server)


def test_a_wrong_argument_is_told_before_anything_is_sent(call: Caller) -> None:
    server = answering({})
    with pytest.raises(InvalidRequestError) as caught:
        call(server, lambda client: client.logprob([{"context": "a"}]))
    assert caught.value.param == "items[0]"
    assert "takes targets" in caught.value.detail
    assert caught.value.request_id is None
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        call(server, lambda client: client.tokenize("\ud800"))
    with pytest.raises(InvalidRequestError, match="stride"):
        call(server, lambda client: client.perplexity_stream([b""], protocol="rolling", stride=1))
    assert server.requests == []


def test_score_is_one_item(call: Caller) -> None:
    server = answering(logprob_answer([target(" a", -1.0), target(" b", -2.0)]))
    result = call(server, lambda client: client.score("c", [" a", " b"], space="both"))
    assert [score.logprob for score in result.targets] == [-1.0, -2.0]
    assert sent(server) == {"items": [{"context": "c", "targets": [" a", " b"]}], "space": "both"}


def test_one_string_is_one_text(call: Caller) -> None:
    server = answering(PERPLEXITY)
    call(server, lambda client: client.perplexity("long text"))
    assert sent(server) == {"texts": ["long text"]}


def test_too_few_scores_are_no_answer(call: Caller) -> None:
    server = answering(logprob_answer([target("x", -1.0)]))
    for use in (
        lambda client: client.get_log_prob(["p", "q"], ["x"]),
        lambda client: client.get_log_prob("p", ["x", "y"]),
        lambda client: client.score("p", ["x", "y"]),
    ):
        with pytest.raises(AnswerError, match="scores") as caught:
            call(server, use)
        assert caught.value.request_id == "r"


def test_tokens_both_ways(call: Caller) -> None:
    server = answering(TOKENS)
    encoded = call(server, lambda client: client.tokenize([" Hi"], bos="always")).results[0]
    assert encoded.offsets == [None, (0, 3)]
    assert sent(server) == {"texts": [" Hi"], "bos": "always"}
    server = answering({"model": "demo", "texts": [" Hi"]})
    answer = call(server, lambda client: client.detokenize([(1, 9)], model="m"))
    assert answer.texts == [" Hi"]
    assert sent(server) == {"token_ids": [[1, 9]], "model": "m"}


def test_fields_of_a_newer_server_are_kept(call: Caller) -> None:
    answer = call(answering({**HEALTH, "new": 1}), lambda client: client.health())
    assert answer.model_extra == {"new": 1}


def test_messagepack_arrays_become_lists(call: Caller) -> None:
    score = target("ab", -1.5)
    score["logprobs"] = {
        "dtype": "<f4",
        "shape": [2],
        "data": struct.pack("<2f", -1.5, float("nan")),
    }
    score["offsets"] = {"dtype": "<i4", "shape": [2, 2], "data": struct.pack("<4i", -1, 1, 1, 2)}
    body = msgpack.packb(logprob_answer([score]))
    server = Script(
        httpx.Response(200, content=body, headers={"Content-Type": "application/msgpack"})
    )
    answer = call(server, lambda client: client.score("c", "ab"), encoding="msgpack")
    assert answer.targets[0].logprobs == [-1.5, None]
    assert answer.targets[0].offsets == [(-1, 1), (1, 2)]
    assert server.requests[0].headers["Accept"].startswith("application/msgpack,")


def test_messagepack_client_reads_json_and_problems(call: Caller) -> None:
    answer = call(answering(HEALTH), lambda client: client.health(), encoding="msgpack")
    assert answer.status == "ok"
    with pytest.raises(InvalidRequestError):
        call(
            Script(problem("invalid_request", 422)),
            lambda client: client.health(),
            encoding="msgpack",
        )


def test_broken_messagepack_is_no_answer(call: Caller) -> None:
    headers = {"Content-Type": "application/msgpack"}
    server = Script(httpx.Response(200, content=msgpack.packb(ANSWER)[:-1], headers=headers))
    with pytest.raises(AnswerError, match="MessagePack"):
        call(server, lambda client: client.logprob([{"context": "", "targets": ["x"]}]))

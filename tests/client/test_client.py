"""What each method sends, and what it makes of the answer.

Retries, headers, errors and connections are the same for both clients; arrays come packed or as
lists.
"""

import math
import socket
import struct
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logsteer import (
    AnswerError,
    APIError,
    InternalError,
    InvalidRequestError,
    LogsteerError,
    NotFoundError,
    OverloadedError,
    RequestTimeoutError,
    Steer,
    TransportError,
    UnavailableError,
)
from logsteer._arrays import unpack
from logsteer._exchange import ClientSettings, RetryPolicy, _retry_after
from logsteer.schemas import LogprobItem, Message, Steering

from .documents import (
    ANSWER,
    HEALTH,
    MODELS,
    PERPLEXITY,
    SWEEP,
    TOKENS,
    logprob_answer,
    steer_answer,
    steering_receipt,
    target,
)
from .scripted import Caller, Script, answer, problem
from .test_vectors import CARD, GONE, LIST, PAIR, TRAINED

ITEM = {"context": "a", "targets": ["b"]}
IDS = {"context_ids": [1, 2], "target_ids": [[3]]}
SCORES = logprob_answer([target("b", -1.0)])
TWO = logprob_answer([target(" a", -1.0), target(" b", -2.0)])
TURN = {"role": "user", "content": "Hi"}
MOOD: dict[str, Any] = {"vectors": [{"name": "mood", "scale": 2}], "positions": "prompt"}
GIVEN = {"vectors": [{"data": {"1": [0.5]}}]}
CHANGES = {
    "steering": {"vectors": [{"name": "mood", "scale": 2.0}]}, "adapter": "a",
    "override": {"name": "v", "eta": 0.5},
}  # fmt: skip
RECEIPT = {"steering": steering_receipt()}

CALLS: dict[str, tuple[Any, Any, str, Any, Any, Any]] = {
    "model": (
        lambda c: c.model("org/name v1"), MODELS["models"][0],
        "GET /models/org%2Fname%20v1", None, lambda a: a.id, "demo",
    ),
    "logprob": (
        lambda c: c.logprob([ITEM, LogprobItem.model_validate(IDS)], top=2, columns=("logprob",),
                            model="m"),
        SCORES, "POST /logprob",
        {"model": "m", "items": [ITEM, IDS], "top": 2, "columns": ["logprob"]},
        lambda a: a.results[0].targets[0].logprob, -1.0,
    ),
    "score": (
        lambda c: c.score("c", [" a", " b"], space="both"), TWO, "POST /logprob",
        {"items": [{"context": "c", "targets": [" a", " b"]}], "space": "both"},
        lambda a: [score.logprob for score in a.targets], [-1.0, -2.0],
    ),
    "score under steering": (
        lambda c: c.logprob([ITEM], steering=MOOD), SCORES | RECEIPT, "POST /logprob",
        {"items": [ITEM], "steering": MOOD}, lambda a: a.steering.vectors[0].name, "mood",
    ),
    "get_log_prob under changes": (
        lambda c: c.get_log_prob("a", "b", **CHANGES), SCORES, "POST /logprob",
        {"items": [ITEM], "per_token": False, "columns": ["logprob"], "space": "best", **CHANGES},
        len, 1,
    ),
    "one string is one text": (
        lambda c: c.perplexity("long text"), PERPLEXITY, "POST /perplexity",
        {"texts": ["long text"]}, lambda a: a.total.num_scored, 4,
    ),
    "perplexity under steering": (
        lambda c: c.perplexity("a", steering=MOOD), PERPLEXITY | RECEIPT, "POST /perplexity",
        {"texts": ["a"], "steering": MOOD}, lambda a: a.steering.tokens_steered, 5,
    ),
    "tokenize": (
        lambda c: c.tokenize([" Hi"], bos="always"), TOKENS, "POST /tokenize",
        {"texts": [" Hi"], "bos": "always"}, lambda a: a.results[0].offsets, [None, (0, 3)],
    ),
    "detokenize": (
        lambda c: c.detokenize([(1, 9)], model="m"), {"model": "demo", "texts": [" Hi"]},
        "POST /detokenize", {"token_ids": [[1, 9]], "model": "m"}, lambda a: a.texts, [" Hi"],
    ),
    "steer": (
        lambda c: c.steer("I am", MOOD, n=2, baseline=True, stop=("a", "b"), seed=None),
        steer_answer(2, baseline=True), "POST /steer",
        {"prompts": ["I am"], "steering": MOOD, "n": 2, "baseline": True, "stop": ["a", "b"],
         "seed": None},
        lambda a: [[one.text for one in side] for side in
                   (a.results[0].completions, a.results[0].baseline)],
        [["glad 0", "glad 1"], ["sad 0", "sad 1"]],
    ),
    "steer ids": (
        lambda c: c.steer(None, Steering.model_validate(GIVEN), prompt_ids=[[1, 2]]),
        steer_answer(), "POST /steer", {"prompt_ids": [[1, 2]], "steering": GIVEN},
        lambda a: a.steering.layers[2].relative_norm, 0.25,
    ),
    "steer a conversation": (
        lambda c: c.steer(steering=GIVEN, messages=[Message(role="user", content="Hi")], n=2),
        steer_answer(2), "POST /steer", {"messages": [TURN], "steering": GIVEN, "n": 2},
        lambda a: a.texts, ["glad 0", "glad 1"],
    ),
    "sweep": (
        lambda c: c.sweep(MOOD, (-1, 0, 1), items=[LogprobItem(context="a", targets=["b"])],
                          texts=("t",), layers=[[2], [3]], bos="never"),
        SWEEP, "POST /sweep",
        {"items": [ITEM], "texts": ["t"], "steering": MOOD, "scales": [-1.0, 0.0, 1.0],
         "layers": [[2], [3]], "bos": "never"},
        lambda a: (a.points[0].layers, a.points[1].scale, a.points[0].items[0].targets[1].change,
                   a.unsteered.texts[0].perplexity),
        ([2], 0, None, 2.0),
    ),
    "vectors.list": (
        lambda c: c.vectors.list(), LIST, "GET /vectors", None,
        lambda a: [card.name for card in a.vectors], ["happy"],
    ),
    "vectors.get": (
        lambda c: c.vectors.get("../x"), CARD, "GET /vectors/..%2Fx", None,
        lambda a: (a.layers, a.norms["7"], a.norms[7]), ([1, 2, 3, 7], 7.0, 7.0),
    ),
    "vectors.delete": (
        lambda c: c.vectors.delete("happy"), GONE, "DELETE /vectors/happy", None,
        lambda a: a.name, "happy",
    ),
    "adapters.delete": (
        lambda c: c.adapters.delete("happy"), GONE, "DELETE /adapters/happy", None,
        lambda a: a.sha256, "ab" * 32,
    ),
    "vectors.train": (
        lambda c: c.vectors.train("happy", [tuple(PAIR.values())], method="pca", read="mean",
                                  layers=(2, 3), bos="never"),
        TRAINED, "POST /vectors/train",
        {"name": "happy", "pairs": [PAIR], "method": "pca", "read": "mean", "layers": [2, 3],
         "bos": "never"},
        lambda a: (a.vector.about.quality["2"].auc, a.vector.about.quality[2].auc,
                   a.usage.prompt_tokens),
        (0.875, 0.875, 3),
    ),
    "vectors.combine": (
        lambda c: c.vectors.combine("c", {"a": 1, "b": -0.5}, ["d"]), CARD,
        "POST /vectors/c/combine",
        {"vectors": [{"name": "a", "weight": 1.0}, {"name": "b", "weight": -0.5}],
         "orthogonal_to": ["d"]},
        lambda a: a.name, "happy",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("use", "document", "line", "body", "read", "expected"), CALLS.values(),
                         ids=CALLS)  # fmt: skip
def test_what_a_method_sends_and_reads(
    call: Caller, use: Any, document: Any, line: str, body: Any, read: Any, expected: Any
) -> None:
    server = answer(document)
    assert read(call(server, use)) == expected
    (request,) = server.requests
    assert f"{request.method} {request.url.raw_path.decode()}" == line
    assert server.sent == body
    assert request.headers.get("Content-Type") == (None if body is None else "application/json")


WRONG: list[tuple[Any, str | None, str]] = [
    (lambda c: c.logprob([{"context": "a"}]), "items[0]", "takes targets"),
    (lambda c: c.tokenize("\ud800"), None, "lone surrogate"),
    (lambda c: c.perplexity_stream([b""], protocol="rolling", stride=1), "stride", "stride"),
    (lambda c: c.perplexity_stream([b""], steering={}), "steering.vectors", "missing"),
    (lambda c: c.perplexity_stream([b""], override={"name": "v"}), "override.eta", "missing"),
    (lambda c: c.perplexity_stream([b""], adapter="no name"), "adapter", "must begin"),
    (lambda c: c.perplexity_stream([b""], steering={"vectors": [{"data": {"1": [0.5] * 20_000}}]}),
     "steering", "keep its vectors"),
    (lambda c: c.model(""), "model_id", "empty"),
    (lambda c: c.vectors.delete(""), "name", "name is empty"),
    (lambda c: c.adapters.put("", "none"), "name", "name is empty"),
    (lambda c: c.vectors.train("happy", [("a", "a")]), "pairs[0]", "are the same"),
    (lambda c: c.sweep(MOOD, [1]), None, "something to score"),
    (lambda c: c.sweep({"vectors": [{"name": "m", "op": "clamp", "params": {"min": 0.0}}]}, [1],
                       texts=["a"]), None, "no scale to sweep over"),
]  # fmt: skip


@pytest.mark.parametrize(("use", "param", "words"), WRONG)
def test_a_wrong_argument_is_told_before_anything_is_sent(
    call: Caller, use: Any, param: str | None, words: str
) -> None:
    server = answer({})
    with pytest.raises(InvalidRequestError, match=words) as caught:
        call(server, use)
    assert (caught.value.param, caught.value.request_id, server.requests) == (param, None, [])


@pytest.mark.parametrize(
    ("prompt", "steering", "options", "words"),
    [
        (None, MOOD, {}, "exactly one of prompts, prompt_ids, messages"),
        ("a", MOOD, {"prompt_ids": [[1]]}, "exactly one of prompts"),
        ("a", {}, {}, r"steering\.vectors"),
        ("a", {"vectors": [{"scale": 1.0}]}, {}, "exactly one of name, sha256, data"),
        ("a", MOOD, {"temperature": 3.0}, "temperature"),
        ("a", "mood:x", {}, "the scale 'x' is not a number"),
        ("a", "mood@b", {}, "not a list of layers"),
        ("a", "", {}, "has not the form"),
        ("a", {"vectors": [{"name": "m", "scale": "x"}]}, {}, "a number that float32 holds"),
        ("a", {"vectors": [{"name": "m", "layers": [2, 2]}]}, {}, "name each once"),
        ("a", {"vectors": [{"name": "m", "layers": [-1]}]}, {}, "-1 is not a layer"),
        ("a", {"vectors": [{"name": "m", "layers": []}]}, {}, "a list of layers"),
    ],
)
def test_what_cannot_be_steered_is_told(
    call: Caller, prompt: Any, steering: Any, options: Any, words: str
) -> None:
    server = answer(steer_answer())
    for name in ("steer", "steer_events"):
        with pytest.raises(InvalidRequestError, match=words):
            call(server, lambda c, name=name: getattr(c, name)(prompt, steering, **options))
    assert server.requests == []


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
    server = answer(steer_answer(1))
    found = call(server, lambda client: client.steer("I am", given))
    assert server.sent["steering"] == {"vectors": vectors}
    assert found.text == "glad 0"
    with pytest.raises(KeyError):
        found.steering.layers[7]
    assert repr(found).startswith("SteerAnswer(texts=['glad 0']")
    assert max(map(len, repr(found).splitlines())) <= 100


def test_the_text_of_several_completions_is_none(call: Caller) -> None:
    found = call(answer(steer_answer(2)), lambda client: client.steer("a", "mood", n=2))
    with pytest.raises(ValueError, match="2 completions"):
        found.text  # noqa: B018


@pytest.mark.parametrize(
    ("mine", "given", "sent"),
    [("mine", {}, "mine"), ("mine", {"model": "m"}, "m"), (None, {}, None)],
)
def test_the_default_model_gives_way(call: Caller, mine: Any, given: Any, sent: Any) -> None:
    server = answer(TOKENS)
    call(server, lambda client: client.tokenize("x", **given), model=mine)
    assert server.sent.get("model") == sent


def test_readiness_is_an_answer_with_503_too(call: Caller, pauses: list[float]) -> None:
    server = Script(httpx.Response(503, json={"ready": False, "models": {"demo": "loading"}}))
    found = call(server, lambda client: client.ready())
    assert (found.ready, found.models) == (False, {"demo": "loading"})
    assert len(server.requests) == 1
    with pytest.raises(UnavailableError):
        call(Script(problem("model_loading", 503)), lambda client: client.ready())


STEERED = {name: value for name, value in steer_answer().items() if name != "steering"}
PACKED = {"Content-Type": "application/msgpack"}


@pytest.mark.parametrize(
    ("use", "reply", "words"),
    [
        (lambda c: c.get_log_prob(["p", "q"], ["x"]), httpx.Response(200, json=SCORES), "r.$"),
        (lambda c: c.get_log_prob("p", ["x", "y"]), httpx.Response(200, json=SCORES), "2 scores"),
        (lambda c: c.score("p", ["x", "y"]), httpx.Response(200, json=SCORES), "2 scores"),
        (lambda c: c.steer("I am", MOOD), httpx.Response(200, json=STEERED), "steering"),
        (lambda c: c.logprob([ITEM]),
         httpx.Response(200, content=msgpack.packb(ANSWER)[:-1], headers=PACKED), "MessagePack"),
    ],
)  # fmt: skip
def test_what_lacks_a_part_is_no_answer(call: Caller, use: Any, reply: Any, words: str) -> None:
    with pytest.raises(AnswerError, match=words):
        call(Script(reply), use)


def test_fields_of_a_newer_server_are_kept(call: Caller) -> None:
    found = call(answer({**HEALTH, "new": 1}), lambda client: client.health())
    assert found.model_extra == {"new": 1}


def test_messagepack_arrays_become_lists(call: Caller) -> None:
    score = target("ab", -1.5)
    numbers = struct.pack("<2f", -1.5, float("nan"))
    score["logprobs"] = {"dtype": "<f4", "shape": [2], "data": numbers}
    score["offsets"] = {"dtype": "<i4", "shape": [2, 2], "data": struct.pack("<4i", -1, 1, 1, 2)}
    body = msgpack.packb(logprob_answer([score]))
    server = Script(httpx.Response(200, content=body, headers=PACKED))
    found = call(server, lambda client: client.score("c", "ab"), encoding="msgpack")
    assert found.targets[0].logprobs == [-1.5, None]
    assert found.targets[0].offsets == [(-1, 1), (1, 2)]
    assert server.requests[0].headers["Accept"].startswith("application/msgpack,")


def test_messagepack_client_reads_json_and_problems(call: Caller) -> None:
    found = call(answer(HEALTH), lambda client: client.health(), encoding="msgpack")
    assert found.status == "ok"
    with pytest.raises(InvalidRequestError):
        call(
            Script(problem("invalid_request", 422)),
            lambda client: client.health(),
            encoding="msgpack",
        )


# ------------------------------------------------------------------ the exchange


OK = httpx.Response(200, json=HEALTH)


def ask_health(client: Any) -> Any:
    return client.health()


BUSY = problem("overloaded", 429, retryable=True)
BUSY_7 = problem("overloaded", 429, retryable=True, headers={"Retry-After": "7"})
BUSY_HOUR = problem("overloaded", 429, retryable=True, headers={"Retry-After": "3600"})
RESTARTING = problem("engine_restarting", 503, retryable=True)


@pytest.mark.parametrize(
    ("replies", "requests", "pause", "error"),
    [
        ([BUSY, OK], 2, (0.25, 0.5), None),
        ([BUSY_7, OK], 2, (7, 7), None),
        # What a proxy says of a process that died.
        ([httpx.Response(500, text="Internal Server Error"), OK], 2, (0.25, 0.5), None),
        ([httpx.ConnectError("refused"), OK], 2, (0.25, 0.5), None),
        ([httpx.ConnectTimeout("slow"), OK], 2, (0.25, 0.5), None),
        ([httpx.ReadError("reset"), OK], 2, (0.25, 0.5), None),
        ([httpx.RemoteProtocolError("disconnected"), OK], 2, (0.25, 0.5), None),
        ([RESTARTING], 4, (0.25, 2), UnavailableError),
        ([BUSY_HOUR], 1, (), OverloadedError),
        ([problem("internal", 500)], 1, (), InternalError),
        ([problem("overloaded", 429)], 1, (), OverloadedError),
        ([httpx.ReadTimeout("late")], 1, (), RequestTimeoutError),
    ],
)
def test_what_may_pass_is_tried_again(
    call: Caller, pauses: list[float], replies: Any, requests: int, pause: Any, error: Any
) -> None:
    server = Script(*replies)
    if error is None:
        assert call(server, ask_health, max_retries=3).status == "ok"
    else:
        with pytest.raises(error) as caught:
            call(server, ask_health, max_retries=3)
        assert getattr(caught.value, "retry_after", None) in (None, 3600.0)
    assert (len(server.requests), len(pauses)) == (requests, requests - 1)
    assert all(pause[0] <= seconds <= pause[1] for seconds in pauses)


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (httpx.Response(404, text="<h1>nginx</h1>"), NotFoundError, "^http_404: .*nginx"),
        (httpx.Response(307, headers={"Location": "https://elsewhere/healthz"}), APIError,
         "redirects to https://elsewhere/healthz: set base_url"),
        (httpx.Response(422, json={"detail": [{"msg": "Field required"}]}), InvalidRequestError,
         "Field required"),
        (httpx.Response(200, content=b"<html>"), AnswerError, "not a Health"),
        (httpx.Response(200, content=b'{"status": "ok"}'), AnswerError, "not a Health"),
        (httpx.Response(200, content=b"\xff"), AnswerError, "not a Health"),
        (httpx.ReadTimeout("late"), RequestTimeoutError, "Raise timeout"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_told_with_our_request_id(
    call: Caller, reply: Any, error: Any, words: str
) -> None:
    server = Script(reply)
    with pytest.raises(error, match=words) as caught:
        call(server, ask_health)
    assert caught.value.request_id == server.requests[0].headers["X-Request-Id"]


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"base_url": "localhost:8000"}, LogsteerError, "base_url"),
        ({"base_url": "http://"}, LogsteerError, "base_url"),
        ({"base_url": "http://host:port"}, LogsteerError, "base_url"),
        ({"base_url": "ftp://host"}, LogsteerError, "base_url"),
        ({"max_retries": -1}, ValueError, "max_retries"),
        ({"encoding": "xml"}, ValueError, "encoding"),
    ],
)
def test_settings_are_checked(call: Caller, settings: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call(Script(OK), ask_health, **settings)


def test_attempts_share_one_request_id(call: Caller, pauses: list[float]) -> None:
    server = Script(problem("overloaded", 429, retryable=True), OK)
    call(server, ask_health)
    call(server, ask_health)
    ids = [request.headers["X-Request-Id"] for request in server.requests]
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0]) == 32


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("-5", None),
        (None, None),
    ],
)
def test_retry_after_is_read(value: str | None, seconds: float | None) -> None:
    assert _retry_after(value, now=60.0) == seconds


def test_pauses_grow_to_a_bound() -> None:
    longest = RetryPolicy(max_retries=9, jitter=lambda: 0.0)
    assert [longest.pause(k, None) for k in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    shortest = RetryPolicy(max_retries=9, jitter=lambda: 1.0)
    assert [shortest.pause(k, None) for k in range(3)] == [0.25, 0.5, 1.0]
    assert RetryPolicy(max_retries=2).pause(2, None) is None
    assert RetryPolicy(max_retries=2).pause(2, 1.0) is None


def test_no_connection_says_what_to_do(call: Caller, pauses: list[float]) -> None:
    server = Script(httpx.ConnectError("Connection refused"))
    with pytest.raises(TransportError) as caught:
        call(server, ask_health, base_url="http://host:9")
    assert len(server.requests) == 3
    for part in ("http://host:9", "Connection refused", "logsteer serve", "LOGSTEER_BASE_URL"):
        assert part in str(caught.value)
    assert caught.value.request_id is None, "nothing was sent"
    assert isinstance(caught.value.__cause__, httpx.ConnectError)


def test_key_agent_and_address(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGSTEER_API_KEY", "from-environment")
    monkeypatch.setenv("LOGSTEER_BASE_URL", "http://elsewhere:1/prefix/")
    server = Script(OK)
    call(server, ask_health)
    call(server, ask_health, api_key="given", base_url="http://here")
    first, second = server.requests
    assert str(first.url) == "http://elsewhere:1/prefix/healthz"
    assert first.headers["Authorization"] == "Bearer from-environment"
    assert first.headers["User-Agent"].startswith("logsteer/")
    assert str(second.url) == "http://here/healthz"
    assert second.headers["Authorization"] == "Bearer given"


def test_no_key_no_header(call: Caller) -> None:
    server = Script(OK)
    call(server, ask_health)
    assert str(server.requests[0].url) == "http://127.0.0.1:8000/healthz"
    assert "Authorization" not in server.requests[0].headers


# ------------------------------------------------------------------ packed arrays


def packed(dtype: str, shape: list[int], data: bytes) -> bytes:
    body: bytes = msgpack.packb({"a": [{"dtype": dtype, "shape": shape, "data": data}]})
    return body


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "expected"),
    [
        ("<i4", [2, 3], struct.pack("<6i", *range(6)), [[0, 1, 2], [3, 4, 5]]),
        ("<i4", [], struct.pack("<i", -7), -7),
        ("<i4", [0], b"", []),
        ("<i4", [2, 0], b"", [[], []]),
        ("<i4", [1, 2, 1], b"\1\0\0\0\0\1\0\0", [[[1], [256]]]),
        ("<f4", [3], struct.pack("<3f", 0.5, math.nan, -math.inf), [0.5, None, None]),
    ],
)
def test_arrays_are_expanded(dtype: str, shape: list[int], data: bytes, expected: Any) -> None:
    assert unpack(packed(dtype, shape, data)) == {"a": [expected]}


@given(st.lists(st.floats(width=32, allow_infinity=False), max_size=20))
def test_every_float_survives_but_nan(values: list[float]) -> None:
    found = unpack(packed("<f4", [len(values)], struct.pack(f"<{len(values)}f", *values)))
    assert found == {"a": [[None if math.isnan(value) else value for value in values]]}


@pytest.mark.parametrize(
    "body",
    [
        packed("<f8", [1], b"\0" * 8),
        packed("<f4", [2], b"\0" * 4),
        b"\xc1",
        b"",
        msgpack.packb(1) + b"\0",
        packed("<f4", [2**40, 0], b""),  # a list of 2**40 empty ones
        packed("<f4", "ab", b"\0" * 4),  # type: ignore[arg-type]
        packed([["a", "<f4"]], [1], b"\0" * 4),  # type: ignore[arg-type]
        b"\x91" * 100_000,
        b"\x91" * 1000 + b"\x01",
    ],
)
def test_contradictions_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        unpack(body)


def test_what_only_resembles_an_array_stays() -> None:
    document = {"dtype": "<f4", "shape": [1], "data": "text"}
    assert unpack(msgpack.packb(document)) == document


# ------------------------------------------------------------------ connections


ALIVE, TCP = (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), socket.IPPROTO_TCP


def read_arguments(url: str) -> Any:
    """What the transport for an address is made with."""
    return ClientSettings(url, None, None, 2, None, "json").transport


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_its_connections_are_probed() -> None:
    _, options = read_arguments("http://127.0.0.1:9").values()
    assert ALIVE in options
    idle, every, count = (
        next(value for level, option, value in options if (level, option) == (TCP, name))
        for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle + every * count <= 30, "half a minute"


def test_a_proxy_of_the_environment_is_left_to_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert read_arguments("https://example.org") is None


def test_a_unix_socket_needs_no_probes() -> None:
    assert read_arguments("unix:///run/x") == {"uds": "/run/x", "socket_options": []}

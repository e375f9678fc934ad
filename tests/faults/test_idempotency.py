"""Writes whose answer was lost: sent again with the same key, they are not applied again."""

import asyncio
import concurrent.futures
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import Request, Response

from logsteer import Client
from logsteer.errors import APIError
from logsteer.schemas import CombineRequest
from logsteer_server.http.answer_ledger import (
    ENTRY_BYTES,
    LEASE_S,
    AnotherRequestError,
    AnswerLedger,
    Claim,
    KeptAnswer,
    SharedAnswers,
)
from logsteer_server.http.idempotency import AnswerMemory
from logsteer_server.stores.layer_vectors import LayerVectors, parse_content
from tests.conftest import Server
from tests.own_time import run_in_own_time

ONE = LayerVectors({1: np.ones(16)})
PAIRS = [{"positive": "the day was happy", "negative": "the night was sad"}]


class LossyTransport(httpx.HTTPTransport):
    """Loses the answers to the first requests: the server has done what they ask for."""

    def __init__(self, losses: int) -> None:
        super().__init__()
        self.losses = losses
        self.sent: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        self.sent.append(request)
        if self.losses:
            self.losses -= 1
            response.read()
            raise httpx.ReadError("the connection broke", request=request)
        return response


@pytest.fixture
def client(fake_server: Server) -> Iterator[Client]:
    with Client(fake_server.url, max_retries=0) as client:
        client.vectors.put("sum", ONE.content)
        client.vectors.put("one", ONE.content)
        yield client
        for card in client.vectors.list().vectors:
            client.vectors.delete(card.name)


def read(client: Client, name: str = "sum") -> float:
    return float(parse_content(client.vectors.download(name)).layers[1][0])


DOUBLE = {"vectors": [{"name": "sum"}, {"name": "one"}]}


def combine(http: httpx.Client, key: str, body: Any = DOUBLE, **headers: str) -> httpx.Response:
    return http.post("/vectors/sum/combine", json=body, headers={"Idempotency-Key": key, **headers})


def test_a_combination_is_applied_once_though_its_answers_were_lost(
    client: Client, fake_server: Server
) -> None:
    transport = LossyTransport(2)
    with Client(fake_server.url, max_retries=2, transport=transport) as lossy:
        card = lossy.vectors.combine("sum", {"sum": 1, "one": 1})
    assert len(transport.sent) == 3
    assert len({request.headers["idempotency-key"] for request in transport.sent}) == 1
    assert read(client) == 2
    assert client.vectors.get("sum") == card
    with Client(fake_server.url) as again:  # another call is another key
        again.vectors.combine("sum", {"sum": 1, "one": 1})
    assert read(client) == 3


def test_training_is_answered_as_the_first_time(client: Client, fake_server: Server) -> None:
    transport = LossyTransport(1)
    with Client(fake_server.url, max_retries=1, transport=transport) as lossy:
        answer = lossy.vectors.train("trained", PAIRS, layers=[1])
    with httpx.Client(base_url=fake_server.url, timeout=60) as http:
        sent = transport.sent[0]
        key = sent.headers["idempotency-key"]
        again = http.post(
            "/vectors/train", content=sent.content,
            headers={"Idempotency-Key": key, "Content-Type": "application/json"},
        )  # fmt: skip
    assert again.json()["id"] == answer.id
    assert again.headers["idempotency-replayed"] == "true"


def test_a_key_belongs_to_one_request_of_one_caller(client: Client, fake_server: Server) -> None:
    with httpx.Client(base_url=fake_server.url, timeout=60) as http:
        first = combine(http, "k1")
        assert first.status_code == 200
        same = combine(http, "k1")
        assert (same.status_code, same.content) == (200, first.content)
        assert same.headers["content-type"] == first.headers["content-type"]
        assert read(client) == 2
        other = {"vectors": [{"name": "one", "weight": 5.0}]}
        refused = combine(http, "k1", other)
        assert refused.status_code == 422
        assert refused.json()["param"] == "Idempotency-Key"
        assert "another request" in refused.json()["detail"]
        refused = http.post(
            "/vectors/one/combine", json=DOUBLE, headers={"Idempotency-Key": "k1"}
        )  # another name
        assert refused.status_code == 422
        assert read(client) == 2
        assert combine(http, "k1", Authorization="Bearer other").status_code == 200
        assert read(client) == 3
        for bad in ("", "x" * 256, "a\tb"):
            assert combine(http, bad).status_code == 422, bad
        assert read(client) == 3


def test_what_failed_may_be_tried_again(client: Client, fake_server: Server) -> None:
    with httpx.Client(base_url=fake_server.url, timeout=60) as http:
        body = {"vectors": [{"name": "sum"}, {"name": "late"}]}
        assert combine(http, "k2", body).status_code == 404
        client.vectors.put("late", ONE.content)
        assert combine(http, "k2", body).status_code == 200
        assert read(client) == 2


def test_many_at_once_are_applied_once(client: Client, fake_server: Server) -> None:
    with httpx.Client(base_url=fake_server.url, timeout=60) as http:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: combine(http, "k3"), range(8)))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.content for answer in answers}) == 1
    assert read(client) == 2


# ------------------------------------------------------------------ the memory alone

BODY = CombineRequest(vectors=[{"name": "a"}])


def ask(key: str) -> Request:
    headers = [(b"idempotency-key", key.encode())]
    scope = {"type": "http", "method": "POST", "path": "/x", "headers": headers, "server": None}
    return Request({**scope, "scheme": "http", "query_string": b""})


def count_runs(memory: AnswerMemory, keys: list[str], size: int = 10) -> int:
    runs = 0

    async def work() -> Response:
        nonlocal runs
        runs += 1
        return Response(bytes(size))

    async def run() -> None:
        for key in keys:
            await memory.once(ask(key), BODY, work)

    asyncio.run(run())
    return runs


def test_answers_are_kept_up_to_a_size_and_an_age() -> None:
    memory = AnswerMemory(2 * (ENTRY_BYTES + 10), 60)
    assert count_runs(memory, ["a", "b", "a", "b"]) == 2
    assert count_runs(memory, ["c", "a"]) == 2  # c took the place of the oldest
    assert count_runs(memory, ["big", "big"], size=10_000) == 2  # it is not kept
    assert count_runs(AnswerMemory(2**20, 1e-9), ["a", "a"]) == 2
    assert count_runs(AnswerMemory(0, 60), ["a", "a"]) == 2


def test_who_waits_for_one_that_fails_takes_its_turn() -> None:
    memory = AnswerMemory(2**20, 60)
    begun = asyncio.Event()
    runs = 0

    async def work() -> Response:
        nonlocal runs
        runs += 1
        begun.set()
        await asyncio.sleep(0.01)
        if runs == 1:
            raise RuntimeError("the first fails")
        return Response(b"done")

    async def run() -> None:
        first = asyncio.create_task(memory.once(ask("a"), BODY, work))
        await begun.wait()
        others = [asyncio.create_task(memory.once(ask("a"), BODY, work)) for _ in range(3)]
        given_up = asyncio.create_task(memory.once(ask("a"), BODY, work))
        await asyncio.sleep(0)
        given_up.cancel()  # one that no longer waits takes nobody with it
        with pytest.raises(RuntimeError):
            await first
        assert {(await other).body for other in others} == {b"done"}

    asyncio.run(run())
    assert runs == 2


def test_an_error_names_the_header() -> None:
    with pytest.raises(APIError, match="Idempotency-Key must be"):
        count_runs(AnswerMemory(2**20, 60), ["é"])


# ------------------------------------------------------------------ several processes, one ledger


class AnswerLine:
    """What leads to a ledger of answers, which may be cut."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ledger = AnswerLedger(2**20, 60, clock=lambda: self.now)
        self.is_cut = False

    async def claim(self, process: str, key: bytes, asked: bytes) -> Claim:
        if self.is_cut:
            raise ConnectionError
        await asyncio.sleep(0.001)
        return self.ledger.claim(process, key, asked)

    async def end(self, process: str, key: bytes, answer: KeptAnswer | None) -> None:
        self.ledger.end(process, key, answer)

    def connect(self, process: str) -> AnswerMemory:
        return AnswerMemory(2**20, 60, SharedAnswers(process, self.claim, self.end))


def run_twice(line: AnswerLine, *, fails: bool = False) -> tuple[list[int], list[Response]]:
    """The same request to two processes at once; who ran it, and what each answered."""
    runs: list[int] = []
    memories = [line.connect("one"), line.connect("two")]

    async def work() -> Response:
        runs.append(len(runs))
        await asyncio.sleep(0.05)
        if fails and len(runs) == 1:
            raise RuntimeError("the first fails")
        return Response(b"done %d" % len(runs))

    async def run() -> list[Response]:
        both = await asyncio.gather(
            *(memory.once(ask("a"), BODY, work) for memory in memories), return_exceptions=True
        )
        again = await memories[1].once(ask("a"), BODY, work)
        await asyncio.sleep(0.01)
        return [found for found in (*both, again) if isinstance(found, Response)]

    return runs, run_in_own_time(run())


def test_what_is_repeated_through_another_process_is_applied_once() -> None:
    runs, answers = run_twice(AnswerLine())
    assert len(runs) == 1
    assert [answer.body for answer in answers] == [b"done 1"] * 3
    assert [answer.headers.get("idempotency-replayed") for answer in answers] == [
        None,
        "true",
        "true",
    ]


def test_what_failed_in_one_process_is_done_by_the_other() -> None:
    runs, answers = run_twice(AnswerLine(), fails=True)
    assert len(runs) == 2
    assert [answer.body for answer in answers] == [b"done 2"] * 2


def test_without_the_ledger_each_process_knows_its_own_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = AnswerLine()
    line.is_cut = True
    runs, answers = run_twice(line)
    assert len(runs) == 2
    assert len(answers) == 3
    assert "ledger of answers does not answer" in caplog.text


def test_a_key_of_another_process_refuses_another_request() -> None:
    line = AnswerLine()
    line.ledger.claim("one", b"key", b"this")

    async def run() -> None:
        shared = SharedAnswers("two", line.claim, line.end)
        with pytest.raises(AnotherRequestError):
            await shared.begin(b"key", b"that")

    asyncio.run(run())


def test_the_claim_of_a_process_that_died_is_free_after_its_lease() -> None:
    line = AnswerLine()
    assert line.ledger.claim("dead", b"key", b"this").state == "yours"
    line.now += LEASE_S / 2
    assert line.ledger.claim("other", b"key", b"this") == Claim("busy", b"this")
    assert line.ledger.claim("dead", b"key", b"this").state == "yours"  # it renews
    line.now += LEASE_S + 0.1
    assert line.ledger.claim("other", b"key", b"this").state == "yours"
    line.ledger.end("dead", b"key", None)
    assert line.ledger.claim("third", b"key", b"this").state == "busy"

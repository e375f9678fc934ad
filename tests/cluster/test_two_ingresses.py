"""Two ingresses of one cluster: limits, answers, metrics and secrets are those of one service.

The last test kills both of them.
"""

import asyncio
import json
import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import httpx
import numpy as np
import pytest

from logsteer_server.keys.ledger import LEASE_S
from logsteer_server.keys.shared import WAIT_S
from logsteer_server.observation.catalog import PROCESS_METRICS
from logsteer_server.stores.layer_vectors import LayerVectors
from tests.cluster.local import (
    CARDS,
    FAKE,
    LIMIT,
    METRICS_KEY,
    RATE,
    KeyedCluster,
    needs_all,
    needs_ray,
)
from tests.conftest import vllm_model
from tests.deploy.observed import (
    NO_GPU,
    PROMETHEUS,
    Prometheus,
    find_blind,
    find_empty,
    find_missing,
    scrape_agents,
    send_requests,
)
from tests.faults.processes import wait_for

pytestmark = [pytest.mark.engine, needs_ray]
DEMO = vllm_model("demo", adapter_slots=1, memory="64MiB")
REPLACED_S = 60.0
SETTLED_S = 2.5
"""In which a request is refused, if it is."""
LAPSE = re.compile(r"the ledger of (?:keys' limits|answers) does not answer")
LEDGER = "ray::ServeReplica:logsteer:ledger"


def score(cluster: KeyedCluster, key: str, items: int, first: int = 5, length: int = 2) -> int:
    """The status of a request of so many contexts, each of other tokens."""
    contexts = [[first, *divmod(n, 50), *range(length - 2)] for n in range(items)]
    body = {
        "model": "fake",
        "items": [{"context_ids": own, "target_ids": [[6]]} for own in contexts],
        "cache": False,
    }
    with cluster.connect(key) as http:
        return http.post("/logprob", json=body).status_code


async def overload(cluster: KeyedCluster) -> None:
    """Send more than is taken on at once, and wait for no answers but the first refusal."""
    contexts = [[n, *range(5, 120)] for n in range(5, 780)]  # three quarters of what may be pending
    items = [{"context_ids": own, "target_ids": [[6]]} for own in contexts]
    body = {"model": "fake", "items": items, "cache": False}
    url, headers = f"{cluster.url}/logprob", cluster.headers
    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        # Of four at least two come to the same ingress.
        asked = [asyncio.create_task(http.post(url, json=body)) for _ in range(4)]
        for answer in asyncio.as_completed(asked):
            assert (await answer).status_code == 429
            break
        for one in asked:
            one.cancel()


class HeldRequest:
    """A request that is at work for as long as the last byte of its body is kept back."""

    def __init__(self, cluster: KeyedCluster, key: str) -> None:
        host, _, port = cluster.url.removeprefix("http://").partition(":")
        self._connection = HTTPConnection(host, int(port), timeout=60)
        item = {"context_ids": [5, 6], "target_ids": [[7]]}
        body = json.dumps({"model": "fake", "items": [item]}).encode()
        self._connection.putrequest("POST", "/logprob")
        self._connection.putheader("Authorization", f"Bearer {cluster.keys[key]}")
        self._connection.putheader("Content-Type", "application/json")
        self._connection.putheader("Content-Length", str(len(body)))
        self._connection.endheaders(body[:-1])
        self._last = body[-1:]

    def is_answered(self) -> bool:
        """Whether an answer has come: a refusal, or the connection's end."""
        return bool(select.select([self._connection.sock], [], [], 0)[0])

    def finish(self) -> int:
        """Send the rest; the status."""
        self._connection.send(self._last)
        status = self._connection.getresponse().status
        self._connection.close()
        return status

    def drop(self) -> None:
        self._connection.close()


@contextmanager
def holding(cluster: KeyedCluster, number: int = 0) -> Iterator[list[HeldRequest]]:
    """So many requests of the key `few` at work; all that are there in the end are dropped."""
    held: list[HeldRequest] = []
    try:
        hold(cluster, held, number)
        yield held
    finally:
        for own in held:
            own.drop()


def hold(cluster: KeyedCluster, held: list[HeldRequest], number: int) -> None:
    """Have so many at work; what is refused, because another ingress is full, comes again."""
    deadline = time.monotonic() + 60
    while len(held) < number:
        assert time.monotonic() < deadline, f"only {len(held)} are let in"
        held += [HeldRequest(cluster, "few") for _ in range(number - len(held))]
        time.sleep(SETTLED_S)
        drop_answered(held)


def drop_answered(held: list[HeldRequest]) -> bool:
    """Drop those that were refused; whether there were any."""
    answered = [own for own in held if own.is_answered()]
    for own in answered:
        held.remove(own)
        own.drop()
    return bool(answered)


def check_places(cluster: KeyedCluster) -> None:
    """With one request less than the limit at work another is let in, with all of them none."""
    with holding(cluster, LIMIT - 1) as held:
        for _ in range(6):  # once the place is given back, and the ledger told
            wait_for(lambda: score(cluster, "few", 1) == 200)
        check_full(cluster, held)
    wait_for(lambda: score(cluster, "few", 1) == 200)


def check_full(cluster: KeyedCluster, held: list[HeldRequest]) -> None:
    """With as many requests at work as may be no other is let in; all of them are answered."""
    for _ in range(5):
        hold(cluster, held, LIMIT)
        statuses = {score(cluster, "few", 1) for _ in range(6)}
        if not drop_answered(held):  # else there was room: they were refused later than SETTLED_S
            break
    assert statuses == {429}
    assert [own.finish() for own in held] == [200] * LIMIT


def while_ledgers_answer(cluster: KeyedCluster, check: Callable[[], None]) -> None:
    """Check something that holds for as long as the ledgers answer each ingress in time.

    On a busy machine one may not, for a moment; the ingress says so, and goes on by itself. What
    was found meanwhile says nothing, and the check begins anew.
    """
    for _ in range(3):
        before = count_lapses(cluster)
        try:
            check()
            return
        except AssertionError:
            if count_lapses(cluster) == before:
                raise
            wait_for(lambda: not any(read_away(cluster) for _ in range(CARDS)))
    raise AssertionError("a ledger did not answer in time, each time")


def count_lapses(cluster: KeyedCluster) -> int:
    """How often ingresses have logged so far that a ledger did not answer them."""
    home = Path(cluster.find_own("ingress")[0].environ()["XDG_DATA_HOME"])
    logs = home.parent.glob("session_*/logs/worker-*.err")
    return sum(len(LAPSE.findall(log.read_text(errors="replace"))) for log in logs)


def read_away(cluster: KeyedCluster) -> float:
    """Whether the ledger is away, as one of the ingresses has it."""
    return cluster.read_page()['logsteer_cluster_part_away{part="ledger"}']


@pytest.fixture(scope="module")
def keyed(cluster: KeyedCluster) -> KeyedCluster:
    cluster.serve(FAKE, DEMO)
    return cluster


def test_a_keys_requests_at_once_are_those_of_all_ingresses(keyed: KeyedCluster) -> None:
    while_ledgers_answer(keyed, lambda: check_places(keyed))


def test_a_keys_tokens_are_those_of_all_ingresses(keyed: KeyedCluster) -> None:
    began = time.monotonic()
    statuses = []
    while 429 not in statuses[-8:]:
        statuses.append(score(keyed, "slow", 20, 5 + len(statuses), length=50))
        assert len(statuses) < 40
    given = 1020 * statuses.count(200)  # 51 tokens an item
    allowed = RATE * (1 + (time.monotonic() - began) / 60) + 1020
    assert RATE <= given <= allowed + 1020
    assert {score(keyed, "slow", 1) for _ in range(8)} == {429}, "whichever ingress answers"


def test_a_write_that_is_repeated_through_any_ingress_is_applied_once(keyed: KeyedCluster) -> None:
    content = LayerVectors({1: np.arange(1, 17)}).content
    headers: dict[str, str] = {}
    body = {"vectors": [{"name": "part", "weight": 2.0}]}
    with keyed.connect("ann") as http:
        http.put("/vectors/part", content=content).raise_for_status()

    def combine(_: int) -> httpx.Response:
        with keyed.connect("ann") as http:
            return http.post("/vectors/whole/combine", json=body, headers=headers)

    def check() -> None:
        headers["Idempotency-Key"] = f"combined once, {time.monotonic_ns()}"
        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(combine, range(8)), *map(combine, range(12))]
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.content for answer in answers}) == 1
        replayed = [answer.headers.get("idempotency-replayed") for answer in answers]
        assert replayed.count(None) == 1

    while_ledgers_answer(keyed, check)


def test_a_vector_uploaded_through_one_ingress_steers_on_the_other(keyed: KeyedCluster) -> None:
    with keyed.client("demo") as client:
        width = client.model("demo").hidden_size
        client.vectors.put("north", LayerVectors({1: np.ones(width)}).content)
    steering = {"vectors": [{"name": "north", "scale": 4.0}]}
    body = {"model": "demo", "prompts": ["The sea"], "max_tokens": 2, "steering": steering}
    receipts = [keyed.ask("steer", body)["steering"] for _ in range(12)]
    assert all(receipt["tokens_steered"] > 0 for receipt in receipts)


def test_no_key_stands_in_what_ray_logs_or_keeps(keyed: KeyedCluster) -> None:
    assert METRICS_KEY not in keyed.output
    headers = {"Authorization": "Bearer another"}
    assert httpx.get(f"{keyed.url}/metrics", headers=headers, timeout=60).status_code == 401
    assert keyed.read_page(), "each ingress has read it by itself"


def test_an_ingress_has_the_readings_of_all_engines(keyed: KeyedCluster) -> None:
    name = "logsteer_engine_heartbeat_age_seconds"

    def has_all() -> bool:
        page = keyed.read_page()
        for model, count in (("demo", 1), ("fake", 2)):
            ages = [age for own, age in page.items() if own.startswith(f'{name}{{model="{model}"')]
            if len(ages) != count or max(ages) >= 10:
                return False
        sizes = ("logsteer_kv_cache_blocks", "logsteer_steering_slots")
        return all(page.get(f'{own}{{model="demo",replica="0"}}', 0) > 0 for own in sizes)

    for _ in range(CARDS):  # actors tell the ledger now and then, and each ingress reads it
        wait_for(has_all)


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed: NOT CHECKED")
def test_one_prometheus_on_rays_agents_answers_every_query(
    keyed: KeyedCluster, tmp_path: Path
) -> None:
    with keyed.connect("ann") as http:
        width = http.get("/models/demo").json()["hidden_size"]
    with scrape_agents(keyed.targets, tmp_path) as prometheus:
        work = send_requests(keyed.url, [keyed.keys["ann"]], ["demo", "fake"], "demo", width, 5.0)
        asyncio.run(work)
        asyncio.run(overload(keyed))
        # Ray's processes tell their agents now and then: each of these is waited for.
        wait_for(lambda: find_empty(prometheus) == NO_GPU)  # on a machine with a GPU none
        wait_for(lambda: all(own.startswith("logsteer_gpu_") for own in find_missing(prometheus)))
        wait_for(lambda: all(prometheus.query(name) for name in PROCESS_METRICS))
        wait_for(lambda: not find_blind(prometheus))
        wait_for(lambda: count_processes(prometheus, "logsteer_requests_in_flight") == 2)
        wait_for(lambda: count_processes(prometheus, "logsteer_engine_step_seconds_count") == 3)
        name = 'logsteer_requests_total{path="/logprob",status="200"}'
        by_process = f"sum by (process) ({name})"

        def are_equal() -> bool:
            counted = {keyed.read_page().get(name, 0.0) for _ in range(30)}  # of either ingress
            return {float(own["value"][1]) for own in prometheus.query(by_process)} == counted

        wait_for(are_equal)


def count_processes(prometheus: Prometheus, metric: str) -> int:
    """How many ingresses and actors a metric comes from."""
    return len(prometheus.query(f"count by (process) ({metric})"))


@needs_all
def test_without_the_ledger_no_request_is_lost_and_no_key_without_limit(
    keyed: KeyedCluster,
) -> None:
    (ledger,) = keyed.find(LEDGER)
    os.kill(ledger.pid, signal.SIGSTOP)
    for _ in range(6):  # so that both ingresses know
        began = time.monotonic()
        assert score(keyed, "few", 1) == 200
        assert time.monotonic() - began < WAIT_S + 20
    wait_for(lambda: all(read_away(keyed) for _ in range(CARDS)))
    with holding(keyed) as held:
        check_full(keyed, held)
    # Serve's health check kills it, and has another in its place.
    wait_for(lambda: bool({own.pid for own in keyed.find(LEDGER)} - {ledger.pid}), REPLACED_S)
    wait_for(lambda: ledger.pid not in {own.pid for own in keyed.find(LEDGER)}, 60)
    wait_for(lambda: not any(read_away(keyed) for _ in range(CARDS)))
    while_ledgers_answer(keyed, lambda: check_places(keyed))


def test_what_was_changed_and_not_what_was_held_outlives_the_ingresses(
    keyed: KeyedCluster,
) -> None:
    """The model that is unloaded came by a reload."""
    unloaded = keyed.request("POST", "/models/demo/unload", params={"wait_s": 30})
    assert unloaded.json()["state"] == "unloaded"
    actors = {own.pid for own in keyed.find_actors()}
    with holding(keyed, LIMIT) as held:
        killed = keyed.find_own("ingress")
        assert len(killed) == 2
        for ingress in killed:
            ingress.kill()
        wait_for(lambda: all(own.is_answered() for own in held), 60)

    def is_let_in() -> bool:
        try:
            return score(keyed, "few", 1) == 200
        except httpx.TransportError:
            return False  # the one that it came to has ended, or is not there yet

    wait_for(is_let_in, LEASE_S + 60)
    wait_for(lambda: len(keyed.find_own("ingress")) == 2, 60)
    expected = [("fake", "ready"), ("demo", "unloaded")]

    def is_so() -> bool:
        try:
            pages = [keyed.request("GET", "/models").json()["models"] for _ in range(12)]
        except (httpx.HTTPError, ValueError, KeyError):
            return False  # one of them is not there yet
        return all([(own["id"], own["state"]) for own in page] == expected for page in pages)

    wait_for(is_so, 60)
    assert {own.pid for own in keyed.find_actors()} == actors

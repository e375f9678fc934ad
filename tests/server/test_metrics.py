"""`GET /metrics`: what is exposed parses, and says what happened."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from logsteer import Client
from logsteer.errors import APIError
from tests.conftest import Server, ServerFactory, fake_model
from tests.faults.processes import wait_for
from tests.held import HOLD, held, may_hold

CRASH = 77
KEY = "k3y"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Readings:
    """What a server's metrics say now."""

    def __init__(self, server: Server) -> None:
        response = httpx.get(f"{server.url}/metrics")  # without the key
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        self.samples = parse(response.text)

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples.get((f"logsteer_{name}", tuple(sorted(labels.items()))), 0.0)


@pytest.fixture(scope="module")
def server(start_server: ServerFactory, hold: Path) -> Iterator[Server]:
    """A quick model and a slow one, behind a key."""
    models = [
        fake_model("quick", crash_id=CRASH, **may_hold(hold)),
        fake_model("slow", delay_s=0.5, **may_hold(hold)),
    ]
    patch = pytest.MonkeyPatch()
    patch.setenv("LOGSTEER_API_KEY", KEY)
    yield start_server({"models": models})
    patch.undo()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, api_key=KEY, max_retries=0) as client:
        yield client


def item(*context: int) -> dict[str, list[int] | list[list[int]]]:
    return {"context_ids": list(context), "target_ids": [[8, 9]]}


def test_tokens_and_cache_are_counted_by_model(client: Client, server: Server) -> None:
    before = Readings(server)
    items = [item(5, 6, 7), item(5, 6, 7), item(5, 6)]
    client.logprob(items, model="quick")
    client.logprob([item(5, 6), item(5)], model="quick")
    after = Readings(server)

    def grown(name: str, model: str = "quick") -> float:
        return after(name, model=model) - before(name, model=model)

    assert grown("prompt_tokens_total") == 4 + 3 + 2  # each once, a target's last one not read
    assert grown("scored_tokens_total") == 2 + 2 + 2
    assert grown("result_cache_hits_total") == 1 + 1
    assert grown("result_cache_misses_total") == 2 + 1
    assert grown("prompt_tokens_total", "slow") == 0
    assert after("result_cache_bytes") > before("result_cache_bytes")


def test_requests_are_counted_under_their_template(client: Client, server: Server) -> None:
    before = Readings(server)
    client.logprob([item(5)], model="quick")
    for model in ("quick", "slow"):
        client.model(model)
    with pytest.raises(APIError):
        client.model("nobody")
    with pytest.raises(APIError):
        client.logprob([], model="quick")
    with pytest.raises(APIError):
        client.logprob([item(5)], model="nobody")
    for path in ("/nothing", "/here"):
        assert httpx.get(f"{server.url}{path}").status_code == 404
    after = Readings(server)

    def grown(path: str, status: str) -> float:
        labels = {"path": path, "status": status}
        return after("requests_total", **labels) - before("requests_total", **labels)

    assert grown("/logprob", "200") == 1
    assert grown("/logprob", "422") + grown("/logprob", "404") == 1  # an empty list is not sent
    assert grown("/models/{model_id:path}", "200") == 2
    assert grown("/models/{model_id:path}", "404") == 1
    assert grown("other", "404") == 2
    paths = {dict(labels).get("path") for _, labels in after.samples}
    assert not any("nobody" in path or "nothing" in path for path in paths if path)


def test_a_request_is_timed_to_the_end_of_its_answer(client: Client, server: Server) -> None:
    text = ["a text that is long enough for several windows, one after the other, " * 8]
    before = Readings(server)
    list(client.perplexity_events(text, model="slow"))
    # A stream is counted once the server has cleared up behind its last byte.
    wait_for(lambda: Readings(server)("request_seconds_count", path="/perplexity"))
    after = Readings(server)
    spent = after("request_seconds_sum", path="/perplexity") - before(
        "request_seconds_sum", path="/perplexity"
    )
    assert after("request_seconds_count", path="/perplexity") == 1
    assert spent >= 0.5
    assert after("request_seconds_bucket", path="/perplexity", le="0.25") == 0
    assert after("request_seconds_bucket", path="/perplexity", le="+Inf") == 1


def test_pending_work_is_shown_while_it_is_pending(
    client: Client, server: Server, hold: Path
) -> None:
    assert Readings(server)("pending_tokens", model="slow") == 0
    with ThreadPoolExecutor(1) as pool:
        with held(hold):
            call = pool.submit(client.logprob, [item(20, 21, HOLD)], model="slow")
            while not (pending := Readings(server)("pending_tokens", model="slow")):
                assert not call.done()
        assert pending == 4
        assert call.result().results
    assert Readings(server)("pending_tokens", model="slow") == 0


def test_restarts_and_readiness_are_shown(client: Client, server: Server, hold: Path) -> None:
    before = Readings(server)
    assert before("model_ready", model="quick") == 1
    assert before("engine_restarts_total", model="quick", replica="0") == 0
    with held(hold):
        with pytest.raises(APIError):
            client.logprob([item(CRASH)], model="quick")
        wait_for(lambda: Readings(server)("model_ready", model="quick") == 0)
    wait_for(lambda: client.ready().ready)
    after = Readings(server)
    assert after("model_ready", model="quick") == 1
    assert after("engine_restarts_total", model="quick", replica="0") == 1
    assert after("engine_restarts_total", model="slow", replica="0") == 0
    assert after("requests_total", path="/logprob", status="503") == 1

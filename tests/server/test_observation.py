"""What is counted and read, piece by piece, and what `GET /metrics` says of it."""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send

from logsteer import Client
from logsteer.errors import APIError
from logsteer_server.contract.engine import TIME_BOUNDS_S, DeviceMemory, EngineReading, StepCounts
from logsteer_server.observation.metrics import (
    ENGINE,
    OTHER_KEYS,
    EngineStatus,
    Metrics,
    ModelReading,
    ProcessReading,
    TokenTimes,
    read_family,
)
from logsteer_server.observation.requests import RequestObserver, RequestRecord
from logsteer_server.settings import Settings, parse_settings
from logsteer_server.stores import upkeep
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.threads import StoreThreads
from logsteer_server.stores.upkeep import StoreUpkeep, read_disk
from tests.conftest import Server, ServerFactory, fake_model, tlens_model, vllm_model
from tests.faults.processes import wait_for
from tests.held import HOLD, held, may_hold


def sample(text: str, name: str, **labels: str) -> float | None:
    """A sample's value; None where there is none."""
    for family in text_string_to_metric_families(text):
        for found in family.samples:
            if found.name == f"logsteer_{name}" and labels.items() <= found.labels.items():
                return found.value
    return None


class TestCounts:
    def test_a_step_on_a_bound_lies_below_it(self) -> None:
        steps = StepCounts()
        for seconds in (0.001, 0.002, 600, 601):
            steps.record(seconds)
        assert (steps.counts[:2], steps.counts[-2:]) == ([1, 1], [1, 1])
        assert steps.total_s == pytest.approx(1201.003)

    def test_the_first_token_is_the_request_and_later_ones_each_sequence(self) -> None:
        metrics = Metrics()
        times = TokenTimes(metrics.for_model("m"), 10.0)
        times.record(0, 1, 10.3)
        times.record(1, 1, 10.4)  # its own first one, which nobody has waited for since a token
        times.record(0, 2, 10.5)  # two tokens, 0.1 s each
        times.record(1, 1, 10.45)
        text = metrics.render().decode()
        assert sample(text, "time_to_first_token_seconds_count", model="m") == 1
        assert sample(text, "time_to_first_token_seconds_sum") == pytest.approx(0.3)
        assert sample(text, "time_between_tokens_seconds_count", model="m") == 3
        assert sample(text, "time_between_tokens_seconds_sum") == pytest.approx(0.2 + 0.05)

    def test_keys_beyond_the_bound_share_a_series(self) -> None:
        metrics = Metrics(max_keys=2)
        for key in ("ann", "bob", "eve", "dan", "ann", "eve"):
            metrics.record_key(key, False, (1, 2, 3))
        text = metrics.render().decode()
        counts = {key: sample(text, "key_requests_total", key=key) for key in
                  ("ann", "bob", "eve", "dan", OTHER_KEYS)}  # fmt: skip
        assert counts == {"ann": 2, "bob": 1, "eve": None, "dan": None, OTHER_KEYS: 3}

    def test_what_is_noted_of_a_write_is_noted_for_audited_requests_alone(self) -> None:
        card = {"name": "a", "sha256": "f" * 64}
        score, write = RequestRecord(scope="score"), RequestRecord(scope="write")
        for record in (score, write):
            record.record_answer(card)
        assert (score.stored, score.sha256) == ("", "")
        assert (write.stored, write.sha256) == ("a", "f" * 64)


class TestEngines:
    def status(self, **fields: object) -> EngineStatus:
        return EngineStatus("1", 3, 5, **fields)  # type: ignore[arg-type]

    def render(self, *engines: EngineStatus) -> str:
        metrics = Metrics()
        metrics.read_models = lambda: [ModelReading("m", 7, 10, True, engines)]
        return metrics.render().decode()

    def test_one_without_a_process_has_no_samples_but_its_counts(self) -> None:
        text = self.render(self.status())
        assert sample(text, "engine_restarts_total", model="m", replica="1") == 3
        assert sample(text, "engine_sequences_queued", replica="1") == 5
        for name in ("engine_heartbeat_age_seconds", "kv_cache_blocks", "engine_step_seconds_sum"):
            assert sample(text, name) is None

    def test_what_an_engine_does_not_have_is_absent_and_not_0(self) -> None:
        text = self.render(self.status(reading=EngineReading(2, 3)))
        assert sample(text, "engine_sequences_running") == 2
        assert sample(text, "engine_sequences_waiting") == 3
        for name in (
            "kv_cache_blocks_used", "engine_preemptions_total", "steering_slots", "adapter_slots",
            "gpu_memory_bytes",
        ):  # fmt: skip
            assert sample(text, name) is None

    def test_all_that_an_engine_has_is_shown(self) -> None:
        memory = [DeviceMemory("0", 4, 5, 10), DeviceMemory("1", 6, 3, 10)]
        steps = StepCounts([1] + [0] * (len(TIME_BOUNDS_S) - 1) + [2], 1300.0)
        reading = EngineReading(1, 2, 100, 40, 7, 64, 3, 4, 2, memory)
        text = self.render(
            self.status(reading=reading, steps=steps, pid=os.getpid(), heartbeat_age_s=0.5)
        )
        assert sample(text, "kv_cache_blocks") == 100
        assert sample(text, "kv_cache_blocks_used") == 40
        assert sample(text, "engine_preemptions_total") == 7
        for name, value in (
            ("num_requests_running", 1), ("num_requests_waiting", 7), ("kv_cache_usage_perc", 0.4),
            ("num_preemptions_total", 7),
        ):  # fmt: skip
            labels = 'engine="1",model_name="m"'
            assert f"\nvllm:{name}{{{labels}}} {float(value)}\n" in text
        assert (sample(text, "steering_slots"), sample(text, "steering_slots_used")) == (64, 3)
        assert (sample(text, "adapter_slots"), sample(text, "adapter_slots_used")) == (4, 2)
        assert sample(text, "gpu_memory_held_bytes", device="1") == 6
        assert sample(text, "gpu_memory_free_bytes", device="0") == 5
        assert sample(text, "engine_step_seconds_bucket", le="600.0") == 1
        assert sample(text, "engine_step_seconds_count") == 3
        assert sample(text, "engine_step_seconds_sum") == 1300
        assert (sample(text, "engine_process_resident_memory_bytes") or 0) > 2**20
        given = {name for name, labels in Metrics().labels.items() if labels[:2] == ENGINE}
        assert all(f"\n{name}" in text for name in given)


@pytest.mark.parametrize(("status", "counted"), [(200, None), (503, None), (500, 1), (None, 1)])
def test_a_crash_is_a_problem_and_a_probe_that_says_no_is_none(
    status: int | None, counted: int | None
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if status is None:
            raise RuntimeError("a fault")
        await send({"type": "http.response.start", "status": status})

    async def nothing(*_: object) -> Message:
        return {"type": "http.request"}

    metrics = Metrics()
    scope = {"type": "http", "method": "GET", "headers": []}
    with suppress(RuntimeError):
        asyncio.run(RequestObserver(app, metrics)(scope, nothing, nothing))
    text = metrics.render().decode()
    assert sample(text, "errors_total", path="other", code="internal") == counted
    assert sample(text, "requests_total", status=str(status or 500)) == 1
    assert sample(text, "requests_in_flight") == 0


def read_large(pid: int) -> ProcessReading | None:
    """What a process and those below it take, once that is 64 MiB."""
    found = read_family(pid)
    return found if found is not None and found.resident_bytes >= 2**26 else None


class TestProcesses:
    def test_a_family_is_a_process_and_those_below_it(self) -> None:
        code = "import subprocess, sys; subprocess.run([sys.executable, '-c', %r])"
        inner = "x = bytearray(2**26); import sys; sys.stdin.read()"
        with subprocess.Popen([sys.executable, "-c", code % inner], stdin=subprocess.PIPE) as alone:
            found = wait_for(lambda: read_large(alone.pid))  # 64 MiB of the process below it
            assert found.cpu_s > 0

    def test_one_that_is_gone_is_none(self) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            process.wait()
        assert read_family(process.pid) is None


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    given = {"models": [fake_model()], "store_directory": "store"}
    return parse_settings(given, tmp_path)


class TestDisk:
    def test_stores_of_everybody_and_of_keys_are_counted_apart(self, settings: Settings) -> None:
        for place, size in (("vectors", 10), ("keys/ann/vectors", 3), ("keys/bob/vectors", 4)):
            contents = settings.store_path / place / "contents"
            contents.mkdir(parents=True)
            (contents / "a.safetensors").write_bytes(b"x" * size)
            (contents.parent / "lock").write_bytes(b"not a content")
        found = read_disk(Objects.open(settings))
        nothing = {"shared": 0, "keys": 0}
        assert found.held == {
            "vectors": {"shared": 10, "keys": 7},
            "overrides": nothing, "adapters": nothing, "saes": nothing,
            "variants": nothing,
        }  # fmt: skip
        assert 0 < found.free_bytes <= found.size_bytes

    def test_nothing_stored_yet_is_no_error(self, settings: Settings) -> None:
        found = read_disk(Objects.open(settings))
        assert not settings.store_path.exists()
        assert found.free_bytes

    async def test_a_disk_that_hangs_delays_nobody(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, release = threading.Event(), threading.Event()

        def hang(objects: Objects) -> object:
            begun.set()
            release.wait(60)
            return read_disk(objects)

        monkeypatch.setattr(upkeep, "read_disk", hang)

        usage = StoreUpkeep(settings, Objects.open(settings), StoreThreads())
        usage.start()
        assert await asyncio.to_thread(begun.wait, 60)
        assert usage.reading.free_bytes is None
        release.set()
        while usage.reading.free_bytes is None:
            await asyncio.sleep(0.01)
        usage.close()


@pytest.fixture(scope="module")
def guarded(start_server: ServerFactory, hold: Path) -> Server:
    """A slow model, and metrics behind a key."""
    model = fake_model("slow", delay_s=0.2, ahead_tokens=8, **may_hold(hold))
    return start_server({"models": [model], "metrics_key": "k"})


class TestEndpoint:
    def scrape(self, guarded: Server) -> str:
        header = {"Authorization": "Bearer k"}
        return httpx.get(f"{guarded.url}/metrics", headers=header).raise_for_status().text

    def scrape_waiting(self, guarded: Server) -> str | None:
        text = self.scrape(guarded)
        return text if 0 < (sample(text, "engine_sequences_queued") or 0) < 8 else None

    def test_a_key_of_its_own_is_asked_for(self, guarded: Server) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic k"}):
            answer = httpx.get(f"{guarded.url}/metrics", headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
        assert "logsteer_build_info" in self.scrape(guarded)

    def test_what_waits_is_told_apart(self, guarded: Server, hold: Path) -> None:
        before = self.scrape(guarded)
        items = [{"context_ids": [HOLD, 6, 7, n], "target_ids": [[8]]} for n in range(5, 13)]
        with Client(guarded.url) as client:
            sender = threading.Thread(target=client.logprob, args=(items,))
            with held(hold):
                sender.start()
                # The engine has some of them, and the others wait for room in it.
                text = wait_for(lambda: self.scrape_waiting(guarded))
                assert sender.is_alive()
            sender.join()
            with pytest.raises(APIError):
                client.logprob(items, model="nobody")
        assert sample(text, "requests_in_flight") == 2  # this scrape is one
        assert 0 < (sample(text, "engine_sequences_queued", model="slow") or 0) < 8
        assert sample(text, "pending_tokens_limit") == 8_000_000
        after = self.scrape(guarded)
        assert sample(after, "errors_total", path="/logprob", code="unknown_model") == 1
        assert sample(after, "queue_seconds_count", model="slow") == 1
        assert sample(after, "engine_seconds_count", model="slow") == 1
        # Steps are told with the next heartbeat.
        name = "engine_step_seconds_sum"
        wait_for(lambda: (sample(self.scrape(guarded), name, model="slow") or 0) >= 0.2)
        assert sample(before, "engine_sequences_queued") == 0
        assert sample(after, "engine_sequences_queued") == 0


@pytest.mark.engine
def test_real_engines_say_what_they_are_at(start_server: ServerFactory) -> None:
    """While both generate: sequences, and vLLM's blocks and slots."""
    models = [vllm_model("vllm", adapter_slots=2), tlens_model("tlens")]
    server = start_server({"models": models})
    seen: dict[str, float] = {}
    with Client(server.url) as client:
        while not client.ready().ready:
            time.sleep(0.1)
        width = client.models().models[0].hidden_size
        vector = {"data": {"1": [0.1] * (width or 0)}, "scale": 1.0}

        def draw(model: str, times: int) -> None:
            prompts = [list(range(5, 40))] * 4
            for _ in range(times):
                client.steer(None, {"vectors": [vector]}, prompt_ids=prompts, max_tokens=950,
                             ignore_eos=True, model=model)  # fmt: skip

        times = {"vllm": 1, "tlens": 5}
        rounds = 0
        # Engines tell once a second; on a machine that stood still that may be missed.
        while rounds < 5 and not (seen.get("vllm") == seen.get("tlens") == 4):
            rounds += 1
            threads = [threading.Thread(target=draw, args=pair) for pair in times.items()]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                text = httpx.get(f"{server.url}/metrics").text
                for name in ("kv_cache_blocks_used", "steering_slots_used", "adapter_slots_used"):
                    value = sample(text, name, model="vllm") or 0
                    seen[name] = max(value, seen.get(name, 0))
                for model in ("vllm", "tlens"):
                    value = sample(text, "engine_sequences_running", model=model) or 0
                    seen[model] = max(value, seen.get(model, 0))
                time.sleep(0.1)
        url = f"{server.url}/metrics"
        wait_for(lambda: not sample(httpx.get(url).text, "kv_cache_blocks_used"))
        text = httpx.get(url).text
    assert seen["vllm"] == seen["tlens"] == 4
    assert seen["steering_slots_used"] == 1, "four sequences, one plan"
    assert seen["adapter_slots_used"] == 0
    assert 4 <= seen["kv_cache_blocks_used"] <= 4 * 31, "of 32 tokens"
    assert sample(text, "steering_slots", model="vllm") == 64
    assert sample(text, "adapter_slots", model="vllm") == 2
    assert sample(text, "kv_cache_blocks", model="tlens") is None
    for model, count in times.items():
        count *= rounds
        assert sample(text, "generated_tokens_total", model=model) == count * 4 * 950
        assert (sample(text, "steered_tokens_total", model=model) or 0) > count * 3 * 950
        assert (sample(text, "engine_process_cpu_seconds_total", model=model) or 0) > 1


CRASH = 77
KEY = "k3y"


def take_readings(server: Server) -> Callable[..., float]:
    """What a server's metrics say now; 0 where there is no such sample."""
    response = httpx.get(f"{server.url}/metrics")  # without the key
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return lambda name, **labels: sample(response.text, name, **labels) or 0.0


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
    before = take_readings(server)
    items = [item(5, 6, 7), item(5, 6, 7), item(5, 6)]
    client.logprob(items, model="quick")
    client.logprob([item(5, 6), item(5)], model="quick")
    after = take_readings(server)

    def grown(name: str, model: str = "quick") -> float:
        return after(name, model=model) - before(name, model=model)

    assert grown("prompt_tokens_total") == 4 + 3 + 2  # each once, a target's last one not read
    assert grown("scored_tokens_total") == 2 + 2 + 2
    assert grown("result_cache_hits_total") == 1 + 1
    assert grown("result_cache_misses_total") == 2 + 1
    assert grown("prompt_tokens_total", "slow") == 0
    assert after("result_cache_bytes") > before("result_cache_bytes")


def test_requests_are_counted_under_their_template(client: Client, server: Server) -> None:
    before = take_readings(server)
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
    after = take_readings(server)

    def grown(path: str, status: str) -> float:
        labels = {"path": path, "status": status}
        return after("requests_total", **labels) - before("requests_total", **labels)

    assert grown("/logprob", "200") == 1
    assert grown("/logprob", "422") + grown("/logprob", "404") == 1  # an empty list is not sent
    assert grown("/models/{model_id:path}", "200") == 2
    assert grown("/models/{model_id:path}", "404") == 1
    assert grown("other", "404") == 2
    assert not re.search('path="[^"]*(nobody|nothing)', httpx.get(f"{server.url}/metrics").text)


def test_a_request_is_timed_to_the_end_of_its_answer(client: Client, server: Server) -> None:
    text = ["a text that is long enough for several windows, one after the other, " * 8]
    before = take_readings(server)
    list(client.perplexity_events(text, model="slow"))
    # A stream is counted once the server has cleared up behind its last byte.
    wait_for(lambda: take_readings(server)("request_seconds_count", path="/perplexity"))
    after = take_readings(server)
    spent = after("request_seconds_sum", path="/perplexity") - before(
        "request_seconds_sum", path="/perplexity"
    )
    assert after("request_seconds_count", path="/perplexity") == 1
    assert spent >= 0.5
    assert after("request_seconds_bucket", path="/perplexity", le="0.25") == 0
    assert after("request_seconds_bucket", path="/perplexity", le="+Inf") == 1


def test_restarts_and_readiness_are_shown(client: Client, server: Server, hold: Path) -> None:
    before = take_readings(server)
    assert before("model_ready", model="quick") == 1
    assert before("engine_restarts_total", model="quick", replica="0") == 0
    with held(hold):
        with pytest.raises(APIError):
            client.logprob([item(CRASH)], model="quick")
        wait_for(lambda: take_readings(server)("model_ready", model="quick") == 0)
    wait_for(lambda: client.ready().ready)
    after = take_readings(server)
    assert after("model_ready", model="quick") == 1
    assert after("engine_restarts_total", model="quick", replica="0") == 1
    assert after("engine_restarts_total", model="slow", replica="0") == 0
    assert after("requests_total", path="/logprob", status="503") == 1


def test_a_key_is_asked_for_where_one_is_set(server: Server) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
        response = httpx.post(f"{server.url}/logprob", json={"items": [item(5)]}, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{server.url}/healthz").status_code == 200

"""Admission: the arithmetic of the budget, and over HTTP that overload is told before anything.

The fake engine is slow and one call fills its budget, so whatever else comes must be refused: with
429, Retry-After and no byte of a stream. And planning: room for what is planned so far, threads for
small and large requests, ends that are noticed.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from logsteer.errors import APIError, OverloadedError, PayloadTooLargeError
from logsteer.schemas import GradientRequest
from logsteer_server.contract.jobs import EXPECTED_TOKENS, GenerateJob
from logsteer_server.models.admission import UNKNOWN_WAIT_S, Admission, Reservation
from logsteer_server.settings import ModelSettings, Settings
from logsteer_server.tasks.gradient import GradientTask
from logsteer_server.tasks.planning import (
    BYTES_PER_CHAR,
    BYTES_PER_NUMBER,
    LARGE_REQUEST,
    LONG_TEXT,
    THREADS,
    Capacity,
    Planner,
)
from logsteer_server.tasks.run import Run
from tests.conftest import ROOT, Server, ServerFactory, fake_model
from tests.refusals import refused
from tests.server.scripted_model import (
    INFO,
    SETTINGS,
    STORES,
    ScriptedHandle,
    make_model,
    register,
)


def test_a_generation_without_a_bound_of_its_own_takes_no_whole_context() -> None:
    """A chat that names no max_tokens may use all of a context of 131,072 tokens."""
    chat = GenerateJob(np.zeros(72, np.int32), 131_000)
    assert chat.num_expected == 72 + EXPECTED_TOKENS < 0.01 * chat.num_positions
    short = GenerateJob(np.zeros(72, np.int32), 8)
    assert short.num_expected == short.num_positions == 80


def test_what_would_not_fit_alone_is_too_large_and_no_overload() -> None:
    admission = Admission(100)
    with refused("payload_too_large", r"needs 101 tokens.*max_pending_tokens", retryable=False):
        admission.enter().cover(101)
    assert admission.pending == 0


def refused_after(admission: Admission) -> float:
    """What a caller is told to wait who is refused."""
    with pytest.raises(OverloadedError) as caught:
        admission.enter()
    return caught.value.retry_after


def test_who_is_refused_waits_as_long_as_the_work_is_measured_to_take() -> None:
    admission = Admission(1000)
    admission.enter().cover(1000)
    assert refused_after(admission) == UNKNOWN_WAIT_S
    admission.record_speed(500, 5.0)  # 100 tokens/s
    assert refused_after(admission) == 10
    admission.record_speed(500, 2.5)  # 200 tokens/s, of which a fifth counts: 120
    assert refused_after(admission) == 8
    for _ in range(50):
        admission.record_speed(10**6, 0.0)
    assert refused_after(admission) == 1, "never told to come back at once"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 120)), max_size=30))
def test_the_budget_is_never_exceeded_and_never_leaks(steps: list[tuple[int, int]]) -> None:
    """Four reservations in any order; covering 0 stands for a release."""
    admission = Admission(100)
    held: dict[int, tuple[Reservation, int]] = {}
    for who, tokens in steps:
        try:
            if who not in held:
                held[who] = (admission.enter(), 0)
            reservation, old = held[who]
            if tokens:
                reservation.cover(tokens)
                held[who] = (reservation, max(old, tokens))
            else:
                reservation.release()
                del held[who]
        except APIError:
            pass
        assert admission.pending == sum(count for _, count in held.values()) <= 100
    for reservation, _ in held.values():
        reservation.release()
    assert admission.pending == 0


def test_a_gradient_is_refused_like_all_else() -> None:
    """The fake engine has no gradients, so this one is run without HTTP."""
    handle = ScriptedHandle()
    model = make_model(handle, max_tokens=100)
    item = {"context_ids": [5] * 30, "target_ids": [[6, 7]]}
    body = GradientRequest(items=[item], wrt={"layers": [0]})  # type: ignore[list-item, arg-type]

    def differentiate() -> dict[str, Any]:
        task = GradientTask(body, register(model), STORES)
        return asyncio.run(Run(task, Capacity(SETTINGS)).finish())

    for taken in (100, 80):
        with model.admission.enter() as other:
            other.cover(taken)
            with pytest.raises(OverloadedError):
                differentiate()
            assert model.admission.pending == taken
    assert handle.num_jobs == 0
    answer = differentiate()
    (target,) = answer["results"][0]["targets"]
    assert target["gradients"]["0"].shape == (31, INFO.hidden_size)
    assert target["norms"]["0"].tolist() == pytest.approx([INFO.hidden_size**0.5] * 31)
    assert model.admission.pending == 0


BUDGET = 20_000
FULL, NEARLY_FULL = (400, 10), (370, 14)
"""Completions, and tokens of each after a prompt of 40: all of the budget, or all but 20."""
IDLE = {"slow": 0, "idle": 0}

IDS = list(range(10, 50))
TEXT = "Once upon a time there was a capital of France, and it was a long way off. " * 2
CHAT = [{"role": "user", "content": TEXT}]
ITEMS = {"items": [{"context_ids": IDS, "target_ids": [[6, 7]]}]}
PROMPT = {"prompt_ids": [IDS], "max_tokens": 40}
ABLATE = {"vectors": [{"data": {"1": [1.0] + [0.0] * 15}, "op": "ablate"}]}
PAIRS = [{"positive": TEXT, "negative": TEXT[::-1]}]
STREAM = {"stream": True}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "logprob": ("/logprob", ITEMS),
    "diagnostics": ("/diagnostics", ITEMS),
    "divergence": ("/divergence", {**ITEMS, "reference": {"model": "idle"}}),
    "perplexity": ("/perplexity", {"texts": [TEXT]}),
    "perplexity, events": ("/perplexity", {"texts": [TEXT], **STREAM}),
    "perplexity, compared": ("/perplexity", {"texts": [TEXT], "reference": "idle"}),
    "perplexity, compared, events": (
        "/perplexity",
        {"texts": [TEXT], "reference": "idle", **STREAM},
    ),
    "perplexity, compared with one that is busy, events": (
        "/perplexity",
        {"model": "idle", "texts": [TEXT], "reference": "slow", **STREAM},
    ),
    "steer": ("/steer", {**PROMPT, "steering": ABLATE}),
    "steer, events": ("/steer", {**PROMPT, "steering": ABLATE, **STREAM}),
    "generate": ("/generate", PROMPT),
    "generate, columns": ("/generate", {**PROMPT, "columns": ["entropy"]}),
    "generate, captures": ("/generate", {**PROMPT, "capture": {"layers": [1]}}),
    "generate, events": ("/generate", {**PROMPT, **STREAM}),
    "sweep": ("/sweep", {**ITEMS, "steering": ABLATE, "scales": [1.0]}),
    "patch": ("/patch", {"pairs": [{"clean": ITEMS["items"][0], "corrupted": ITEMS["items"][0]}]}),
    "lens": ("/lens", {**ITEMS, "layers": [0, 1]}),
    "activations": ("/activations", {"items": [{"token_ids": IDS}], "layers": [1]}),
    "train": ("/vectors/train", {"name": "mood", "pairs": PAIRS}),
    "completions": ("/v1/completions", {"prompt": IDS, "max_tokens": 40}),
    "completions, echo": (
        "/v1/completions",
        {"prompt": IDS, "max_tokens": 0, "echo": True, "logprobs": 1},
    ),
    "completions, events": ("/v1/completions", {"prompt": IDS, "max_tokens": 40, **STREAM}),
    "completions, echo, events": (
        "/v1/completions",
        {"prompt": IDS, "max_tokens": 40, "echo": True, **STREAM},
    ),
    "score": ("/v1/score", {"items": [IDS], "label_token_ids": [3, 4]}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 40}),
    "chat, events": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 40, **STREAM}),
}


@pytest.fixture(scope="module")
def server(start_server: ServerFactory) -> Server:
    """`slow` takes a tenth of a second for every 60 tokens; `idle` is never asked by itself."""
    return start_server(
        {
            "models": [fake_model("slow", delay_s=0.1, ahead_tokens=60), fake_model("idle")],
            "max_pending_tokens": BUDGET,
            "cache_bytes": 0,
        }
    )


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def pending(http: httpx.Client) -> dict[str, float]:
    """Tokens of accepted work, by model."""
    return {
        sample.labels["model"]: sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
        if sample.name == "logsteer_pending_tokens"
    }


def wait_until_idle(http: httpx.Client) -> float:
    """Wait until no work is pending; return the seconds that took."""
    started = time.monotonic()
    while pending(http) != IDLE and time.monotonic() < started + 30:
        time.sleep(0.02)
    assert pending(http) == IDLE
    return time.monotonic() - started


@contextmanager
def filled(http: httpx.Client, count: int, max_tokens: int) -> Iterator[int]:
    """Take this much of the budget of `slow` while the block runs, then hang up.

    Each completion takes a tenth of a second, so the work itself ends long after the block.
    """
    body = {"prompt_ids": [[5] * 40], "max_tokens": max_tokens, "n": count, "stream": True}
    taken = count * (40 + max_tokens)
    with http.stream("POST", "/generate", json={"model": "slow"} | body) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: start"
        assert pending(http) == IDLE | {"slow": taken}
        yield taken
        assert pending(http) == IDLE | {"slow": taken}, "the work ended before the block did"


def check_overload(response: httpx.Response) -> None:
    """A refusal with a time to wait, in the shape that the path has for errors."""
    assert response.status_code == 429, response.text
    assert int(response.headers["retry-after"]) >= 1
    document = response.json()
    if response.request.url.path.startswith("/v1/"):
        assert response.headers["content-type"] == "application/json"
        assert document["error"]["code"] == "overloaded"
        assert "Try again later" in document["error"]["message"]
    else:
        assert response.headers["content-type"] == "application/problem+json"
        assert (document["code"], document["retryable"]) == ("overloaded", True)
        assert "Try again later" in document["detail"]


def send(http: httpx.Client, name: str) -> httpx.Response:
    if name == "stream":
        return http.post("/perplexity/stream?model=slow", content=TEXT.encode())
    path, body = REQUESTS[name]
    return http.post(path, json={"model": "slow"} | body)


@pytest.mark.parametrize("fill", [FULL, NEARLY_FULL])
def test_over_the_budget_everything_is_refused_before_its_first_byte(
    http: httpx.Client, fill: tuple[int, int]
) -> None:
    """At a full budget the request is refused at the door, at a nearly full one once planned."""
    wait_until_idle(http)
    with filled(http, *fill) as taken:
        for name in (*REQUESTS, "stream"):
            response = send(http, name)
            assert response.status_code == 429, f"{name}: {response.text}"
            check_overload(response)
            assert pending(http) == IDLE | {"slow": taken}, f"{name} left something"
    assert wait_until_idle(http) < 15, "the work of a caller who hung up went on"
    assert http.get("/vectors").json()["vectors"] == []


def test_within_the_budget_everything_is_answered_and_gives_its_room_back(
    http: httpx.Client,
) -> None:
    """The same requests: nothing but the budget was wrong with them."""
    wait_until_idle(http)
    names = [*REQUESTS, "stream"]
    with ThreadPoolExecutor(len(names)) as pool:
        responses = pool.map(lambda name: send(http, name), names)
        for name, response in zip(names, responses, strict=True):
            assert response.status_code == 200, f"{name}: {response.text}"
            assert "event: error" not in response.text, name
            assert '{"error"' not in response.text, name
    wait_until_idle(http)


def test_every_endpoint_that_computes_is_among_these() -> None:
    paths = json.loads((ROOT / "openapi.json").read_text())["paths"]
    computing = {path for path, methods in paths.items() if "post" in methods}
    computing -= {"/tokenize", "/detokenize", "/vectors/{name}/combine", "/admin/reload"}
    # A job is not admitted: it waits until it may run.
    computing -= {f"/captures{rest}" for rest in ("", "/{name}/pause", "/{name}/resume")}
    computing -= {"/ping", "/reset_prefix_cache"}
    computing -= {f"/models/{{model_id}}/{change}" for change in ("load", "unload", "drain")}
    tried = {path for path, _ in REQUESTS.values()} | {"/perplexity/stream", "/gradient"}
    tried.add("/models/{model_id}/selftest")  # in test_selftest.py
    assert computing == tried


def test_one_tenant_leaves_room_for_others() -> None:
    admission = Admission(100, share=0.5)
    ann, eve = admission.enter("ann"), admission.enter("eve")
    ann.cover(50)
    with pytest.raises(OverloadedError):
        admission.enter("ann").cover(1)
    eve.cover(50)
    assert admission.pending == 100
    ann.release()
    with pytest.raises(PayloadTooLargeError, match="max_pending_tokens"):
        admission.enter("ann").cover(51)
    with admission.enter() as everybody:
        everybody.cover(50)
    eve.release()
    assert (admission.pending, admission.by_tenant) == (0, {})


# ------------------------------------------------------------------ planning


@pytest.fixture
def capacity() -> Iterator[Capacity]:
    found = Capacity(make_settings())
    yield found
    found.close()


def make_settings(**fields: int) -> Settings:
    return Settings(models=[ModelSettings(id="any", path="here")], **fields)


def plan_slowly(planner: Planner, parts: int, planned: list[str]) -> str:
    """A plan of ten tokens a part; `planned` gets the thread's name at each."""
    for part in range(parts):
        time.sleep(0.01)
        planned.append(threading.current_thread().name.rpartition("_")[0])
        planner.cover(10 * (part + 1))
    return "done"


def test_what_cannot_be_covered_ends_the_plan(capacity: Capacity) -> None:
    tokens = Admission(100)
    planned: list[str] = []
    with tokens.enter() as room:
        planner = Planner(capacity, room, capacity.memory.enter())
        with pytest.raises(PayloadTooLargeError, match="at most 100"):
            asyncio.run(planner.run(plan_slowly, planner, 1000, planned))
    assert len(planned) == 11
    assert tokens.pending == 0


async def test_small_requests_do_not_wait_for_large_ones(capacity: Capacity) -> None:
    planned: list[str] = []
    room = Admission(10**6).enter()
    memory = capacity.memory.enter()
    memory.cover(LARGE_REQUEST + 1)
    planner = Planner(capacity, room, memory)
    large = [
        asyncio.create_task(planner.run(plan_slowly, planner, 1000, planned)) for _ in range(10)
    ]
    while not planned:
        await asyncio.sleep(0.01)
    small = make_planner(capacity)
    assert await small.run(plan_slowly, small, 1, own := []) == "done"
    assert not any(task.done() for task in large)
    room.release()
    await asyncio.gather(*large, return_exceptions=True)
    assert (set(planned), own) == ({"planning-long"}, ["planning"])


async def test_nobody_plans_for_a_caller_who_has_left(capacity: Capacity) -> None:
    planned: list[str] = []
    with Admission(10**6).enter() as room:
        planner = Planner(capacity, room, capacity.memory.enter())
        task = asyncio.create_task(planner.run(plan_slowly, planner, 10_000, planned))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    done = len(planned)
    await asyncio.sleep(0.1)
    assert 0 < len(planned) <= done + 1


def make_planner(capacity: Capacity) -> Planner:
    return Planner(capacity, Admission(1000).enter(), capacity.memory.enter())


@pytest.mark.parametrize(("packs", "most"), [(True, 2**18), (False, 2**20 // BYTES_PER_NUMBER)])
def test_activations_are_bounded_by_what_they_take(packs: bool, most: int) -> None:
    capacity = Capacity(make_settings(max_activation_bytes=2**20))
    planner = Planner(capacity, Admission(1000).enter(), capacity.memory.enter(), packs)
    with pytest.raises(PayloadTooLargeError, match="max_activation_bytes") as caught:
        planner.expect_arrays(most + 1)
    assert ("safetensors" in caught.value.detail) == (not packs)
    assert capacity.memory.pending == 0
    planner.expect_arrays(most)
    assert capacity.memory.pending >= planner.expected_bytes > 2**20 - BYTES_PER_NUMBER
    capacity.close()


def test_answers_are_bounded_by_arithmetic() -> None:
    capacity = Capacity(make_settings(max_answer_bytes=2**20))
    planner = make_planner(capacity)
    planner.expect_rows(1000, 2)
    assert planner.expected_bytes == capacity.memory.pending > 1000 * 2 * 8
    with pytest.raises(PayloadTooLargeError, match="max_answer_bytes"):
        planner.expect_rows(1000, 2, listed=1000)


def test_memory_is_that_of_all_requests() -> None:
    capacity = Capacity(make_settings(max_pending_bytes=2**20))
    make_planner(capacity).expect_bytes(700_000)
    with pytest.raises(OverloadedError, match="bytes of memory"):
        make_planner(capacity).expect_bytes(700_000)


def test_long_texts_are_encoded_in_a_thread_of_their_own(capacity: Capacity) -> None:
    planner = make_planner(capacity)
    planner.cover_text(LONG_TEXT)
    assert capacity.memory.pending == 0
    planner.cover_text(LONG_TEXT + 1)
    assert capacity.memory.pending == (LONG_TEXT + 1) * BYTES_PER_CHAR
    names: list[str] = []
    asyncio.run(planner.run(plan_slowly, planner, 1, names))
    assert names == ["planning-texts"]
    with pytest.raises(APIError, match="max_text_chars"):
        planner.cover_text(capacity.settings.max_text_chars + 1)


async def test_long_work_leaves_the_threads_of_short_plans_alone(capacity: Capacity) -> None:
    go_on = threading.Event()

    long = [asyncio.create_task(capacity.call_long(go_on.wait, 60)) for _ in range(2 * THREADS)]
    await asyncio.sleep(0)
    assert await capacity.call(int, "7") == 7
    go_on.set()
    assert all(await asyncio.gather(*long)), "the short one was answered before they ended"

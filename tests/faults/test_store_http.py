"""Stores over HTTP under faults: uploads that do not end, floods of one key, slow readers."""

import concurrent.futures
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from logsteer_server.stores.layer_vectors import LayerVectors
from tests.conftest import Server, ServerFactory, fake_model
from tests.faults.keys import add_key, connect, serve
from tests.faults.processes import (
    forget_peak,
    open_request,
    read_memory,
    read_metric,
    wait_for,
)

VECTOR = LayerVectors({1: np.arange(1, 17)}).content
INVALID = b"no vector" * 20
ROOM = 4096
MIB = 2**20
LARGE = 32 * MIB
"""Bytes of a vector's numbers, where memory is looked at."""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Server, httpx.Client]]:
    """A server where a key may store little, and its client."""
    token = add_key(tmp_path / "keys.json", "ann", "score", "write")
    config = {
        "models": [fake_model()], "key_file": str(tmp_path / "keys.json"), "max_key_bytes": ROOM,
        "store_directory": str(tmp_path / "store"),
    }  # fmt: skip
    with serve(config, tmp_path / "server") as server, connect(server, token) as http:
        yield server, http


def test_a_key_stores_no_more_than_its_quota_whatever_is_begun(
    small: tuple[Server, httpx.Client], tmp_path: Path
) -> None:
    server, http = small
    refused = http.put("/vectors/b", content=bytes(ROOM + 1))
    assert (refused.status_code, "max_key_bytes" in refused.text) == (413, True), refused.text
    assert http.get("/vectors").json()["max_bytes"] == ROOM
    with ExitStack() as opened:
        for number in range(4):
            line, key = f"PUT /vectors/half{number}", http.headers["authorization"]
            half = open_request(server, line, b"", ROOM // 4, f"Authorization: {key}")
            opened.enter_context(half)
        wait_for(lambda: len(list((tmp_path / "store" / "uploads").glob("*.part"))) == 4)
        answer = http.put("/vectors/b", content=INVALID)
        assert (answer.status_code, "running uploads" in answer.text) == (429, True)
        assert answer.headers["retry-after"]
    # They are gone, and so is what they reserved.
    wait_for(lambda: http.put("/vectors/b", content=INVALID).status_code == 422)


@pytest.fixture(scope="module")
def large(start_server: ServerFactory) -> Server:
    """A server with a vector of 32 MiB, and a small one."""
    model = fake_model(reads_files=True)  # so that it looks at adapters and overrides
    server = start_server({"models": [model], "max_pending_bytes": 768 * MIB})
    numbers = np.random.default_rng(1).normal(size=(LARGE // 4 // 2**20, 2**20))
    content = LayerVectors(dict(enumerate(numbers, start=1))).content
    for name, data in (("large", content), ("small", VECTOR)):
        answer = httpx.put(f"{server.url}/vectors/{name}", content=data, timeout=120)
        assert answer.status_code == 200, answer.text
    return server


def test_a_sum_of_many_parts_takes_the_room_of_three(large: Server) -> None:
    """64 parts took 64 vectors' room, and more: 5.6 GB."""
    parts = [{"name": "large", "weight": 1.0 + n} for n in range(64)]
    forget_peak(large)
    before = read_memory(large, "VmRSS")
    url = f"{large.url}/vectors/sum/combine"
    answer = httpx.post(url, json={"vectors": parts, "overwrite": True}, timeout=300)
    assert answer.status_code == 200, answer.text
    assert read_memory(large, "VmHWM") - before < 5 * LARGE
    too_large = {"vectors": parts, "orthogonal_to": ["large"] * 64, "overwrite": True}
    answer = httpx.post(url, json=too_large, timeout=60)
    assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")


@pytest.mark.full
def test_many_sums_of_one_caller_keep_nobody_waiting(large: Server) -> None:
    """16 of them left `GET /vectors` of another without an answer for 300 s."""
    parts = [{"name": "large"}] * 64

    def combine(number: int) -> int:
        url = f"{large.url}/vectors/flood{number}/combine"
        headers = {"X-Request-Timeout": "5"}
        try:
            body = {"vectors": parts}
            return httpx.post(url, json=body, headers=headers, timeout=120).status_code
        except httpx.ReadTimeout:
            return 0

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(combine, number) for number in range(16)]
        wait_for(lambda: read_metric(large, "requests_in_flight") > 16)
        assert httpx.get(f"{large.url}/vectors", timeout=60).status_code == 200
        assert not all(call.done() for call in calls), "it was answered after them"
        statuses = {call.result() for call in calls}
    assert statuses <= {200, 429, 504}
    assert statuses & {429, 504}, "all were done at once: none had to wait"


@pytest.mark.full
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_slow_readers_of_a_file_hold_no_memory(large: Server, form: str) -> None:
    """Eight of them held 5.9 GB."""
    before = read_memory(large, "VmRSS")
    with ExitStack() as stack:
        streams = [
            stack.enter_context(
                httpx.stream("GET", f"{large.url}/vectors/large/content?format={form}", timeout=120)
            )
            for _ in range(8)
        ]
        heads = [next(stream.iter_raw(1024)) for stream in streams]
        assert len({head[:64] for head in heads}) == 1
        assert int(streams[0].headers["content-length"]) > LARGE
        assert read_memory(large, "VmRSS") - before < 4 * LARGE


def test_json_that_is_nested_deeply_is_refused(large: Server) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    header = len(deep).to_bytes(8, "little") + deep
    config = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6}).encode()
    weights = save({"a": np.ones(3, np.float32)})
    answers: list[Any] = [
        httpx.put(f"{large.url}/vectors/deep?format=safetensors", content=header),
        httpx.put(f"{large.url}/overrides/deep", content=header),
    ]
    forms = [
        {"config": deep, "weights": weights}, {"config": config, "weights": header},
        {"config": config[:-1] + b', "x": ' + deep + b"}", "weights": weights},
    ]  # fmt: skip
    answers += [httpx.put(f"{large.url}/adapters/deep", files=files) for files in forms]
    for answer in answers:
        assert answer.status_code == 422, answer.text

"""What engines read of themselves for /metrics: steps, preemptions, and the memory of GPUs."""

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from logsteer import APIError, Client
from logsteer_server.contract.engine import DeviceMemory
from logsteer_server.engines.machine import read_memory
from logsteer_server.engines.vllm import engine as engine_module
from logsteer_server.engines.vllm.engine import VllmEngine
from tests.conftest import Server, ServerFactory, tlens_model, vllm_model
from tests.faults.processes import read_metric, wait_for

PROMPTS = [[5 + n, 6, 7, 8 + n] for n in range(24)]
TOKENS = 250
HELD, FREE, SIZE = 6 * 2**30, 2 * 2**30, 8 * 2**30


@pytest.fixture(scope="module")
def server(start_server: ServerFactory) -> Server:
    """vLLM with a small cache, and TransformerLens; nobody else asks them for anything."""
    small = vllm_model("small", memory="4MiB", max_model_len=320)
    return start_server({"models": [small, tlens_model("tlens")], "cache_bytes": 0})


@pytest.mark.engine
def test_a_text_is_read_in_as_many_steps_as_it_takes(server: Server) -> None:
    ids = [5 + n % 50 for n in range(100)]
    items = [{"context_ids": ids[:1], "target_ids": [ids[1:]]}]

    def count_steps() -> float:
        return read_metric(server, "engine_step_seconds_count", model="small")

    with Client(server.url, model="small", timeout=300) as client:
        whole = client.logprob(items)
        wait_for(count_steps)
        before = count_steps()
        split = client.logprob(items, step_tokens=8)
        wait_for(lambda: count_steps() - before >= 99 / 8)  # heartbeats bring them
        client.logprob(items)
        time.sleep(3)
        assert count_steps() - before < 2 * 99 / 8
        with pytest.raises(APIError, match="reads every text in one step"):
            client.logprob(items, model="tlens", step_tokens=8)
    apart = np.subtract(whole.results[0].targets[0].logprobs, split.results[0].targets[0].logprobs)
    assert abs(apart).max() < 1e-4


@pytest.mark.engine
def test_preemptions_of_a_small_cache_are_counted(server: Server) -> None:
    """Two dozen sequences are let in by what they hold, and grow beyond what the cache has."""

    def draw(prompts: Sequence[list[int]]) -> list[list[int]]:
        body = {
            "prompt_ids": prompts, "model": "small",
            "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=300).raise_for_status()
        return [each["completions"][0]["token_ids"] for each in answer.json()["results"]]

    (alone,) = draw(PROMPTS[:1])
    assert read_metric(server, "engine_preemptions_total", model="small") == 0
    together = draw(PROMPTS)
    # Readings come with heartbeats.
    count = wait_for(lambda: read_metric(server, "engine_preemptions_total", model="small"))
    print(f"\n{count:.0f} preemptions of {len(PROMPTS)} sequences of {TOKENS} tokens")
    assert [len(ids) for ids in together] == [TOKENS] * len(PROMPTS)
    assert together[0] == alone


def test_gpus_are_called_as_their_variable_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's functions in place of two GPUs, of which this process uses the second."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda number: HELD * number)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (FREE, SIZE))
    for visible, name in (("4,5", "5"), ("GPU-aa, GPU-bb", "GPU-bb"), ("", "1"), (None, "1")):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert read_memory() == (DeviceMemory(name, HELD, FREE, SIZE),)


def test_a_machine_without_a_gpu_has_no_readings() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert read_memory() == ()


class Workers:
    """Stands in for vLLM's workers, of which each has a GPU: when they are asked, and for what."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def call_workers(self, method: str) -> list[Any]:
        self.asked.append(method)
        free = FREE - len(self.asked)
        return [(DeviceMemory(str(rank), HELD, free, SIZE),) for rank in range(2)]


def test_workers_are_not_asked_each_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now))
    engine, workers = VllmEngine.__new__(VllmEngine), Workers()
    monkeypatch.setattr(engine, "_vllm", workers, raising=False)
    for name, value in {"_has_gpu": True, "_memory": (), "_memory_due": 0.0}.items():
        monkeypatch.setattr(engine, name, value, raising=False)
    first = engine._read_memory()
    assert [each.device for each in first] == ["0", "1"]
    now += engine_module.MEMORY_EVERY_S / 2
    assert engine._read_memory() is first
    now += engine_module.MEMORY_EVERY_S
    assert [each.free_bytes for each in engine._read_memory()] == [FREE - 2] * 2
    assert workers.asked == ["read_memory"] * 2
    monkeypatch.setattr(engine, "_has_gpu", False)
    now += 100
    engine._read_memory()
    assert len(workers.asked) == 2

"""vLLM is as the engine relies on it: an upgrade fails here with the names of what moved."""

from typing import Any

import pytest

from logsteer_server.engines.vllm.internals import INTERNALS
from tests.probes import run_probe

pytestmark = pytest.mark.engine  # it imports all of vLLM


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    """What `internals_probe.py` found in the vLLM that is installed."""
    return run_probe("tests.server.internals_probe")


def test_what_is_relied_on_is_as_it_was_read(probe: dict[str, Any]) -> None:
    moved = [f"{name} ({INTERNALS[name].reason}): {now}" for name, now in probe["moved"].items()]
    assert not moved, "moved in vLLM: " + "; ".join(moved)
    assert probe["unread"] == [], "vLLM does not read what the engine sets in the environment"


def test_our_runner_and_worker_hide_nothing_else_of_vllms(probe: dict[str, Any]) -> None:
    assert probe["collisions"] == []


def test_vllm_imports_nothing_that_the_engine_does_without(probe: dict[str, Any]) -> None:
    assert probe["unasked"] == []


def test_a_gpus_memory_is_measured_with_rows_read(probe: dict[str, Any]) -> None:
    profiled = probe["profiled"]
    assert profiled == {"meta": ["vllm", "rows", [7, 5]], "cpu": ["vllm"], "no head": ["vllm"]}


def test_a_gpu_has_steps_as_large_as_in_vllms_server(probe: dict[str, Any]) -> None:
    """8,192 tokens and 1,024 sequences where vLLM alone, with no usage named, has 2,048 and 128."""
    assert probe["batches"] == {"large": [8192, 1024], "small": [2048, 256], "given": [512, 7]}


def test_a_gpu_has_vllms_v2_runner_where_that_is_tried(probe: dict[str, Any]) -> None:
    found = {name: (each["v2"], each["async"]) for name, each in probe["runners"].items()}
    v1 = (False, False)
    assert found == {"auto": (True, True), "hybrid": v1, "v1": v1, "stages": v1}

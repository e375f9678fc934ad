"""vLLM is as the engine relies on it: an upgrade fails here with the names of what moved.

And it is configured for a GPU as the engine relies on it, tried on a machine without one.
"""

from pathlib import Path
from typing import Any

import pytest

from logsteer_server.engines.vllm.config import WORKER
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


# ------------------------------------------------------------------ a pretended H100


ON_AN_H100 = {
    "v2": False, "async": False, "batch": [8192, 1024], "chunked": True, "compiles": "VLLM_COMPILE",
    "graphs": "FULL_AND_PIECEWISE", "largest_graph": 512, "prefixes": True,
    "dtype": "torch.bfloat16", "executor": "uni", "ranks": 1, "worker": WORKER, "adapters": None,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {},
    "auto": {"v2": True, "async": True},
    "eager": {"compiles": "NONE", "graphs": "NONE", "largest_graph": 0},
    "adapters": {"adapters": 3},
    "tensor parallel 2": {"executor": "mp", "ranks": 2},
    "tensor parallel 8": {"executor": "mp", "ranks": 8},
    "pipeline parallel 2": {"executor": "mp", "ranks": 2},
    "own batch": {"batch": [512, 7], "largest_graph": 8},
    "hybrid": {},
}
"""What is otherwise where a model's configuration asks for something."""


def configure(architecture: str, directory: Path) -> dict[str, Any]:
    """What `pretended_h100` finds where the engine has started for a model."""
    own = {"TMPDIR": str(directory), "VLLM_LOGGING_LEVEL": "CRITICAL"}
    return run_probe("tests.server.pretended_h100", architecture, **own)


def test_a_gpus_configuration_is_what_the_engine_asks_for(tmp_path: Path) -> None:
    found = configure("LlamaForCausalLM", tmp_path)
    assert found["settings"] == {name: ON_AN_H100 | fields for name, fields in SETTINGS.items()}
    # Eight bits in the layers leave a head as it is; one that is quantised itself is not widened.
    assert found["heads"] == {
        "plain": "float32", "tied": "float32", "plain over FP8": "float32",
        "plain over AWQ": "float32", "FP8": "bfloat16", "GPTQ": "bfloat16",
    }  # fmt: skip
    assert found["started_with"] is None
    ours, vllms, refusal = found["chosen"]["other"]
    assert (ours, vllms) == ("1", "1")
    assert "BREAKABLE_CUDAGRAPH to 1 after its attention was imported" in refusal


def test_graphs_are_broken_up_where_vllm_asks_for_it(tmp_path: Path) -> None:
    """Attention that was imported too early is left out of graphs, and nothing says so."""
    found = configure("DeepseekV32ForCausalLM", tmp_path)
    assert found["started_with"] == "1"
    chosen = found["chosen"]
    ours, vllms, refusal = chosen.pop("LlamaForCausalLM")
    assert (ours, vllms) == (None, None)
    assert "BREAKABLE_CUDAGRAPH to 0 after its attention was imported" in refusal
    assert set(found["listed"]) == set(chosen) - {"batch invariant"}, "give them in MODEL_TYPES"
    assert [name for name, found in chosen.items() if found != ["1", "1", None]] == []

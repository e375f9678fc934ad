"""Compares `engines/vllm/internals` with vLLM, and prints what moved, as JSON.

A process of its own, because vLLM reads its environment once and leaves a process changed.
"""

import os
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.engines.vllm.config import set_environment
from logsteer_server.engines.vllm.internals import INTERNALS, find_changed
from logsteer_server.imports import hold_collector, leave_out_unused
from tests.probes import finish

UNASKED = ("sklearn", "pandas", "pyarrow", "datasets", "transformer_lens")
"""What an engine's process does without, and would import for seconds."""


def find_collisions() -> list[str]:
    """Names of our runners, sampler and worker that vLLM's have, too, and that are not listed."""
    from logsteer_server.engines.vllm.runner import LogsteerRunner
    from logsteer_server.engines.vllm.runner_v1 import V1Runner, V1Sampler
    from logsteer_server.engines.vllm.runner_v2 import V2Runner
    from logsteer_server.engines.vllm.worker import LogsteerWorker

    listed = {name.rpartition(".")[2] for name in INTERNALS}
    runner = import_module("vllm.v1.worker.cpu_model_runner").CPUModelRunner
    second = import_module("vllm.v1.worker.cpu.model_runner").CPUModelRunner
    pairs = (
        (LogsteerRunner, runner),
        (LogsteerRunner, second),
        (V1Runner, runner),
        (V2Runner, second),
        (LogsteerWorker, LogsteerWorker.__base__),
        (V1Sampler, V1Sampler.__base__),
    )
    return [
        f"{own.__name__}.{name}"
        for own, base in pairs
        for name in {*vars(own), *vars(own).get("__annotations__", {})}
        if not name.startswith("__") and name not in listed and hasattr(base, name)
    ]


def profile(device: str, has_head: bool) -> list[Any]:
    """What our runner does where vLLM measures memory, 7 tokens of width 5 being a step's most."""
    from logsteer_server.engines.vllm import runner as own
    from logsteer_server.engines.vllm.runner_v1 import GPUModelRunner, V1Runner

    calls: list[Any] = []

    def read_costliest(hidden_TD: torch.Tensor, project: str) -> None:
        calls.extend([project, list(hidden_TD.shape)])

    runner = object.__new__(V1Runner)
    model_config = SimpleNamespace(dtype=torch.float32, get_hidden_size=lambda: 5)
    vars(runner).update(
        device=torch.device(device),
        max_num_tokens=7,
        model_config=model_config,
        model=SimpleNamespace(compute_logits="rows"),
        row_reader=SimpleNamespace(read_costliest=read_costliest),
        _sync_device=lambda: None,
        steering=None,
    )
    base, stage = GPUModelRunner, SimpleNamespace(is_last_rank=has_head)
    with (
        patch.object(base, "profile_run", lambda _, __=False: calls.append("vllm")),
        patch.object(own, "get_pp_group", lambda: stage),
    ):
        runner.profile_run()
    return calls


def main() -> None:
    """Print what moved, names that collide, and what is measured of memory."""
    before = set(os.environ)
    set_environment(EngineSpec("probe", "vllm", ".", tensor_parallel=2))
    variables = {name for name in set(os.environ) - before if name.startswith("VLLM_")}
    with hold_collector():
        leave_out_unused()
        import_module("vllm.plugins").load_general_plugins()
        import_module("vllm.transformers_utils.config")
    unasked = [name for name in UNASKED if name in sys.modules]
    moved = find_changed()  # before ours take the place of vLLM's
    profiled = {
        "meta": profile("meta", True),
        "cpu": profile("cpu", True),
        "no head": profile("meta", False),
    }
    finish({
        "moved": moved,
        "unread": sorted(variables - import_module("vllm.envs").environment_variables.keys()),
        "collisions": find_collisions(), "unasked": unasked,
        "profiled": profiled,
    })  # fmt: skip


if __name__ == "__main__":
    main()

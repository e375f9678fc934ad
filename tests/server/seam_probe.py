"""Holds the rows of `engines/vllm/seam` against vLLM, and prints what moved, as JSON.

A process of its own, because vLLM reads its environment once and leaves a process changed.
"""

import inspect
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.engines.vllm.config import set_environment
from logsteer_server.engines.vllm.seam import INTERNALS
from logsteer_server.engines.vllm.seam.internal import Internal
from logsteer_server.imports import hold_collector, leave_out_unused
from tests.probes import finish

UNASKED = ("sklearn", "pandas", "pyarrow", "datasets", "transformer_lens")
"""What an engine's process does without, and would import for seconds."""

DEMO_MODEL = Path(__file__).parents[2] / "demo" / "model"


def find(name: str) -> Any:
    """The object of a dotted name: the longest module in it, and attributes from there."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)) or split == 1:
                raise
            continue
        for part in parts[split:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def squeeze(code: str) -> str:
    return re.sub(r"\s|,(?=\s*[)\]])", "", code)


def has_attribute(owner: type, name: str) -> bool:
    """Whether instances have it: by definition, by annotation, or as `__init__` assigns it."""
    for cls in inspect.getmro(owner):
        if name in vars(cls) or name in vars(cls).get("__annotations__", {}):
            return True
        if cls.__module__.startswith("vllm") and re.search(
            rf"self\.{name}\s*(:|=(?!=))", inspect.getsource(cls)
        ):
            return True
    return False


def subclasses(owner: type) -> Iterator[type]:
    for cls in owner.__subclasses__():
        yield cls
        yield from subclasses(cls)


def check_call(function: Any, relies_on: str) -> str:
    """What of a call does not fit the signature."""
    parameters = inspect.signature(function).parameters
    before, _, after = relies_on.partition("*")
    given = [name.strip() for name in before.split(",") if name.strip()]
    named = [name.strip() for name in after.split(",") if name.strip()]
    if list(parameters)[: len(given)] != given:
        return f"takes {list(parameters)[: len(given)]} first, not {given}"
    if missing := [name for name in named if name not in parameters]:
        return f"takes no {', '.join(missing)}"
    for parameter in parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if needed and parameter.name not in [*given, *named]:
            return f"needs {parameter.name}"
    return ""


def check_override(name: str, relies_on: str) -> str:
    """What of the parameters of a method, in its class and below, is not as it was."""
    owner, _, method = name.rpartition(".")
    cls = find(owner)
    wanted = relies_on.split(", ")
    for place in (cls, *subclasses(cls)):
        function = vars(place).get(method) or (getattr(cls, method) if place is cls else None)
        if function and place.__module__.startswith("vllm"):
            found = list(inspect.signature(function).parameters)
            if found != wanted:
                return f"{place.__name__}.{method} takes {found}, not {wanted}"
    return ""


def check(row: Internal) -> str:
    """What is wrong with a row; empty where all is as it was."""
    if row.kind == "environment":
        return (
            "" if row.name in find("vllm.envs").environment_variables else "vLLM does not read it"
        )
    if row.kind == "override":
        return check_override(row.name, row.relies_on)
    found = find(row.name)
    if row.kind == "call":
        return check_call(found, row.relies_on)
    if row.kind == "attribute":
        return "" if has_attribute(found, row.relies_on) else f"has no {row.relies_on}"
    if row.kind == "source":
        inside = squeeze(row.relies_on) in squeeze(inspect.getsource(found))
        return "" if inside else f"does not say: {row.relies_on}"
    return ""


def find_collisions() -> list[str]:
    """Names of our runner, sampler and worker that vLLM's have, too, without a row that says so."""
    from logsteer_server.engines.vllm.runner import LogsteerRunner
    from logsteer_server.engines.vllm.sampler import PolicySampler
    from logsteer_server.engines.vllm.worker import LogsteerWorker

    overridden = {row.name.rpartition(".")[2] for row in INTERNALS if row.kind == "override"}
    runner = import_module("vllm.v1.worker.cpu_model_runner").CPUModelRunner
    pairs = (
        (LogsteerRunner, runner),
        (LogsteerWorker, LogsteerWorker.__base__),
        (PolicySampler, PolicySampler.__base__),
    )
    return [
        f"{own.__name__}.{name}"
        for own, base in pairs
        for name in {*vars(own), *vars(own).get("__annotations__", {})}
        if not name.startswith("__") and name not in overridden and has_attribute(base, name)
    ]


def profile(device: str, has_head: bool) -> list[Any]:
    """What our runner does where vLLM measures memory, 7 tokens of width 5 being a step's most."""
    from logsteer_server.engines.vllm import runner as own

    calls: list[Any] = []

    def read_costliest(hidden_TD: torch.Tensor, project: str) -> None:
        calls.extend([project, list(hidden_TD.shape)])

    runner = object.__new__(own.LogsteerRunner)
    model_config = SimpleNamespace(dtype=torch.float32, get_hidden_size=lambda: 5)
    vars(runner).update(
        device=torch.device(device),
        max_num_tokens=7,
        model_config=model_config,
        model=SimpleNamespace(compute_logits="rows"),
        row_reader=SimpleNamespace(read_costliest=read_costliest),
        _sync_device=lambda: None,
    )
    base, stage = own.GPUModelRunner, SimpleNamespace(is_last_rank=has_head)
    with (
        patch.object(base, "profile_run", lambda _, __=False: calls.append("vllm")),
        patch.object(own, "get_pp_group", lambda: stage),
    ):
        runner.profile_run()
    return calls


class NotStartedError(Exception):
    """Says that a configuration was asked for, which is all that is wanted."""


def find_batch(gigabytes: int, engine_args: dict[str, Any]) -> list[int]:
    """Tokens and sequences of a step that the engine asks vLLM for, on a GPU of such memory."""
    from vllm.engine import arg_utils

    from logsteer_server.engines.vllm import core

    found = []

    def configure(self: Any, *given: Any) -> None:
        self.enable_chunked_prefill = True
        model = SimpleNamespace(max_model_len=4096, is_multimodal_model=False)
        parallel = SimpleNamespace(use_batched_dp_moe=False)
        context = given[0] if given else None
        self._set_default_max_num_seqs_and_batched_tokens_args(context, model, parallel)
        found.extend([self.max_num_batched_tokens, self.max_num_seqs])
        raise NotStartedError

    gpu = SimpleNamespace(
        get_device_total_memory=lambda: gigabytes * 2**30,
        get_device_name=lambda: "NVIDIA H200",
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    spec = EngineSpec("probe", "vllm", str(DEMO_MODEL), engine_args=engine_args)
    with (
        patch.object(arg_utils, "current_platform", gpu),
        patch.object(core.EngineArgs, "create_engine_config", configure),
        suppress(NotStartedError),
    ):
        core.VllmCore(spec, spec.path)
    return found


def main() -> None:
    """Print what is wrong with each row, names that collide, and the sizes of a step on GPUs."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    set_environment(EngineSpec("probe", "vllm", "."))
    with hold_collector():
        leave_out_unused()
        import_module("vllm.plugins").load_general_plugins()
        import_module("vllm.transformers_utils.config")
    unasked = [name for name in UNASKED if name in sys.modules]
    wrong = []
    for row in INTERNALS:
        try:
            wrong.append(check(row))
        except (ImportError, AttributeError) as error:
            wrong.append(f"is gone: {error}")
    profiled = {
        "meta": profile("meta", True),
        "cpu": profile("cpu", True),
        "no head": profile("meta", False),
    }
    batches = {
        "large": find_batch(139, {}),
        "small": find_batch(24, {}),
        "given": find_batch(139, {"max_num_batched_tokens": 512, "max_num_seqs": 7}),
    }
    finish({
        "wrong": wrong, "collisions": find_collisions(), "unasked": unasked,
        "profiled": profiled, "batches": batches,
    })  # fmt: skip


if __name__ == "__main__":
    main()

"""Compiles a model in pieces on a CPU, as vLLM does for GPUs; prints what came of it.

vLLM's platform for CPUs compiles whole graphs. It is told to keep what its configuration says, and
the passes are given the names of GPU operations that they look for.
"""

import inspect
import os
import re
import sys
import tempfile
from typing import Any

import numpy as np

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.contract.plan import Positions, ResidualOp, Site, SteeringPlan
from logsteer_server.engines.vllm.config import set_environment
from tests.probes import drain, finish, start_vllm


def keep_pieces() -> None:
    """Have vLLM compile in pieces on this CPU."""
    import torch
    from vllm.compilation.passes.utility import fix_functionalization as passes
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def keep(cls: Any, vllm_config: Any) -> None:
        options = vllm_config.compilation_config
        kept = options.mode, options.backend, options.ir_enable_torch_wrap
        update(cls, vllm_config)
        options.mode, options.backend, options.ir_enable_torch_wrap = kept
        options.compile_sizes = []

    CpuPlatform.check_and_update_config = classmethod(keep)
    names = set(re.findall(r"torch\.ops\._C\.(\w+)", inspect.getsource(passes)))
    library = torch.library.Library("_C", "FRAGMENT")
    run = passes.FixFunctionalizationPass.__call__

    def define_and_run(self: Any, graph: Any) -> Any:
        for name in names:
            if not hasattr(torch.ops._C, name):
                library.define(f"{name}(Tensor x) -> ()")
        return run(self, graph)

    passes.FixFunctionalizationPass.__call__ = define_and_run


def score(engine: Any) -> list[float]:
    """Log-probabilities of a text that is steered, and of one that is not."""
    rng = np.random.default_rng(0)
    u = rng.normal(size=engine.info.hidden_size).astype(np.float32)
    u /= np.linalg.norm(u)
    layers = engine.info.num_layers
    plan = SteeringPlan(
        (Site(1, "resid_post", 2 * u), Site(layers - 1, "resid_post", None, (ResidualOp(u),))),
        Positions("all"),
    )
    ids = rng.integers(10, engine.info.vocab_size, 40).astype(np.int32)
    engine.add([(n, ScoreJob(ids[:-1], ids[20:], plan=p)) for n, p in enumerate((None, plan))])
    found: dict[int, Any] = drain(engine)
    return [float(x) for n in (0, 1) for x in found[n].columns["logprob"]]


def main() -> None:
    """Compile, or with `eager` do not; print log-probabilities and counts."""
    mode, model = sys.argv[1:]
    os.environ["VLLM_CACHE_ROOT"] = tempfile.mkdtemp()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    spec = EngineSpec("x", "vllm", model, dtype="float32", memory="256MiB", compile=mode != "eager")
    set_environment(spec)
    if mode != "eager":
        keep_pieces()
    engine = start_vllm(spec)
    from vllm.compilation.counter import compilation_counter

    finish({"logprobs": score(engine), "counts": vars(compilation_counter)}, engine)


if __name__ == "__main__":
    main()

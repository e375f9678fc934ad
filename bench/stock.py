"""What stock vLLM chooses by itself, as its server would: `stock.py MODEL DTYPE`."""

import sys
from collections.abc import Mapping
from typing import Any

from bench.servers import print_result


def read_choices(config: Any) -> dict[str, Any]:
    """Return what a configuration of vLLM's has that decides how fast it is."""
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "v2_model_runner": bool(config.use_v2_model_runner),
        "block_size": config.cache_config.block_size,
        "enforce_eager": bool(config.model_config.enforce_eager),
    }


def describe_stock(chosen: Mapping[str, Any]) -> str:
    """Return the note that says with which settings stock vLLM ran."""
    words = ", ".join(f"{name} {value}" for name, value in chosen.items())
    return f"stock vLLM has its own defaults, but for our dtype, cores and memory: {words}"


def main() -> None:
    """Print what vLLM's server would choose."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    path, dtype = sys.argv[1:]
    args = AsyncEngineArgs(model=path, dtype=dtype)
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    print_result(read_choices(config))


if __name__ == "__main__":
    main()

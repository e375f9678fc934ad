"""Hidden states by vLLM's own `extract_hidden_states`: `hidden_states.py MODEL DTYPE LAYER`.

Each line of stdin has the tokens of each text; its result is the number of rows that were read
back from the files that vLLM wrote.
"""

import os
import sys
import tempfile
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as files

from bench.models import MEMORY
from bench.servers import ALL_CORES, answer_questions


class Connector(files.ExampleHiddenStatesConnector):  # type: ignore[misc]
    """vLLM's connector, which also runs without a GPU.

    There torch has no pinned memory, and vLLM's stand-in for an event has no `query`.
    """

    def _submit_async_write(self, pending: Any) -> None:
        if torch.cuda.is_available():
            super()._submit_async_write(pending)
            return
        type(torch.cuda.Event()).query = lambda _: True  # type: ignore[method-assign, no-untyped-call]
        empty_like = torch.empty_like

        def ignore_pinned(like: torch.Tensor, **options: Any) -> torch.Tensor:
            return empty_like(like, device=options["device"])

        with patch.object(torch, "empty_like", ignore_pinned):
            super()._submit_async_write(pending)


def main() -> None:
    """Load the model, and answer until stdin ends."""
    from vllm import LLM, SamplingParams

    os.environ |= ALL_CORES
    path, dtype, layer = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        size = "kv_cache_memory_bytes" if isinstance(MEMORY, int) else "gpu_memory_utilization"
        # Layers are counted from the embeddings on.
        layers = {"eagle_aux_hidden_state_layer_ids": [int(layer) + 1]}
        options: dict[str, Any] = {
            size: MEMORY,
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": layers},
            },
            "kv_transfer_config": {
                "kv_connector": "Connector",
                "kv_connector_module_path": "bench.hidden_states",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": directory},
            },
        }
        llm = LLM(path, dtype=dtype, **options)

        def run(ids: list[list[int]]) -> int:
            llm.reset_prefix_cache()  # or the texts of the run before would come from there
            prompts: Any = [{"prompt_token_ids": own} for own in ids]
            outputs = llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
            rows = 0
            for output in outputs:
                assert output.kv_transfer_params is not None
                place = output.kv_transfer_params["hidden_states_path"]
                rows += len(files.load_hidden_states(place)["hidden_states"])
                files.cleanup_hidden_states(place)
            return rows

        answer_questions({}, run)
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()

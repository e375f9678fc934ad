"""LoRA adapters in vLLM: which are loaded, and which running requests use them.

An adapter is loaded before its first request is handed to the scheduler and stays for as long as
one runs, so a file that is deleted or does not fit fails a job and not the engine.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from vllm.lora.request import LoRARequest

from logsteer_server.contract.jobs import JobFailure
from logsteer_server.contract.parameters import CONFIG_KEY, Adapter
from logsteer_server.engines.vllm.slots import SlotPool


class AdapterShelf:
    """The adapters that one engine has loaded; `core` is vLLM's EngineCore."""

    def __init__(self, core: Any, slots: int, max_rank: int) -> None:
        self._core = core
        self._max_rank = max_rank
        self._pool = SlotPool(slots)
        # vLLM's cache of prefixes knows an adapter by name and path, so both follow the content.
        self._directory = tempfile.TemporaryDirectory(prefix="logsteer-adapters-")

    def take(self, adapter: Adapter) -> LoRARequest | JobFailure | None:
        """What a request that uses the adapter carries; None where it has to wait for a slot."""
        found = self._pool.take(adapter.sha256.encode())
        if found is None:
            return None
        slot, is_new = found
        request = LoRARequest(adapter.sha256, slot, str(Path(self._directory.name, adapter.sha256)))
        if is_new:
            self._core.remove_lora(slot)
            failure = self._load(adapter, request)
            if failure is not None:
                self._pool.forget(slot)
                return failure
        return request

    def release(self, request: LoRARequest) -> None:
        """One request fewer that uses it."""
        self._pool.release(request.lora_int_id)

    def _load(self, adapter: Adapter, request: LoRARequest) -> JobFailure | None:
        """Have vLLM read the adapter, from a directory as PEFT writes it; why not, if it fails."""
        directory = Path(request.lora_path)
        weights = directory / "adapter_model.safetensors"
        try:
            with safe_open(adapter.path, "numpy") as file:
                config = json.loads(file.metadata()[CONFIG_KEY])
            if config["r"] > self._max_rank:
                detail = f"the adapter's rank is {config['r']}, this model takes {self._max_rank}"
                return JobFailure("invalid_adapter", f"{detail} at most: raise adapter_rank")
            directory.mkdir(exist_ok=True)
            (directory / "adapter_config.json").write_text(json.dumps(config))
            weights.symlink_to(adapter.path)
        except FileNotFoundError:
            detail = "the adapter was deleted while the request waited; upload it again"
            return JobFailure("unknown_adapter", detail)
        except (OSError, SafetensorError) as error:
            return JobFailure("internal", f"{adapter.path} cannot be read: {error}")
        try:
            self._core.add_lora(request)
        except Exception as error:  # whatever vLLM's checks and a worker's process raise
            return JobFailure("invalid_adapter", f"the adapter does not fit the model: {error}")
        finally:
            weights.unlink()
        return None

    def close(self) -> None:
        """Remove what lies on disk."""
        self._directory.cleanup()

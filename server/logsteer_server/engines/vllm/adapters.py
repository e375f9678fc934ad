"""LoRA adapters in vLLM: load them into slots, and count the running jobs that use them.

An adapter is loaded before its first request is scheduled, and stays while a job uses it. So a file
that is deleted or does not fit fails a job, not the engine.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from logsteer_server.contract.plan import CONFIG_KEY, Adapter
from logsteer_server.engines.failures import lacks_memory
from logsteer_server.engines.vllm.slots import SlotPool
from logsteer_server.engines.weights import find_weight_shapes
from logsteer_server.numerics.lora import (
    AdapterConfig,
    AdapterLayoutError,
    Factors,
    check_shapes,
    pair_factors,
)

if TYPE_CHECKING:
    from logsteer_server.engines.vllm.core import VllmCore


NAMED = 5
"""The most modules that an error names."""


class UnfitAdapterError(Exception):
    """An adapter that cannot be loaded: `code` is a problem code, `detail` says what to do."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


@dataclass(frozen=True, slots=True)
class AdapterSlot:
    """A slot with a loaded adapter, and the `LoRARequest` of its requests."""

    number: int
    lora_request: Any
    updated: int
    """Number of the checkpoint's weights that the adapter updates."""


class AdapterSlots:
    """Load adapters into the slots of one engine, and count the jobs that use each slot."""

    def __init__(self, vllm: "VllmCore", slots: int, max_rank: int) -> None:
        self._vllm = vllm
        self._max_rank = max_rank
        self._num_slots = slots
        self._pool = SlotPool(slots)
        self._loaded: dict[int, AdapterSlot] = {}

    def count(self) -> tuple[int, int]:
        """Return the number of slots, and of slots in use."""
        return self._num_slots, self._pool.num_used

    def acquire(self, adapter: Adapter) -> AdapterSlot | None:
        """Return a slot with the adapter loaded, for one more job; None if all are in use.

        Errors: UnfitAdapterError.
        """
        acquired = self._pool.acquire(adapter.sha256.encode())
        if acquired is None:
            return None
        number, is_new = acquired
        if is_new:
            self._vllm.unload_adapter(number)
            try:
                self._loaded[number] = self._load(adapter, number)
            except UnfitAdapterError:
                self._pool.invalidate(number)
                self._pool.release(number)
                raise
        return self._loaded[number]

    def release(self, slot: AdapterSlot) -> None:
        """Remove one job's use of a slot."""
        self._pool.release(slot.number)

    @cached_property
    def _shapes(self) -> Mapping[str, Sequence[int]]:
        return find_weight_shapes(self._vllm.config.model_config.hf_config)

    def _load(self, adapter: Adapter, number: int) -> AdapterSlot:
        """Load the adapter in vLLM, on every rank. Errors: UnfitAdapterError."""
        try:
            rank = read_config(adapter.path)["r"]
            updates = check_fit(adapter.path, self._shapes)
        except FileNotFoundError:
            detail = "the adapter was deleted while the request waited; upload it again"
            raise UnfitAdapterError("unknown_adapter", detail) from None
        except (OSError, SafetensorError) as error:
            detail = f"{adapter.path} cannot be read: {error}"
            raise UnfitAdapterError("internal", detail) from error
        except AdapterLayoutError as error:
            detail = f"the adapter does not fit the model: {error}"
            raise UnfitAdapterError("invalid_adapter", detail) from error
        if rank > self._max_rank:
            detail = f"the adapter's rank is {rank}, this model takes {self._max_rank} at most: "
            raise UnfitAdapterError("invalid_adapter", f"{detail}raise adapter_rank")
        try:
            # vLLM's prefix cache identifies an adapter by name and path; both follow its content.
            request, unapplied = self._vllm.load_adapter(adapter.sha256, number, adapter.path)
        except Exception as error:  # whatever vLLM's checks and a worker's process raise
            if lacks_memory(error):
                detail = "memory ran out while the adapter was loaded; try again later"
                raise UnfitAdapterError("out_of_memory", detail) from error
            detail = f"the adapter does not fit the model: {error}"
            raise UnfitAdapterError("invalid_adapter", detail) from error
        if unapplied:
            named = ", ".join(sorted(unapplied)[:NAMED])
            more = f" and {len(unapplied) - NAMED} more" if len(unapplied) > NAMED else ""
            detail = f"the adapter does not fit the model, which has no {named}{more}"
            raise UnfitAdapterError("invalid_adapter", detail)
        return AdapterSlot(number, request, len(updates))


def read_config(path: str) -> dict[str, Any]:
    """Return the configuration in an adapter's file. Errors: OSError, SafetensorError."""
    with safe_open(path, "numpy") as file:
        found: dict[str, Any] = json.loads(file.metadata()[CONFIG_KEY])
    return found


def read_factors(path: str) -> list[Factors]:
    """Return the updates in an adapter's file. Errors: as `check_fit`."""
    with safe_open(path, "numpy") as file:
        return pair_factors(file.keys())


def check_fit(path: str, shapes: Mapping[str, Sequence[int]]) -> list[Factors]:
    """Check an adapter's factors against the known shapes of weights; return its updates.

    vLLM itself pads a factor that is too narrow with zeros. Errors: AdapterLayoutError, and those
    of `read_config`.
    """
    with safe_open(path, "numpy") as file:
        config = AdapterConfig.read(file.metadata() or {})
        updates = pair_factors(file.keys())
        for factors in updates:
            weight = shapes.get(f"{factors.module}.weight", ())
            down, up = (file.get_slice(key).get_shape() for key in (factors.down, factors.up))
            if len(weight) == 2:
                check_shapes(factors, down, up, weight, transposed=config.transposed)
    return updates


def write_peft_directory(path: str, directory: Path) -> None:
    """Fill an empty directory with an adapter in PEFT's layout. Errors: as `read_config`."""
    (directory / "adapter_config.json").write_text(json.dumps(read_config(path)))
    (directory / "adapter_model.safetensors").symlink_to(path)

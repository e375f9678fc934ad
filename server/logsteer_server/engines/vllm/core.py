"""vLLM's engine core in this process: the only module that adds requests and runs steps.

Requests go directly to the scheduler. vLLM's front end would cost more than a short text itself. It
deep-copies the sampling parameters of every request and creates Python objects for every token.
`internals` lists the vLLM functions that this relies on. The module imports vLLM: import it after
`config.set_environment`.
"""

import gc
import itertools
import os
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.compilation import breakable_cudagraph
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import attention
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request, RequestStatus

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import GenerateJob
from logsteer_server.engines.vllm.config import (
    BREAKABLE,
    V2,
    clear_new_blocks,
    context_length,
    engine_args,
)
from logsteer_server.engines.vllm.extra_args import PLAN_NAMESPACE, SCORE, find_first_needed
from logsteer_server.engines.vllm.steps import StepQueue
from logsteer_server.imports import load_tokenizer

BATCH_DEFAULTS = UsageContext.OPENAI_API_SERVER
"""The usage context that sets the defaults of `max_num_batched_tokens` and `max_num_seqs`, as in
vLLM's own server: 8,192 and 1,024 on GPUs of 70 GiB, and 2,048 and 128 a rank on CPUs. Without a
context they are 2,048 and 128 on any device."""

YOUNG_OBJECTS = 50_000
"""Threshold of Python's youngest garbage collection: the objects of some thousand short requests.

At the default of 700 the collector traverses the same waiting requests again and again, which takes
a tenth of a short request's cost.
"""


class VllmCore:
    """Run a model in vLLM. Errors: ValueError if the specification cannot be served."""

    def __init__(self, spec: EngineSpec, path: Path | str) -> None:
        self.context_length = context_length(
            path, spec.max_model_len, bool(spec.engine_args.get("trust_remote_code"))
        )
        self.config = configure(spec, path, self.context_length)
        clear_new_blocks()
        kv_cache_utils.generate_block_hash_extra_keys = block_extra_keys
        executor = Executor.get_class(self.config)
        core = self.engine_core = EngineCore(self.config, executor, log_stats=False)
        self.tokenizer = load_tokenizer(self.config.model_config.tokenizer)
        core.structured_output_manager.tokenizer = self.tokenizer
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        PrefixHitLimit(core.scheduler.kv_cache_manager)
        self.preemptions = PreemptionCount(core.scheduler)
        self._step_limit: StepLimit | None = None
        depth = self.config.max_concurrent_batches
        self.steps = StepQueue(core.scheduler, core.model_executor, depth)
        self._serial = itertools.count()
        self._params = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, skip_reading_prefix_cache=False
        )

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker once pending steps have run; return the results by rank."""
        results: list[Any] = self.engine_core.model_executor.collective_rpc(method, args=args)
        return results

    def schedule(
        self,
        tokens: Sequence[int],
        extra_args: dict[str, Any],
        adapter: LoRARequest | None,
        cache_salt: str,
        use_cache: bool,
    ) -> str:
        """Schedule a prompt to be scored or captured; return its request's id."""
        params = copy(self._params)
        first_needed = find_first_needed(extra_args)
        # The cache is looked up only if a whole block precedes the first token to compute.
        may_hit = first_needed is None or first_needed >= self.engine_core.scheduler.hash_block_size
        params.skip_reading_prefix_cache = not (use_cache and may_hit)
        params.extra_args = extra_args
        if self._step_limit is None and SCORE in extra_args and extra_args[SCORE].step_tokens:
            self._step_limit = StepLimit(self.engine_core.scheduler)
        return self._add(tokens, params, adapter, cache_salt)

    def generate(
        self,
        job: GenerateJob,
        extra_args: dict[str, Any],
        adapter: LoRARequest | None,
        eos_ids: Sequence[int],
        use_cache: bool,
    ) -> str:
        """Schedule a job that generates; return its request's id.

        It stops at one of `eos_ids` unless the job ignores them; stop strings are not checked.
        Its form was checked when it was planned: vLLM's check would keep a step waiting. Errors:
        ValueError for options that vLLM refuses.
        """
        params = SamplingParams(
            max_tokens=job.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            stop_token_ids=[*job.stop_ids, *(() if job.ignore_eos else eos_ids)],
            logprobs=job.top if job.logprobs else None,
            detokenize=False,
            extra_args=extra_args,
            skip_reading_prefix_cache=not use_cache,
        )
        if job.form is not None:
            kind, text = job.form
            params.structured_outputs = StructuredOutputsParams(**{kind: text})
            params.structured_outputs._backend = "guidance"
        try:
            params.verify(self.config.model_config, None, None, self.tokenizer)
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error
        return self._add(job.tokens.tolist(), params, adapter, job.cache_namespace)

    def _add(
        self, tokens: Sequence[int], params: SamplingParams, adapter: LoRARequest | None, salt: str
    ) -> str:
        core, request_id = self.engine_core, str(next(self._serial))
        request = Request(
            request_id,
            tokens,
            params,
            None,
            cache_salt=salt or None,
            lora_request=adapter,
            block_hasher=core.request_block_hasher,
        )
        if request.use_structured_output:
            core.structured_output_manager.grammar_init(request)
        core.add_request(request)
        return request_id

    def step(self) -> list[Any]:
        """Start as many steps as may run at once; return one step's `EngineCoreOutput` per request.

        Errors: whatever the model raises.
        """
        self.steps.begin()
        return self.steps.end()

    def count_held(self) -> int:
        """Return the number of tokens in the key-value cache, with those of preempted requests."""
        scheduler = self.engine_core.scheduler
        size = self.config.cache_config.kv_cache_size_tokens
        preempted = itertools.takewhile(
            lambda request: request.status == RequestStatus.PREEMPTED, scheduler.waiting
        )
        held: int = round(scheduler.kv_cache_manager.usage * size)
        return held + sum(int(request.num_tokens) for request in preempted)

    def count_blocks(self) -> tuple[int, int]:
        """Return the numbers of all blocks of the key-value cache, and of those in requests' use.

        Blocks that only the prefix cache holds count as free.
        """
        pool = self.engine_core.scheduler.kv_cache_manager.block_pool
        size = int(pool.num_gpu_blocks) - 1  # vLLM never uses the first
        return size, size - int(pool.get_num_free_blocks())

    def count_requests(self) -> tuple[int, int]:
        """Return the numbers of running and of waiting requests."""
        running, waiting = self.engine_core.scheduler.get_request_counts()
        return int(running), int(waiting)

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        self.engine_core.abort_requests([request_id])

    def load_adapter(self, name: str, slot: int, path: str) -> tuple[LoRARequest, set[str]]:
        """Load an adapter's file into a slot, replacing the slot's previous adapter.

        Return the `LoRARequest` for its requests, and the modules in the file that no rank applied.
        Errors: whatever vLLM raises, in any process.
        """
        unapplied: list[set[str]] = self.call_workers("load_adapter", name, slot, path)
        return LoRARequest(name, slot, path), set.intersection(*unapplied)

    def unload_adapter(self, slot: int) -> None:
        """Empty the slot of an adapter."""
        self.engine_core.remove_lora(slot)

    def close(self) -> None:
        """Stop vLLM and its worker processes."""
        self.engine_core.shutdown()


def configure(spec: EngineSpec, path: Path | str, limit: int) -> Any:
    """Return vLLM's configuration of a model with this context length.

    Errors: ValueError if the specification cannot be served.
    """
    on_cpu = current_platform.is_cpu()
    args = engine_args(spec, path, on_cpu, limit)
    if spec.tensor_parallel * spec.pipeline_parallel == 1:
        inspect_models_in_process()
    config = EngineArgs(**args).create_engine_config(BATCH_DEFAULTS)
    if on_cpu and config.model_config.is_hybrid:
        # On the CPU state space layers do not return the states that the cache needs.
        args["enable_prefix_caching"] = False
        config = EngineArgs(**args).create_engine_config(BATCH_DEFAULTS)
    if config.use_v2_model_runner and config.model_config.is_hybrid:
        if spec.runner == "v2":
            raise ValueError("runner: v2 is not tried with state space layers; set runner: v1")
        os.environ[V2] = "0"
        config = EngineArgs(**args).create_engine_config(BATCH_DEFAULTS)
    # vLLM's platform for CPUs sets it to False, where it gains nothing.
    config.scheduler_config.async_scheduling = config.use_v2_model_runner
    check_breakable_graphs()
    return config


def check_breakable_graphs() -> None:
    """Check that attention was imported as the configuration expects it. Errors: ValueError."""
    source = attention.unified_attention_with_output.__code__.co_filename
    is_asked = breakable_cudagraph.is_breakable_cudagraph_enabled()
    if is_asked != (source == breakable_cudagraph.__file__):
        raise ValueError(
            f"vLLM's configuration set {BREAKABLE} to {int(is_asked)} after its attention was "
            "imported, which captured graphs would then leave out or break at; set the variable "
            "to that before the server starts"
        )


def inspect_models_in_process() -> None:
    """Make vLLM inspect a model's class in this process, where the model will run.

    By default vLLM starts a process for this, which imports all of vLLM again, so that CUDA is not
    initialised before workers fork. A single rank forks no workers.
    """
    registry._run_in_subprocess = lambda inspect: inspect()


VLLM_EXTRA_KEYS = kv_cache_utils.generate_block_hash_extra_keys


def block_extra_keys(request: Request, start: int, end: int, start_mm: int) -> tuple[Any, int]:
    """Return the extra keys in the hash of a prefix-cache block, with its plan's name.

    It replaces vLLM's function, and adds the plan's name to the first block with a token that the
    plan changes. The hashes of later blocks include that one; earlier blocks are shared by all
    plans.
    """
    keys, next_mm = VLLM_EXTRA_KEYS(request, start, end, start_mm)
    params = request.sampling_params
    first, plan = ((params and params.extra_args) or {}).get(PLAN_NAMESPACE, (end, ""))
    if start <= first < end:
        keys = (*(keys or ()), (PLAN_NAMESPACE, plan))
    return keys, next_mm


class PreemptionCount:
    """Count a scheduler's preemptions.

    It replaces a method of the scheduler, which itself only counts per request.
    """

    def __init__(self, scheduler: Any) -> None:
        self.count = 0
        self._preempt = scheduler._preempt_request
        scheduler._preempt_request = self.preempt

    def preempt(self, *args: Any, **named: Any) -> None:
        """Preempt a request as vLLM does."""
        self.count += 1
        self._preempt(*args, **named)


class StepLimit:
    """Limit the tokens of a score request in one step.

    It replaces the scheduler's method that sets the number of a request's tokens in a step. That
    runs for each request of each step, so it is replaced only at the first request with a limit.
    """

    def __init__(self, scheduler: Any) -> None:
        self._reserve = scheduler._reserve_prefill_lookahead
        scheduler._reserve_prefill_lookahead = self.limit

    def limit(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return the smaller of vLLM's number and the request's limit."""
        params = request.sampling_params
        scored = (params.extra_args or {}).get(SCORE) if params else None
        allowed: int = self._reserve(request, num_computed_tokens, num_new_tokens)
        return min(allowed, (scored and scored.step_tokens) or allowed)


class PrefixHitLimit:
    """End a request's prefix-cache hit before the first token to score or capture.

    It replaces two methods of a cache manager. Otherwise a cached context that ends at a block's
    end would skip its last token's row, and the whole sequence would be computed again.
    """

    def __init__(self, manager: Any) -> None:
        self._get, self._find = (
            manager.get_computed_blocks,
            manager.coordinator.find_longest_cache_hit,
        )
        self._limit: int | None = None
        manager.get_computed_blocks = self.get_computed_blocks
        manager.coordinator.find_longest_cache_hit = self.find_longest_cache_hit

    def get_computed_blocks(self, request: Any) -> Any:
        """Return vLLM's hit for a request, cut before the first token to compute."""
        params = request.sampling_params
        self._limit = find_first_needed((params and params.extra_args) or {})
        try:
            return self._get(request)
        finally:
            self._limit = None

    def find_longest_cache_hit(self, block_hashes: Any, max_cache_hit_length: int) -> Any:
        """Return vLLM's longest hit before the first token to compute."""
        limit = max_cache_hit_length if self._limit is None else self._limit
        return self._find(block_hashes, min(max_cache_hit_length, limit))

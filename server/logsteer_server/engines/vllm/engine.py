"""The vLLM engine: steps vLLM's EngineCore itself and hands whole jobs to its scheduler.

Score jobs enter the scheduler as `Request` objects that are built here, because vLLM's own front
end costs more than the work on a short text: it copies the sampling parameters of every request
deeply and makes Python objects of every token.
"""

import itertools
import os
import warnings
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from logsteer_server.engines.base import (
    EngineInfo,
    EngineSpec,
    Job,
    JobFailure,
    JobResult,
    ScoreJob,
    ScoreOutput,
    count_positions,
    is_last,
)
from logsteer_server.engines.weights import digest_weights, locate_model
from logsteer_server.rows import PUBLIC_COLUMNS, Reading, unpack

CPU_BLOCK_SIZE = 32
"""Tokens per cache block on CPU; vLLM's own default of 128 shares no short context."""


def set_environment(spec: EngineSpec) -> None:
    """Set what vLLM reads from the environment; only before it is imported does that count."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch's, about vLLM's own code
    ranks = spec.tensor_parallel * spec.pipeline_parallel
    if ranks > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _bind_cores(ranks))
    if not isinstance(spec.devices, str):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.devices))


def _bind_cores(ranks: int) -> str:
    """Cores for each rank, in vLLM's syntax: `0,1|2,3` shares four cores between two ranks."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        return "auto"  # vLLM says what is wrong where it runs on the CPU; a GPU does not care
    share = len(cores) // ranks
    return "|".join(",".join(map(str, cores[r * share : (r + 1) * share])) for r in range(ranks))


def parse_bytes(size: str) -> int:
    """Bytes of a size such as `512MiB` or `1GiB`. Errors: ValueError for anything else."""
    for suffix, unit in (("GiB", 2**30), ("MiB", 2**20)):
        if size.endswith(suffix):
            return int(float(size.removesuffix(suffix)) * unit)
    raise ValueError(f"memory: {size!r} is not a size; write for example 512MiB or 1GiB")


def _engine_args(spec: EngineSpec, path: Path | str, on_cpu: bool, limit: int) -> dict[str, Any]:
    args: dict[str, Any] = {
        "model": str(path),
        "dtype": spec.dtype,
        "tensor_parallel_size": spec.tensor_parallel,
        "pipeline_parallel_size": spec.pipeline_parallel,
        "quantization": spec.quantization,
        # A scored sequence may fill the context, and vLLM always leaves room for a sampled token.
        "max_model_len": limit + 1,
        "enforce_eager": not spec.compile,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_cls": "logsteer_server.engines.vllm.worker.ScoringWorker",
        "additional_config": {"logsteer_chunk_bytes": spec.chunk_bytes},
    }
    ranks = spec.tensor_parallel * spec.pipeline_parallel
    args["distributed_executor_backend"] = "uni" if ranks == 1 else "mp"
    if on_cpu:
        args["block_size"] = CPU_BLOCK_SIZE
        args["kv_cache_memory_bytes"] = parse_bytes(str(spec.memory or "1GiB"))
    elif isinstance(spec.memory, float):
        args["gpu_memory_utilization"] = spec.memory
    elif spec.memory is not None:
        args["kv_cache_memory_bytes"] = parse_bytes(spec.memory)
    return args | spec.engine_args


def _context_length(path: Path | str, limit: int | None) -> int:
    from vllm.transformers_utils.config import get_config

    config = get_config(str(path), trust_remote_code=False)
    derived = getattr(config.get_text_config(), "max_position_embeddings", None)
    if derived is None and limit is None:
        raise ValueError(f"{path}: its config names no context length; set max_model_len")
    return int(min(x for x in (derived, limit) if x is not None))


class VllmEngine:
    """A model resident in vLLM. Errors: ValueError where the specification cannot be served."""

    def __init__(self, spec: EngineSpec) -> None:
        set_environment(spec)
        path = locate_model(spec.path)

        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        from logsteer_server.engines.vllm.generation import Generation

        on_cpu = current_platform.is_cpu()
        if spec.devices == "cpu" and not on_cpu:
            raise ValueError("devices: cpu needs vLLM's build for CPUs; this is the one for GPUs")
        limit = _context_length(path, spec.max_model_len)
        config = EngineArgs(**_engine_args(spec, path, on_cpu, limit)).create_engine_config()
        vllm = LLMEngine(config, Executor.get_class(config), log_stats=False)
        self._core = vllm.engine_core.engine_core
        self._generation = Generation(vllm)
        self._info = _describe(spec, path, config, limit)
        self._scoring: dict[str, tuple[int, ScoreJob]] = {}
        self._request_ids: dict[int, str] = {}
        self._serial = itertools.count()
        self._failures: list[tuple[int, JobResult]] = []
        self._params = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, skip_reading_prefix_cache=False
        )

    @property
    def info(self) -> EngineInfo:
        """What this engine is."""
        return self._info

    @property
    def busy(self) -> bool:
        """Whether a job is unfinished."""
        return bool(self._request_ids or self._failures)

    def add(self, jobs: Sequence[tuple[int, Job]]) -> None:
        """Hand jobs to vLLM's scheduler."""
        limit = self._info.context_length
        for job_id, job in jobs:
            if count_positions(job) > limit:
                detail = f"{count_positions(job)} tokens do not fit into a context of {limit}"
                self._failures.append((job_id, JobFailure("context_too_long", detail)))
            elif isinstance(job, ScoreJob):
                self._submit(job_id, job, use_cache=True)
            else:
                request_id = str(next(self._serial))
                self._request_ids[job_id] = request_id
                try:
                    self._generation.add(request_id, job_id, job)
                except ValueError as error:  # vLLM's own limits on sampling parameters
                    del self._request_ids[job_id]
                    self._failures.append((job_id, JobFailure("invalid_request", str(error))))

    def _submit(self, job_id: int, job: ScoreJob, use_cache: bool) -> None:
        from vllm.v1.request import Request

        from logsteer_server.engines.vllm.worker import SCORE

        params = copy(self._params)
        params.skip_reading_prefix_cache = not use_cache
        params.extra_args = {
            SCORE: {
                "targets": job.targets.tobytes(),
                "alternatives": job.alternatives,
                "columns": job.columns,
                "top": job.top,
                "export": job.export,
                "reference": job.reference,
            }
        }
        request_id = str(next(self._serial))
        self._scoring[request_id] = (job_id, job)
        self._request_ids[job_id] = request_id
        self._core.add_request(
            Request(
                request_id,
                job.tokens.tolist(),
                params,
                None,
                block_hasher=self._core.request_block_hasher,
            )
        )

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Abort jobs in vLLM's scheduler."""
        for job_id in job_ids:
            request_id = self._request_ids.pop(job_id, None)
            if request_id is None:
                continue
            if self._scoring.pop(request_id, None):
                self._core.abort_requests([request_id])
            else:
                self._generation.cancel(request_id)

    def step(self) -> list[tuple[int, JobResult]]:
        """Run one step of vLLM and give the results that it had."""
        results, self._failures = self._failures, []
        if not self._request_ids:
            return results
        outputs, executed = self._core.step_fn()
        self._core.post_step(model_executed=executed)
        generated = []
        for batch in (outputs or {}).values():  # None while pipeline stages are being filled
            for output in batch.outputs:
                if output.request_id not in self._scoring:
                    generated.append(output)
                elif output.finished:
                    results += self._collect(output)
        for job_id, result in self._generation.collect(generated):
            if is_last(result):
                del self._request_ids[job_id]
            results.append((job_id, result))
        return results

    def _collect(self, output: Any) -> list[tuple[int, JobResult]]:
        job_id, job = self._scoring.pop(output.request_id)
        del self._request_ids[job_id]
        values = output.prompt_token_id_logprobs
        reading = Reading(job.columns, job.top)
        if values is None:
            detail = f"vLLM ended the request without its rows ({output.finish_reason})"
            return [(job_id, JobFailure("internal", detail))]
        if values.numel() == 0:
            # The prefix cache reached beyond the first wanted row, so that row was not computed.
            self._submit(job_id, job, use_cache=False)
            return []
        rows = unpack(values.numpy().reshape(-1, reading.width), reading)
        cached = output.prefill_stats.num_cached_tokens if output.prefill_stats else 0
        return [(job_id, ScoreOutput(rows.columns, rows.top_ids, rows.top_logprobs, cached))]

    def close(self) -> None:
        """Stop vLLM and its worker processes."""
        self._core.shutdown()


def _describe(spec: EngineSpec, path: Path | str, config: Any, limit: int) -> EngineInfo:
    import vllm
    import vllm.envs

    model = config.model_config
    return EngineInfo(
        engine="vllm",
        engine_version=str(vllm.__version__),
        model_path=spec.path,
        tokenizer_path=str(model.tokenizer),
        weights_digest=digest_weights(path),
        dtype=str(model.dtype).removeprefix("torch."),
        logits_dtype=str(model.head_dtype or model.dtype).removeprefix("torch."),
        quantization=model.quantization,
        tensor_parallel=spec.tensor_parallel,
        pipeline_parallel=spec.pipeline_parallel,
        batch_invariant=bool(vllm.envs.VLLM_BATCH_INVARIANT),
        context_length=limit,
        vocab_size=int(model.get_vocab_size()),
        columns=PUBLIC_COLUMNS,
    )

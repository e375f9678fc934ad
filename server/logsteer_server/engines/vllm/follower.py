"""The part of a vLLM engine that is on another node than its scheduler: ranks, and nothing else."""

from collections.abc import Sequence
from importlib import import_module

from logsteer_server.contract.engine import EngineInfo, EngineLoad, EngineReading, EngineSpec
from logsteer_server.contract.jobs import Job, JobResult
from logsteer_server.engines.vllm.config import (
    WORKER,
    context_length,
    describe,
    prepare,
)
from logsteer_server.imports import hold_collector


class VllmFollower:
    """Run the ranks of one node, which do what the engine on node 0 tells all ranks.

    It is there once they have met the others and loaded their part of the model. To its process it
    is an engine that is never given a job. Errors: ValueError where the spec cannot be served.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._scratch, path = prepare(spec)
        with hold_collector():
            from logsteer_server.engines.vllm.core import configure, start_ranks

            import_module(WORKER.rpartition(".")[0])

        limit = context_length(path, spec.max_model_len)
        config = configure(spec, path, limit)
        self._executor = start_ranks(config)
        self._info = describe(spec, path, config, limit, None)

    @property
    def info(self) -> EngineInfo:
        """What the model is, as this node's files have it."""
        return self._info

    @property
    def busy(self) -> bool:
        """Whether a job is unfinished: none ever is."""
        return False

    def add(self, jobs: Sequence[tuple[int, Job]]) -> None:
        """Refuse jobs. Errors: RuntimeError."""
        raise RuntimeError(f"{len(jobs)} jobs came to a node that has ranks alone")

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Do nothing."""

    def step(self) -> list[tuple[int, JobResult]]:
        """Return nothing."""
        return []

    def take_load(self) -> EngineLoad | None:
        """Return nothing."""
        return None

    def read(self) -> EngineReading:
        """Return that no job is here. Errors: RuntimeError where a rank of this node is gone."""
        if self._executor.is_failed:
            raise RuntimeError("a rank's process has ended")
        return EngineReading()

    def close(self) -> None:
        """End the ranks, and remove what lies on disk."""
        self._executor.shutdown()
        self._scratch.close()

"""`logsteer score-file --ray`: a job of `logsteer.corpus` as a Ray Data pipeline, without HTTP.

    read ──► chunks of rows ──► actors, each with the application and its engine ──► lines ──► OUT
    on the driver's node        ChunkScorer, as many as are asked for                in order

The application in an actor is the one that answers over HTTP, asked through memory; so lines are
the same, and a job may go on this way that was begun with servers, or the other way round. Rows are
read on the node of the driver, which alone sees the files, writes them, and commits.
"""

import asyncio
import logging
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow
import ray
from pydantic_core import from_json, to_json
from ray.data import ActorPoolStrategy, DataContext, Dataset
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from logsteer.async_client import AsyncClient
from logsteer.corpus import FileScores, JobLimits
from logsteer.corpus.answers import RowCounts, ScoredChunk, score_chunk
from logsteer.corpus.fleet import Fleet, FleetServer
from logsteer.corpus.form import RowForm
from logsteer.corpus.job import FileJob
from logsteer.corpus.source import Chunk, RowSource
from logsteer.errors import LogsteerError
from logsteer_server.app import create_app
from logsteer_server.cluster.own_ray import NODE_CPUS, hold_ray_directory
from logsteer_server.observation.logs import LogStyle, configure_logs
from logsteer_server.settings import ConfigurationError, Settings, load_settings

CALLS_PER_ACTOR = 4
"""Chunks that an actor has at once: more wait in Ray's queue in front of it."""
CALLS_AHEAD = 8
STORE_BYTES = 200 * 2**20
POLL_S = 0.05
LOCAL = "local"
"""The address that stands for a Ray of its own on this machine."""


class ChunkSource(Datasource):  # type: ignore[misc]
    """The chunks of a file from row `first` on: a dataset with a row for each."""

    def __init__(self, form: RowForm, source: Path, first: int, limits: JobLimits) -> None:
        super().__init__()
        self._form, self._source, self._first, self._limits = form, source, first, limits

    def estimate_inmemory_data_size(self) -> int | None:
        """Return nothing: a compressed file does not say."""
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Return the one task that reads the file, a block for each chunk."""
        del parallelism, per_task_row_limit, data_context
        metadata = BlockMetadata(None, None, None)
        return [ReadTask(self._read, metadata)]

    def _read(self) -> Iterator[pyarrow.Table]:
        source = RowSource(self._source, self._form.columns)
        source.skip(self._first)
        limits = self._limits
        for chunk in source.cut(self._first, limits.batch_size, limits.batch_bytes):
            rows = pyarrow.array([list(chunk.rows)], pyarrow.list_(pyarrow.binary()))
            yield pyarrow.table({"first": [chunk.first], "rows": rows})


class ChunkScorer:
    """The class of the actors: the application with one model, and what asks it.

    It is there once the model answers. Errors of making it: RuntimeError where that fails.
    """

    def __init__(self, settings: Settings, form: RowForm, limits: JobLimits) -> None:
        configure_logs(LogStyle(settings.log_format, settings.log_level))
        self._form, self._limits = form, limits
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="application", daemon=True).start()
        self._fleet: Fleet = self._wait_for(self._start(settings))

    def _wait_for(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self, settings: Settings) -> Fleet:
        app = create_app(settings)
        self._lifespan = app.router.lifespan_context(app)
        await self._lifespan.__aenter__()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        client = AsyncClient("http://localhost", transport=transport, max_retries=0)
        while not (await client.ready()).ready:
            (card,) = (await client.models()).models
            if card.state == "failed":
                raise RuntimeError(f"model {card.id} cannot be loaded: {card.detail}")
            await asyncio.sleep(POLL_S)
        return Fleet([FleetServer(client, self._limits.concurrency)], self._limits.patience_s)

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return the lines of each chunk of a batch, and what belongs to them as JSON."""
        lines, about = [], []
        for first, rows in zip(batch["first"], batch["rows"], strict=True):
            chunk = Chunk(int(first), list(rows), 0)
            scored: ScoredChunk = self._wait_for(score_chunk(self._form, chunk, self._fleet.ask))
            lines.append(scored.lines)
            kept = [asdict(scored.tally), scored.identity, scored.first_error, scored.texts]
            about.append(to_json(kept))
        return {"first": batch["first"], "lines": lines, "about": about}


def score_file(
    source: str | Path,
    target: str | Path,
    endpoint: str = "logprob",
    *,
    config: str | Path,
    address: str = LOCAL,
    actors: int = 1,
    model: str | None = None,
    options: Mapping[str, Any] | None = None,
    fields: Mapping[str, str] | None = None,
    id_column: str | None = None,
    targets: Sequence[str] = (),
    limits: JobLimits | None = None,
    strict: bool = False,
    restart: bool = False,
    progress: bool = True,
) -> FileScores:
    """Do what `logsteer.score_file` does, with engines on Ray in the place of servers.

    Args:
        source: as there; on the machine of this process, as `target` is.
        target: as there.
        endpoint: as there.
        config: the configuration of the model; paths in it hold on every node.
        address: of a Ray cluster, or `auto`; `local` is one of its own on this machine.
        actors: how many have an engine.
        model: which of the configuration's.
        options: as there.
        fields: as there.
        id_column: as there.
        targets: as there.
        limits: as there; `concurrency` and `patience_s` hold for each actor.
        strict: as there.
        restart: as there.
        progress: as there.

    Errors: as there; LogsteerError for a configuration that cannot be used.

    """
    limits = limits or JobLimits()
    form = RowForm(endpoint, options or {}, model, fields or {}, id_column, targets)
    settings = read_model(Path(config), model)
    job = FileJob(form, source, target, limits, strict=strict, restart=restart, progress=progress)
    with job:
        if not job.is_done and not job.record.is_whole:
            with join_ray(address), order_blocks():
                rows = iter_lines(settings, job, actors)
                for chunk, row in zip(job.chunks(), rows, strict=True):
                    if row["first"] != chunk.first:
                        raise LogsteerError("chunks came in another order: a fault of this program")
                    tally, identity, error, texts = from_json(row["about"])
                    found = None if error is None else (error[0], error[1])
                    job.take(
                        ScoredChunk(chunk, row["lines"], RowCounts(**tally), identity, found, texts)
                    )
                    if job.is_due():
                        job.commit(wait=False)
        return job.finish()


def iter_lines(settings: Settings, job: FileJob, actors: int) -> Iterable[dict[str, Any]]:
    """Return the rows of the pipeline over what is left of a job, in the order of the file."""
    chunks: Dataset = ray.data.read_datasource(
        ChunkSource(job.form, job.source.path.absolute(), job.tally.rows, job.limits),
        override_num_blocks=1,
        num_cpus=0,
        label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
    )
    (model,) = settings.models
    gpus = 0
    if model.devices != "cpu" and model.engine != "fake" and ray.cluster_resources().get("GPU"):
        gpus = model.tensor_parallel * model.pipeline_parallel
    scored = chunks.map_batches(
        ChunkScorer,
        batch_size=1,
        batch_format="numpy",
        compute=ActorPoolStrategy(
            size=actors,
            max_tasks_in_flight_per_actor=CALLS_AHEAD,
            max_concurrent_calls_per_actor=CALLS_PER_ACTOR,
            enable_true_multi_threading=True,
        ),
        fn_constructor_args=(settings, job.form, job.limits),
        num_gpus=gpus or None,
    )
    rows: Iterable[dict[str, Any]] = scored.iter_rows()
    return rows


def read_model(config: Path, model: str | None) -> Settings:
    """Return the settings for one model in one process. Errors: LogsteerError."""
    try:
        settings = load_settings(config)
    except ConfigurationError as error:
        raise LogsteerError(str(error)) from error
    found = [one for one in settings.models if model in (None, one.id)]
    if len(found) != 1:
        known = ", ".join(one.id for one in settings.models)
        raise LogsteerError(f"{config} has {known}; name one of them by --model")
    alone = {"replicas": 1, "required": True}
    return settings.model_copy(
        update={
            "models": [found[0].model_copy(update=alone)],
            "directory": settings.directory.resolve(),
            "api_key": None,
            "key_file": None,
            "exit_when_given_up": False,
        }
    )


@contextmanager
def order_blocks() -> Iterator[None]:
    """Have what Ray Data does in this process keep its order, each chunk a block of its own."""
    context = DataContext.get_current()
    own = context.copy()
    own.execution_options.preserve_order = True
    own.enable_progress_bars = False
    own.target_max_block_size = own.target_min_block_size = 1
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with DataContext.current(own), warnings.catch_warnings():
        # How many chunks there will be is not known to Ray Data, which warns of too few.
        warnings.simplefilter("ignore", UserWarning)
        yield


@contextmanager
def join_ray(address: str) -> Iterator[None]:
    """Be connected to Ray for as long as the context lasts."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray tells of actors' arguments, which this process keeps for as long as they may restart.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    with ExitStack() as stack:
        own: dict[str, Any] = {}
        if address == LOCAL:
            own = {
                "num_cpus": NODE_CPUS,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
                "_temp_dir": stack.enter_context(hold_ray_directory()),
            }
        stack.callback(ray.shutdown)
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **own)
        yield

"""Contents of a shared store that jobs use, as files of the machine that their engine runs on."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from logsteer.errors import api_error
from logsteer.schemas.problem import ProblemCode
from logsteer_server.contract.batches import change_all, read_all
from logsteer_server.contract.jobs import Job
from logsteer_server.contract.parameters import Adapter, Direction
from logsteer_server.settings import SharedStore
from logsteer_server.stores.bucket import Bucket
from logsteer_server.stores.fetched import DamagedContentError, FetchedContents
from logsteer_server.stores.threads import StoreThreads

Content = Adapter | Direction
UNKNOWN: dict[type[Content], tuple[str, ProblemCode]] = {
    Adapter: ("adapter", "unknown_adapter"),
    Direction: ("override", "unknown_override"),
}


class ContentKeeper(Protocol):
    """A machine that keeps contents of a shared store for as long as jobs use them."""

    async def hold(self, content: Content) -> str:
        """Return the path of a content there, fetched if need be.

        It stays until `release` was called as often as this. Errors: APIError `unknown_adapter`,
        `unknown_override` where one was deleted meanwhile, and those of `FetchedContents.hold`.
        """
        ...

    def release(self, sha256: str) -> None:
        """Need a content no more."""
        ...


class MachineContents:
    """The `ContentKeeper` of this machine, used from one event loop. Errors: ConfigurationError."""

    def __init__(self, store: SharedStore) -> None:
        self._fetched = FetchedContents(Bucket(store), store.path, store.cache_bytes)
        self._threads = StoreThreads(store.threads, store.max_calls)

    async def hold(self, content: Content) -> str:
        """Return the path of a content here. Errors: as `ContentKeeper.hold`."""
        noun, unknown = UNKNOWN[type(content)]
        try:
            hold = self._fetched.hold
            return str(await self._threads.run(hold, content.sha256, content.path))
        except FileNotFoundError as error:
            detail = f"The {noun} was deleted while the request waited; upload it again."
            raise api_error(unknown, detail) from error
        except DamagedContentError as error:
            detail = f"The content {content.sha256} is damaged; DELETE the {noun} and upload it "
            raise api_error("internal", f"{detail}again.") from error

    def release(self, sha256: str) -> None:
        """Need a content no more."""
        self._fetched.release(sha256)


class JobContents:
    """Has what jobs name below a store's URL on all machines of an engine, while they run.

    `keepers` are the machines, the one that the engine is on first. It is used from one event loop.
    """

    def __init__(self, *keepers: ContentKeeper) -> None:
        self._keepers = keepers

    @asynccontextmanager
    async def open(self, jobs: Sequence[Job]) -> AsyncIterator[Sequence[Job]]:
        """Give the jobs with files of the machines, which stay for so long.

        Errors: as `ContentKeeper.hold`.
        """
        wanted = _find_contents(jobs)
        if not wanted:
            yield jobs
            return
        paths: dict[Content, Sequence[str]] = {}
        try:
            for content in wanted:
                paths[content] = await self._hold(content)
            yield change_all(jobs, lambda job: _move(job, paths))
        finally:
            for content in paths:
                for keeper in self._keepers:
                    keeper.release(content.sha256)

    async def _hold(self, content: Content) -> Sequence[str]:
        """Return a content's path on each machine. Whoever fails or leaves early holds nothing."""
        holding = [asyncio.ensure_future(keeper.hold(content)) for keeper in self._keepers]
        try:
            done, _ = await asyncio.wait(holding, return_when=asyncio.FIRST_EXCEPTION)
            for own in done:
                own.result()
            return [own.result() for own in holding]
        except BaseException:  # those that are not done may fetch it all the same
            for keeper, own in zip(self._keepers, holding, strict=True):
                own.add_done_callback(partial(_release_late, keeper, content.sha256))
            raise


def _release_late(keeper: ContentKeeper, sha256: str, holding: "asyncio.Future[str]") -> None:
    if not holding.cancelled() and holding.exception() is None:
        keeper.release(sha256)


def _find_contents(jobs: Sequence[Job]) -> list[Content]:
    """Return the contents behind a URL that jobs use, each once."""
    files = (file for job in read_all(jobs) for file in job.delta.files)
    return list(dict.fromkeys(file for file in files if not Path(file.path).is_absolute()))


def _move(job: Job, paths: Mapping[Content, Sequence[str]]) -> Job:
    """Return a job with the paths of its contents."""
    adapter, override = job.adapter, job.override
    if adapter is not None and adapter in paths:
        adapter = replace(adapter, path=paths[adapter][0])
    if override is not None and override.direction in paths:
        path = paths[override.direction][0]
        override = replace(override, direction=replace(override.direction, path=path))
    return replace(job, adapter=adapter, override=override)

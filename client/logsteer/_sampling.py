"""Drivers of `extras.sampling.SamplingRun`: one in threads, one in tasks, step by step the same."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import Any, TypeAlias

from logsteer.errors import InvalidRequestError, LogsteerError
from logsteer.extras.samples import Samples
from logsteer.extras.sampling import Rating, SampledBatch, SamplingRun, await_ratings, known_ratings

_Rated: TypeAlias = tuple[SampledBatch, list[Rating]]


def sample_in_threads(run: SamplingRun, ask: Callable[..., SampledBatch]) -> Samples:
    """Send the batches of a run, some at once; rewards are called in the caller's own thread."""
    under_way: dict[Future[SampledBatch], range] = {}
    pool = ThreadPoolExecutor(run.options.concurrency, "logsteer-sample")

    def begin() -> None:
        while len(under_way) < run.options.concurrency and (batch := run.next_batch()):
            under_way[pool.submit(ask, **run.arguments(batch))] = batch

    # One loop for all rewards that are awaited: what they share may be bound to it.
    with run, closing(asyncio.Runner()) as runner:
        try:
            begin()
            while under_way:
                answered = []
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    batch = under_way.pop(future)
                    try:
                        answered.append((batch, future.result()))
                    except LogsteerError as error:
                        run.fail(batch, error)
                begin()
                for batch, answer in answered:
                    try:
                        ratings = run.rate(batch, answer)
                    except LogsteerError as error:
                        run.fail(batch, error)
                    else:
                        run.keep(batch, answer, _await_here(ratings, runner))
                begin()
            return run.finish()
        finally:
            # Whoever interrupts does not wait for what is under way.
            pool.shutdown(wait=False, cancel_futures=True)


def _await_here(ratings: list[Rating | Awaitable[Any]], runner: asyncio.Runner) -> list[Rating]:
    known = known_ratings(ratings)
    if known is not None:
        return known
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return runner.run(await_ratings(ratings))
    for rating in ratings:
        if inspect.iscoroutine(rating):
            rating.close()
    detail = "an event loop runs here already, as in a notebook: an async reward needs AsyncClient"
    raise InvalidRequestError("invalid_request", detail, param="reward")


async def sample_in_tasks(run: SamplingRun, ask: Callable[..., Awaitable[SampledBatch]]) -> Samples:
    """Send the batches of a run, some at once, and await the rewards of each behind its answer."""
    under_way: dict[asyncio.Task[_Rated], range] = {}

    async def work(batch: range) -> _Rated:
        answer = await ask(**run.arguments(batch))
        return answer, await await_ratings(run.rate(batch, answer))

    def begin() -> None:
        while len(under_way) < run.options.concurrency and (batch := run.next_batch()):
            under_way[asyncio.create_task(work(batch))] = batch

    with run:
        try:
            begin()
            while under_way:
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    batch = under_way.pop(task)
                    try:
                        answer, ratings = task.result()
                    except LogsteerError as error:
                        run.fail(batch, error)
                    else:
                        run.keep(batch, answer, ratings)
                begin()
            return run.finish()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

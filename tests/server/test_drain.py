"""The end of a drain reaches whoever waits for a request's next message, and nobody else."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Message

from logsteer.errors import APIError
from logsteer_server.api.gate import Drain

MESSAGE: Message = {"type": "http.request", "body": b"{}", "more_body": False}


async def never() -> Message:
    return await asyncio.Future[Message]()


async def at_once() -> Message:
    return MESSAGE


async def start(receive: Callable[[], Awaitable[Message]]) -> "asyncio.Task[Message]":
    async def work() -> Message:
        return await receive()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    return task


def test_end_answers_those_who_wait_and_those_who_come() -> None:
    async def run() -> None:
        drain = Drain()
        waiting = await start(drain.limit(never))
        drain.end()
        assert drain.has_ended
        for task in (waiting, await start(drain.limit(never))):
            with pytest.raises(APIError, match="shutting down") as caught:
                await task
            assert caught.value.code == "engine_restarting"
            assert not task.cancelling(), "what ended the wait is no cancellation of the task"

    asyncio.run(run())


def test_message_passes_and_its_task_is_left_alone_afterwards() -> None:
    async def run() -> None:
        drain = Drain()
        receive = drain.limit(at_once)

        async def work() -> Message:
            message = await receive()
            drain.end()
            await asyncio.sleep(0)
            return message

        assert await asyncio.create_task(work()) == MESSAGE

    asyncio.run(run())


def test_cancellation_by_others_stays_one() -> None:
    async def run() -> None:
        drain = Drain()
        task = await start(drain.limit(never))
        task.cancel()
        drain.end()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())

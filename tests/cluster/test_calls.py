"""Calls of a model's actors that are left, with Serve's own responses and no cluster."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from logsteer_server.contract.lane import Lane
from tests.cluster.local import needs_ray

pytestmark = [
    needs_ray,
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]


class SentCall:
    """A call that was sent to an actor, which never answers; it notes that it was cancelled."""

    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    async def __anext__(self) -> None:
        await asyncio.Event().wait()


class Handle:
    """A deployment's handle, of which all calls have one future of what is sent."""

    def __init__(self, sending: "asyncio.Future[SentCall]") -> None:
        self._sending = sending

    def options(self, **_options: Any) -> "Handle":
        return self

    def remote(self, *_arguments: Any) -> Any:
        from ray.serve.handle import DeploymentResponseGenerator

        asked = SimpleNamespace(request_id="asked")
        return DeploymentResponseGenerator(
            self._sending,
            asked,  # type: ignore[arg-type]
            _is_router_running_in_separate_loop=False,
        )


async def leave(left: str) -> tuple["asyncio.Future[SentCall]", SentCall]:
    """Leave a call at a moment; the future of what is sent, and what was."""
    from logsteer_server.cluster.calls import HandleCalls

    sending: asyncio.Future[SentCall] = asyncio.get_running_loop().create_future()
    parts = HandleCalls(Handle(sending), "ingress").run("actor", [], Lane())
    reading = asyncio.ensure_future(anext(parts))
    await asyncio.sleep(0)
    sent = SentCall()
    if left != "before it is sent":
        sending.set_result(sent)
    if left == "as it is answered":
        for _ in range(3):
            await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    return sending, sent


@pytest.mark.parametrize("left", ["before it is sent", "as it is sent", "as it is answered"])
def test_a_call_that_is_left_is_cancelled_wherever_it_is(left: str) -> None:
    sending, sent = asyncio.run(leave(left))
    assert sending.cancelled() if left == "before it is sent" else sent.is_cancelled

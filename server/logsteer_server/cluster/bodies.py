"""Answers as Ray Serve can carry them from an ingress to its proxy."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class CarriedBodies:
    """An ASGI application whose bodies are bytes: Serve pickles them, and a view has no pickle."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Answer as the application does."""

        async def carry(message: Message) -> None:
            if isinstance(message.get("body"), memoryview):
                message = {**message, "body": bytes(message["body"])}
            await send(message)

        await self._app(scope, receive, carry)

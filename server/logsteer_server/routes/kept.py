"""What the routes of kept files answer alike: all cards, one card, a name that is gone."""

import asyncio

from fastapi import Request, Response

from logsteer_server.http.respond import answer
from logsteer_server.stores.files import C, FileStore


async def answer_cards(request: Request, store: FileStore[C]) -> Response:
    """The card of everything in the store, by name, and how full it is."""
    cards, total = await asyncio.to_thread(store.list_all)
    listed = {f"{store.noun}s": [card.model_dump() for card in cards]}
    return answer(request, {**listed, "bytes": total, "max_bytes": store.max_bytes})


async def answer_card(request: Request, store: FileStore[C], name: str) -> Response:
    """The card of one name. Errors: those of `FileStore.describe`."""
    return answer(request, (await asyncio.to_thread(store.describe, name)).model_dump())


async def answer_deleted(request: Request, store: FileStore[C], name: str) -> Response:
    """The name, gone, and the content that it stood for. Errors: those of `FileStore.delete`."""
    sha256 = await asyncio.to_thread(store.delete, name)
    return answer(request, {"name": name, "sha256": sha256})

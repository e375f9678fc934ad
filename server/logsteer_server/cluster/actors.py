"""Which actors of each model run, from the routers of this process' handles to who asks.

Serve makes those routers, of a class that it sends with all of its module, and hands them to
nobody: what they know can leave them only through another module, of which a process has one.
"""

import asyncio
from collections.abc import Callable

TakeActors = Callable[[frozenset[str]], None]

_RUNNING: dict[str, frozenset[str]] = {}
_WATCHERS: dict[str, list[TakeActors]] = {}


class GoneActorError(Exception):
    """An actor was gone before it had taken a call."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the actor {name} is gone")


def watch_actors(model: str, take: TakeActors) -> Callable[[], None]:
    """Have a function told the names of a model's actors, now and whenever they change.

    It is called on the event loop that is running now. Returns what ends this.
    """
    loop = asyncio.get_running_loop()

    def pass_on(actors: frozenset[str]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(take, actors)

    _WATCHERS.setdefault(model, []).append(pass_on)
    if model in _RUNNING:
        pass_on(_RUNNING[model])
    return lambda: _WATCHERS[model].remove(pass_on)


def note_actors(model: str, actors: frozenset[str]) -> None:
    """Tell who watches a model that these actors run; from any thread."""
    _RUNNING[model] = actors
    for take in list(_WATCHERS.get(model, ())):
        take(actors)

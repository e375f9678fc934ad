"""Plans made in steps, run to their end at once."""

from typing import TypeVar

from logsteer_server.tasks.planning import Steps

T = TypeVar("T")


def finish(steps: Steps[T]) -> T:
    """What the steps come to."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value

"""Rewards of samples: numbers that a caller's function gives to texts."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from logsteer.errors import InvalidRequestError
from logsteer.extras.datasets import Row

Reward: TypeAlias = Callable[[Row, str, str], float | Awaitable[float]]
"""A number for a row of the source, its prompt, and the text of one continuation; or what is
awaited for it."""


def check_reward(reward: Reward) -> None:
    """Refuse what cannot be called as a reward is; one that does not say how it is called passes.

    Raises InvalidRequestError.
    """
    try:
        inspect.signature(reward).bind({}, "", "")
    except ValueError:  # it has no signature, as some functions written in C
        return
    except TypeError as error:
        detail = f"a reward is called with (row, prompt, text), and {reward!r} is not: {error}"
        raise InvalidRequestError("invalid_request", detail, param="reward") from error


class Rating(NamedTuple):
    """A reward, or None and why there is none."""

    value: float | None
    error: str | None = None


def call_reward(reward: Reward, row: Row, prompt: str, text: str) -> Rating | Awaitable[Any]:
    """Return the rating of one text, or what is awaited for its reward.

    An exception of the function, and a value that is no finite number, are that text's alone.
    """
    try:
        value = reward(row, prompt, text)
        # Most are numbers, and asking whether one can be awaited takes longer than all else here.
        if not isinstance(value, float | int) and inspect.isawaitable(value):
            return value
        return _judge(value)
    except Exception as error:
        return _blame(error)


def known_ratings(ratings: Sequence[Rating | Awaitable[Any]]) -> list[Rating] | None:
    """Return the ratings where none is awaited, else None."""
    known = [rating for rating in ratings if isinstance(rating, Rating)]
    return known if len(known) == len(ratings) else None


async def await_ratings(ratings: Sequence[Rating | Awaitable[Any]]) -> list[Rating]:
    """Return the ratings, all that is awaited for them at once."""
    known = known_ratings(ratings)
    return await asyncio.gather(*map(_await_rating, ratings)) if known is None else known


async def _await_rating(rating: Rating | Awaitable[Any]) -> Rating:
    if isinstance(rating, Rating):
        return rating
    try:
        return _judge(await rating)
    except Exception as error:
        return _blame(error)


def _judge(value: Any) -> Rating:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}")
    return Rating(number)


def _blame(error: Exception) -> Rating:
    return Rating(None, f"{type(error).__name__}: {error}")

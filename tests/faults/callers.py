"""Callers that ask again and again, while models are changed under them."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from tests.faults.processes import wait_for


class Reachable(Protocol):
    """A service, of one machine or of several."""

    url: str


ITEMS = [{"context_ids": [5, 1], "target_ids": [[6]]}]
PAUSE_S = 0.02
"""Of a caller between two requests: what starts meanwhile needs the cores, too."""


def change(
    server: Reachable, what: str, wait_s: float = 600.0, headers: Mapping[str, str] | None = None
) -> httpx.Response:
    """Change models; one that is done is answered then, long before `wait_s` are over."""
    params = {"wait_s": wait_s}
    return httpx.post(f"{server.url}{what}", params=params, headers=headers, timeout=60)


@dataclass
class Load:
    """What came of requests that many callers send, one after another each: statuses, codes of
    errors, answers that are not those of a quiet server, and the seconds until each was answered.
    """

    statuses: list[int] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)
    wrong: list[Any] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


@contextmanager
def load(
    server: Reachable,
    model: str,
    callers: int = 12,
    retries: bool = False,
    items: Sequence[dict[str, Any]] = ITEMS,
    also: Callable[[Any], bool] = lambda _: False,
    headers: Mapping[str, str] | None = None,
    quiet: Any = None,
) -> Iterator[Load]:
    """Have callers score again and again; each answer is compared with that of a quiet server,
    which is asked for first where it is not given.

    They have begun when the block does, and are still answered when it has ended.

    `also` says whether results that differ from those are right, too.
    """
    found, over = Load(), threading.Event()
    body = {"model": model, "items": list(items), "cache": False}
    url = f"{server.url}/logprob"
    if quiet is None:
        quiet = httpx.post(url, json=body, headers=headers, timeout=60).json()["results"]

    def call(client: httpx.Client, began: float) -> None:
        answer = client.post(url, json=body)
        if retries and answer.status_code == 503 and answer.json()["retryable"]:
            found.codes.append(answer.json()["code"])
            time.sleep(0.2)
            call(client, began)
            return
        found.statuses.append(answer.status_code)
        found.waits.append(time.monotonic() - began)
        if answer.status_code != 200:
            found.codes.append(answer.json()["code"])
        elif (results := answer.json()["results"]) != quiet and not also(results):
            found.wrong.append(answer.json())

    def ask() -> None:
        with httpx.Client(headers=headers, timeout=60) as client:
            while not over.is_set():
                call(client, time.monotonic())
                time.sleep(PAUSE_S)

    with ThreadPoolExecutor(callers) as pool:
        callers_done = [pool.submit(ask) for _ in range(callers)]
        try:
            wait_for(lambda: len(found.statuses) > callers)
            yield found
            known = len(found.statuses)
            wait_for(lambda: len(found.statuses) > known + callers)
        finally:
            over.set()
        for done in callers_done:
            done.result()

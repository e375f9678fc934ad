"""Scores items as a caller in a container does, and prints what came back and what it saw.

caller.py URL TOTAL BATCH: TOTAL items in requests of BATCH. Not a test: tests run it in the image.
"""

import json
import sys
import time
from typing import Any

import httpx

from logsteer import Client, LogsteerError

url, (total, batch) = sys.argv[1], map(int, sys.argv[2:])
began = time.monotonic()
seen: list[tuple[float, str]] = []
send = httpx.HTTPTransport.handle_request


def note(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
    """Send a request, and note what the client tries again or gives up."""
    try:
        response = send(transport, request)
    except httpx.HTTPError as error:
        seen.append((time.monotonic() - began, repr(error)))
        raise
    if response.status_code != httpx.codes.OK:
        seen.append((time.monotonic() - began, str(response.status_code)))
    return response


httpx.HTTPTransport.handle_request = note  # type: ignore[method-assign]
items: list[Any] = [
    {"context_ids": [5, 100 + n % 50, n // 50], "target_ids": [[6]]} for n in range(total)
]
found: list[float] = []
failed: list[str] = []
longest = 0.0
with Client(url) as client:
    for start in range(0, total, batch):
        asked = time.monotonic()
        try:
            answer = client.logprob(items=items[start : start + batch])
        except LogsteerError as error:
            failed.append(repr(error))
        else:
            found += [result.targets[0].logprob for result in answer.results]
        longest = max(longest, time.monotonic() - asked)
took = time.monotonic() - began
print(json.dumps([found, failed, seen, round(longest, 2), round(took, 2)]))

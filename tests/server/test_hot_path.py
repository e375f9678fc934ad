"""How much of this project one small `/logprob` runs through in the HTTP process."""

import asyncio
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
import uvicorn

import logsteer
import logsteer_server
from logsteer_server.app import create_app
from logsteer_server.listening import listen_at
from logsteer_server.serving import configure_server
from logsteer_server.settings import Settings
from tests.conftest import fake_model

MOST_MODULES, MOST_FUNCTIONS, MOST_CALLS = 26, 150, 240
"""As counted, but for calls, of which there were 230: a slow machine plans in more slices."""
OWN = tuple(str(Path(package.__path__[0])) for package in (logsteer, logsteer_server))
BODY = {"items": [{"context_ids": [5, 6, 7], "target_ids": [[8, 9]]}], "cache": False}
REQUESTS = 24


class CallCounter:
    """Counts calls into this project's files, in all threads, while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[CodeType] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(OWN):
            self.calls[frame.f_code] += 1


async def count_one(counter: CallCounter, app: Any) -> Counter[CodeType]:
    """The calls of the request that takes the fewest: others have a heartbeat among theirs."""
    listener = listen_at("127.0.0.1", 0)
    server = uvicorn.Server(configure_server(app.state.settings, app))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    found = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as http:
        while (await http.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.05)
        for _ in range(REQUESTS):
            counter.calls.clear()
            counter.on = True
            answer = await http.post("/logprob", json=BODY)
            counter.on = False
            assert answer.status_code == 200, answer.text
            found.append(counter.calls.copy())
    server.should_exit = True
    await serving
    return min(found, key=Counter.total)


def test_a_small_request_runs_through_little_of_the_project(tmp_path: Path) -> None:
    counter = CallCounter()
    settings = Settings(models=[fake_model("fake")], store_directory=tmp_path)
    threading.setprofile(counter)
    sys.setprofile(counter)
    try:
        calls = asyncio.run(count_one(counter, create_app(settings)))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    by_module = Counter[str]()
    for code, count in calls.items():
        by_module[code.co_filename.removeprefix(str(Path(OWN[1]).parents[1]))] += count
    for code, count in sorted(calls.items(), key=lambda entry: entry[0].co_filename):
        name = code.co_filename.rpartition("logsteer")[2]
        print(f"{count:4} {name}:{code.co_firstlineno} {code.co_qualname}")
    print(len(by_module), len(calls), calls.total(), by_module.most_common())
    assert len(by_module) <= MOST_MODULES
    assert len(calls) <= MOST_FUNCTIONS
    assert calls.total() <= MOST_CALLS

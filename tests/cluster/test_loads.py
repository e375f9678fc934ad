"""Two ingresses that share two actors: what one has sent, the other knows. No Ray runs here."""

import asyncio
import importlib.util
import random
import time
import warnings
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from logsteer_server.contract.engine import EngineInfo, EngineSpec
from logsteer_server.contract.jobs import GenerateJob, Job, JobFailure
from logsteer_server.contract.lane import Lane
from logsteer_server.contract.results import ResultPart
from logsteer_server.engines.fake import FakeEngine, fake_generation
from logsteer_server.engines.replica import SupervisionLimits
from logsteer_server.observation.readings import EngineStatus
from tests.conftest import DEMO_MODEL
from tests.own_time import run_in_own_time

if importlib.util.find_spec("ray") is None:
    pytest.skip("SKIPPED BECAUSE RAY IS ABSENT: install the extra `ray`", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own, of pydantic
    from logsteer_server.cluster import loads
    from logsteer_server.cluster.engine import RemoteEngine
    from logsteer_server.cluster.loads import GONE_S, ActorLoad, LoadBoard, LoadReader, post_loads

ACTORS = ("left", "right")
SIZE = 45
"""Tokens of a job: its prompt, and what it generates."""
PROMPT = 5
JOB_S = 0.8
NEWS_S = 0.35
"""In which one ingress hears of what another has sent; less than half of JOB_S."""
ROOM = 4 * SIZE
SPEC = EngineSpec(
    id="fake",
    engine="fake",
    path=str(DEMO_MODEL),
    engine_args={"vocab_size": 100, "ahead_tokens": ROOM},
)


@dataclass(eq=False)
class Actor:
    """Does one job after another, each in JOB_S; counts as `ModelReplica` does."""

    name: str
    num_jobs: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def measure(self) -> ActorLoad:
        status = EngineStatus("0", restarts=7, queued=0, heartbeat_age_s=0.5)
        return ActorLoad("fake", self.name, +self.tokens, status)


class Calls:
    """What an ingress of a name asks of the actors."""

    def __init__(self, caller: str, actors: dict[str, Actor]) -> None:
        self._caller = caller
        self._actors = actors

    async def describe(self, actor: str | None) -> EngineInfo:
        return FakeEngine(SPEC).info

    async def run(
        self, actor: str, jobs: Sequence[Job], lane: Lane
    ) -> AsyncGenerator[ResultPart | JobFailure, None]:
        found = self._actors[actor]
        found.tokens[self._caller] += SIZE * len(jobs)
        found.num_jobs += len(jobs)
        for number, job in enumerate(jobs):
            async with found.turn:
                await asyncio.sleep(JOB_S)
            found.tokens[self._caller] -= SIZE
            assert isinstance(job, GenerateJob)
            yield ResultPart([number], fake_generation(job), time.monotonic())


def watch(take: Callable[[frozenset[str]], None]) -> Callable[[], None]:
    asyncio.get_running_loop().call_soon(take, frozenset(ACTORS))
    return lambda: None


@asynccontextmanager
async def connect(*, knows: bool) -> AsyncIterator[tuple[dict[str, Actor], list[RemoteEngine]]]:
    """Two actors and two ingresses, which know of each other's jobs or not."""
    actors, board = {name: Actor(name) for name in ACTORS}, LoadBoard()
    engines: list[RemoteEngine] = []
    tasks: list[asyncio.Task[None]] = []

    async def post(load: ActorLoad) -> None:
        board.post(load)

    for caller in ("one", "two"):
        calls = Calls(caller, actors)
        engine = RemoteEngine(SPEC, SupervisionLimits(), calls, watch, least=2, most=2)
        engine.start()
        engines.append(engine)

        def take(load: ActorLoad, engine: RemoteEngine = engine, caller: str = caller) -> None:
            engine.take_load(load, caller)

        if knows:
            reader = LoadReader(board.read, take, engine.forget_loads)
            tasks.append(asyncio.create_task(reader.run()))
    tasks += [asyncio.create_task(post_loads(own.measure, post)) for own in actors.values()]
    while not all(place.state == "ready" for own in engines for place in own.places[:2]):
        await asyncio.sleep(0.01)
    try:
        yield actors, engines
    finally:
        for task in tasks:
            task.cancel()
        for engine in engines:
            engine.stop()
        await asyncio.gather(*tasks, return_exceptions=True)


async def generate(engine: RemoteEngine) -> None:
    job = GenerateJob(np.arange(PROMPT, dtype=np.int32), max_tokens=SIZE - PROMPT)
    async for _ in engine.run([job]):
        pass


@pytest.mark.parametrize(("knows", "expected"), [(True, [1, 1]), (False, [0, 2])])
def test_a_long_generation_goes_where_no_other_ingress_has_one(
    monkeypatch: pytest.MonkeyPatch, knows: bool, expected: list[int]
) -> None:
    """Where both ingresses have taken the actors in the same order."""
    monkeypatch.setattr(random, "sample", lambda actors, _: actors)

    async def work() -> None:
        async with connect(knows=knows) as (actors, engines):
            first = asyncio.create_task(generate(engines[0]))
            await asyncio.sleep(NEWS_S)
            second = asyncio.create_task(generate(engines[1]))
            await asyncio.sleep(NEWS_S)
            assert sorted(own.num_jobs for own in actors.values()) == expected
            await asyncio.gather(first, second)

    run_in_own_time(work())


def test_what_others_have_leaves_less_room_but_never_less_than_a_share() -> None:
    async def work() -> None:
        async with connect(knows=True) as (actors, engines):
            greedy = [asyncio.create_task(generate(engines[0])) for _ in range(40)]
            await asyncio.sleep(NEWS_S)
            assert max(own.num_jobs for own in actors.values()) == ROOM // SIZE
            late = asyncio.create_task(generate(engines[1]))
            await asyncio.sleep(NEWS_S)
            assert sum(own.tokens["two"] for own in actors.values()) == SIZE, "it has its share"
            for task in (*greedy, late):
                task.cancel()

    run_in_own_time(work())


def test_readings_of_an_actors_engine_are_seen_in_the_ingress() -> None:
    async def work() -> None:
        async with connect(knows=True) as (_, engines):
            await asyncio.sleep(NEWS_S)
            found = engines[1].observe()
            assert [(own.replica, own.heartbeat_age_s) for own in found] == [("0", 0.5), ("1", 0.5)]
            assert [own.restarts for own in found] == [0, 0], "those that the ingress has counted"
            engines[1].forget_loads()
            assert [own.heartbeat_age_s for own in engines[1].observe()] == [None, None]

    run_in_own_time(work())


def test_a_board_that_begins_anew_is_read_from_its_beginning() -> None:
    async def work() -> None:
        board = LoadBoard()
        board.post(Actor("left").measure())
        number, loads = await board.read(40)
        assert (number, [load.actor for load in loads]) == (1, ["left"])
        assert await board.read(number, 0.01) == (1, ())
        reading = asyncio.create_task(board.read(number))
        await asyncio.sleep(0)
        board.post(Actor("right").measure())
        assert [load.actor for load in (await reading)[1]] == ["right"]

    run_in_own_time(work())


def test_a_reader_says_whether_the_ledger_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "READ_WAIT_S", 0.1)
    monkeypatch.setattr(loads, "RETRY_S", 0.01)

    async def work() -> None:
        board, answers, taken, forgotten = LoadBoard(), asyncio.Event(), [], []
        board.post(Actor("left").measure())

        async def read(after: int) -> tuple[int, Sequence[ActorLoad]]:
            await answers.wait()
            return await board.read(after, 0.01)

        reader = LoadReader(read, taken.append, lambda: forgotten.append(None), 0.01)
        task = asyncio.create_task(reader.run())
        await asyncio.wait_for(reader.has_read.wait(), 5)
        assert (reader.is_away, len(forgotten)) == (True, 1)
        answers.set()
        await asyncio.sleep(0.2)
        assert (reader.is_away, [own.actor for own in taken]) == (False, ["left"])
        task.cancel()

    run_in_own_time(work())


def test_a_first_reading_of_an_empty_board_does_not_wait_for_news() -> None:
    async def work() -> None:
        reader = LoadReader(LoadBoard().read, lambda _: None, lambda: None)
        task = asyncio.create_task(reader.run())
        await asyncio.wait_for(reader.has_read.wait(), 1)
        assert not reader.is_away
        task.cancel()

    run_in_own_time(work())


def test_the_board_forgets_actors_that_are_gone() -> None:
    now = 0.0
    board = LoadBoard(lambda: now)
    board.post(Actor("left").measure())
    now = GONE_S + 1
    board.post(Actor("right").measure())
    assert [load.actor for load in run_in_own_time(board.read(0))[1]] == ["right"]

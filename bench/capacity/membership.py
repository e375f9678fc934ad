"""What it costs an ingress that replicas are many: to take them, to tell of them, to hear of them.

    .venv/bin/python -m bench.capacity.membership

The service's own code, without Ray and without processes: a `RemoteEngine` is told of so many
actors, then of one that is replaced by another; metrics are written of so many engines. The figures
go to `measured.json`.
"""

import argparse
import asyncio
import json
import pickle
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

from bench.capacity.steps import BENCH, write_measured
from logsteer_server.cluster.engine import RemoteEngine
from logsteer_server.contract.engine import EngineInfo, EngineReading, EngineSpec, StepCounts
from logsteer_server.contract.jobs import Job, JobFailure
from logsteer_server.contract.lane import Lane
from logsteer_server.contract.results import ResultPart
from logsteer_server.engines.fake import FakeEngine
from logsteer_server.engines.process import Beat
from logsteer_server.engines.replica import SupervisionLimits
from logsteer_server.observation.metrics import Metrics
from logsteer_server.observation.readings import EngineStatus, ModelReading
from logsteer_server.observation.tallies import Spread

REPLICAS = (10, 100, 1000)
ROUNDS = 3
SPEC = EngineSpec("m", "fake", str(BENCH.parent / "demo" / "model"), engine_args={"vocab_size": 9})


class SilentCalls:
    """Actors that all say what their engine is, and are asked nothing else."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info

    async def describe(self, _actor: str | None) -> EngineInfo:
        """Return what every engine is."""
        return self._info

    async def run(
        self, _actor: str, _jobs: Sequence[Job], _lane: Lane
    ) -> AsyncGenerator[ResultPart | JobFailure, None]:
        """Yield nothing."""
        return
        yield

    async def close(self) -> None:
        """End nothing."""


def never_tell(_take: Callable[[frozenset[str]], None]) -> Callable[[], None]:
    """Tell of no actors by itself."""
    return lambda: None


async def time_actors(count: int) -> dict[str, float]:
    """Return CPU milliseconds for taking so many actors at once, and for one that is replaced."""
    engine = RemoteEngine(
        SPEC, SupervisionLimits(), SilentCalls(FakeEngine(SPEC).info), never_tell,
        least=count, most=count,
    )  # fmt: skip
    engine.start()
    names = [f"actor-{number}" for number in range(count + ROUNDS)]
    await asyncio.sleep(0)

    async def take(actors: Sequence[str]) -> float:
        began = time.process_time()
        engine._take_actors(frozenset(actors))
        while sum(place.state == "ready" for place in engine.places) < count:
            await asyncio.sleep(0)
        return 1e3 * (time.process_time() - began)

    first = await take(names[:count])
    changes = [await take(names[n + 1 : count + n + 1]) for n in range(ROUNDS)]
    engine.stop()
    return {"take_all_ms": first, "replace_one_ms": min(changes)}


def observe(count: int) -> dict[str, float]:
    """Return the series and bytes of so many engines' metrics, and CPU ms to write them."""
    spread = Spread()
    steps = StepCounts(tuple(spread.counts), 1.0)
    reading = EngineReading(1, 2, 100, 50, 64, 3, 4, 1)
    full = EngineStatus("0", 0, 5, 1234, 0.5, reading, steps)
    metrics, found = Metrics(), {}
    for name, engine in (("machine", full), ("ray", EngineStatus("0", 0, 5))):
        engines = [replace(engine, replica=str(number)) for number in range(count)]
        metrics.read_models = lambda own=engines: [ModelReading("m", 0, 1, True, own)]  # type: ignore[misc]
        taken = []
        for _ in range(ROUNDS):
            began = time.process_time()
            text = metrics.render()
            taken.append(1e3 * (time.process_time() - began))
        lines = [line for line in text.splitlines() if b"replica=" in line]
        found |= {
            f"{name}_series": len(lines) / count,
            f"{name}_bytes": sum(map(len, lines)) / count,
            f"{name}_scrape_ms": min(taken),
        }
    return found


def time_beat() -> float:
    """Return the CPU microseconds for reading one heartbeat off a pipe, unpickled."""
    spread = Spread()
    steps = StepCounts(tuple(spread.counts), 1.0)
    beat = pickle.dumps(Beat(1, 2, True, EngineReading(1, 2, 100, 50, 64, 3, 4, 1), steps))
    count, began = 20_000, time.process_time()
    for _ in range(count):
        pickle.loads(beat)  # noqa: S301
    return 1e6 * (time.process_time() - began) / count


def main() -> None:
    """Measure, print, and write."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    found: dict[str, Any] = {}
    for count in REPLICAS:
        own = asyncio.run(time_actors(count)) | observe(count)
        found[str(count)] = {name: float(f"{value:.3g}") for name, value in own.items()}
    found["beat_us"] = float(f"{time_beat():.3g}")
    write_measured("membership", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

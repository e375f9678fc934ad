"""Which actor an ingress has in which place of its queue, and what its card says; no Ray runs."""

import asyncio

from bench.capacity.membership import SPEC, SilentCalls, never_tell
from logsteer_server.cluster.engine import RemoteEngine
from logsteer_server.engines.fake import FakeEngine
from logsteer_server.engines.replica import SupervisionLimits

ACTORS = [f"actor-{number:02}" for number in range(20)]


async def take_all() -> list[str | None]:
    """The actors of a new ingress in the order of their places."""
    calls = SilentCalls(FakeEngine(SPEC).info)
    engine = RemoteEngine(SPEC, SupervisionLimits(), calls, never_tell, least=20, most=20)
    engine.start()
    engine._take_actors(frozenset(ACTORS))
    found = [place.actor for place in engine.places if place.actor is not None]
    engine.stop()
    return found


def test_each_ingress_has_all_actors_in_an_order_of_its_own() -> None:
    orders = [asyncio.run(take_all()) for _ in range(4)]
    assert all(sorted(map(str, order)) == ACTORS for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def read_cards(engine: RemoteEngine) -> list[tuple[str, str]]:
    """What a model's card has of its replicas."""
    return [(own.state, own.detail) for own in engine.read()]


def test_places_of_a_model_without_actors_say_what_the_model_says() -> None:
    async def work() -> None:
        calls = SilentCalls(FakeEngine(SPEC).info)
        engine = RemoteEngine(SPEC, SupervisionLimits(), calls, never_tell, least=2, most=4)
        assert read_cards(engine) == [("unloaded", "no actor")] * 2, "it was not started"
        engine.start()
        assert read_cards(engine) == [("loading", "Serve starts its actor")] * 2
        engine._take_actors(frozenset(ACTORS[:2]))
        while not engine.ready.is_set():
            await asyncio.sleep(0.01)
        await engine.close()
        assert read_cards(engine) == [("unloaded", "its engine was ended")] * 2
        engine.give_up("no room")
        assert (engine.state, read_cards(engine)) == ("failed", [("failed", "no room")] * 2)

    asyncio.run(work())

"""A replica whose ranks are on several nodes: its placement group, and the actors beside its own.

    node 0   actor of Serve (`ModelReplica`)   engine process: scheduler, first ranks
    node 1   actor of this module (`Follower`) engine process: the next ranks
    ...

One that is lost takes all others with it, and Serve starts a whole new replica.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from logsteer.errors import APIError, api_error
from logsteer_server.cluster.absence import Absence
from logsteer_server.cluster.calls import BLAMELESS
from logsteer_server.contract.engine import EngineInfo, EngineSpec, RankNode
from logsteer_server.contract.jobs import JobFailure
from logsteer_server.engines.replica import SupervisionLimits
from logsteer_server.engines.supervisor import SAME, LocalEngine
from logsteer_server.observation.logs import configure_logs
from logsteer_server.settings import SharedStore
from logsteer_server.stores.job_contents import Content, MachineContents

POLL_S = 0.05
ON_DIFFERENT_NODES = "STRICT_SPREAD"


def group_nodes(nodes: int, cpus: float, gpus: int) -> dict[str, Any]:
    """Return the options of a deployment whose replicas have this on each of several nodes.

    Ray then takes all of a replica's nodes at once, or waits.
    """
    if nodes == 1:
        return {}
    bundle = {name: number for name, number in (("CPU", cpus), ("GPU", gpus)) if number}
    return {
        "placement_group_bundles": [dict(bundle) for _ in range(nodes)],
        "placement_group_strategy": ON_DIFFERENT_NODES,
    }


class Follower:
    """One of the nodes of a replica after its first: an actor that runs this node's ranks.

    They are in a process below it, which is watched as an engine's, and not started again. The
    actor fetches what they read of a shared store.
    """

    def __init__(self, limits: SupervisionLimits, store: SharedStore | None) -> None:
        configure_logs(limits.style)
        self._limits = limits
        self._engine: LocalEngine | None = None
        self._contents = None if store is None else MachineContents(store)

    async def find_address(self) -> str:
        """Return this node's address, which is also a sign of life."""
        return str(ray.util.get_node_ip_address())

    async def run(self, spec: EngineSpec) -> Absence:
        """Run this node's ranks until they end; return why they did."""
        self._engine = LocalEngine(spec, self._limits)
        self._engine.start()
        while self._engine.state in ("loading", "ready"):
            await asyncio.sleep(POLL_S)
        return Absence(self._engine.detail, self._engine.given_up)

    async def describe(self) -> EngineInfo:
        """Return what the model is here, once it is loaded. Errors: APIError if it fails."""
        while self._engine is None or self._engine.state == "loading":
            await asyncio.sleep(POLL_S)
        return self._engine.check_ready()

    async def hold(self, content: Content) -> str | JobFailure:
        """Return the path of a content on this node, until it is released; or why it has none."""
        assert self._contents is not None
        try:
            return await self._contents.hold(content)
        except APIError as error:
            return JobFailure(error.code, error.detail)

    async def release(self, sha256: str) -> None:
        """Need a content no more."""
        assert self._contents is not None
        self._contents.release(sha256)


class _FollowerContents:
    """The `ContentKeeper` of a node that has a `Follower`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def hold(self, content: Content) -> str:
        """Return the path of a content there. Errors: as `ContentKeeper.hold`."""
        try:
            found: str | JobFailure = await self._actor.hold.remote(content)
        except Exception as error:  # the actor's, the network's or Ray's: the replica is lost
            detail = "a node of the replica was lost before the request began; try again"
            raise api_error(BLAMELESS, detail) from error
        if isinstance(found, JobFailure):
            raise api_error(found.code, found.detail)
        return found

    def release(self, sha256: str) -> None:
        """Need a content there no more."""
        self._actor.release.remote(sha256)


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """Why a node is lost. `accuses`: its ranks have ended, which the jobs may have caused.

    `may_pass`: it may come up if it is started again.
    """

    detail: str
    accuses: bool
    may_pass: bool = True


class Followers:
    """The other nodes of the replica in whose actor this is made.

    Errors of making it: RuntimeError where Serve has made no placement group.
    """

    def __init__(self, limits: SupervisionLimits, store: SharedStore | None) -> None:
        group = ray.util.get_current_placement_group()
        if group is None:
            raise RuntimeError("Serve has made no placement group for this replica")
        kind = ray.remote(Follower)
        self._timeout_s = limits.watch.heartbeat_timeout_s
        self._interval_s = limits.watch.interval_s
        self._actors = [
            kind.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            ).remote(limits, store)
            for number, bundle in enumerate(group.bundle_specs)
            if number > 0
        ]
        self._addresses: list[str] = []
        self._watching: list[asyncio.Task[NodeLoss]] = []

    @property
    def contents(self) -> Sequence[_FollowerContents]:
        """What keeps contents of the shared store on each node, in their order."""
        return [_FollowerContents(actor) for actor in self._actors]

    async def start(self, spec: EngineSpec) -> EngineSpec:
        """Have all nodes start their ranks; return what the engine on this one gets."""
        own = str(ray.util.get_node_ip_address())
        self._addresses = list(
            await asyncio.gather(*(actor.find_address.remote() for actor in self._actors))
        )
        first = RankNode(len(self._actors) + 1, 0, own, (own, _find_port(own)))
        for number, (actor, address) in enumerate(
            zip(self._actors, self._addresses, strict=True), 1
        ):
            node = replace(first, number=number, address=address)
            self._watching += [
                asyncio.create_task(self._run(actor, replace(spec, node=node))),
                asyncio.create_task(self._ask(actor, node)),
            ]
        return replace(spec, node=first)

    async def _run(self, actor: Any, spec: EngineSpec) -> NodeLoss:
        assert spec.node is not None
        try:
            found: Absence = await actor.run.remote(spec)
            lost = _lose_node(spec.node, found.detail, accuses=True)
            return replace(lost, may_pass=found.may_pass)
        except Exception as error:  # the actor's, the network's or Ray's: it does not run
            return _lose_node(spec.node, f"its actor ended: {type(error).__name__}")

    async def _ask(self, actor: Any, node: RankNode) -> NodeLoss:
        """Ask an actor for signs of life until there is none."""
        while True:
            try:
                await asyncio.wait_for(actor.find_address.remote(), self._timeout_s)
            except TimeoutError:
                return _lose_node(node, f"no answer for {self._timeout_s:g} s")
            except Exception as error:  # as above
                return _lose_node(node, f"its actor ended: {type(error).__name__}")
            await asyncio.sleep(self._interval_s)

    def find_loss(self) -> NodeLoss | None:
        """Return why one of the nodes is lost; None while none is."""
        return next((task.result() for task in self._watching if task.done()), None)

    async def check_same(self, info: EngineInfo) -> None:
        """Wait until all nodes are loaded. Errors: RuntimeError where one has another model."""
        found = await asyncio.gather(*(actor.describe.remote() for actor in self._actors))
        for address, other in zip(self._addresses, found, strict=True):
            if differs := [name for name in SAME if getattr(other, name) != getattr(info, name)]:
                raise RuntimeError(
                    f"node {address} of the replica has another model or vLLM than its first "
                    f"({', '.join(differs)}): all nodes need the same files and versions"
                )


def _lose_node(node: RankNode, why: str, *, accuses: bool = False) -> NodeLoss:
    return NodeLoss(f"node {node.number} of the replica ({node.address}): {why}", accuses)


def _find_port(address: str) -> int:
    """Return a port of an address that is free now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port

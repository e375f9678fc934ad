"""What all ingresses have in common: the actor that keeps it, and how it is asked."""

from collections.abc import Callable, Sequence
from typing import Any

from logsteer_server.cluster.calls import start_apart
from logsteer_server.cluster.loads import ActorLoad, LoadBoard
from logsteer_server.http.answer_ledger import AnswerLedger, Claim, KeptAnswer
from logsteer_server.keys.ledger import KeyGrant, KeyLedger, KeyReport


class Ledger:
    """The class of the deployment that ingresses and models' actors ask, of which one is there.

    What it knows is in its memory alone. One that starts anew hears of keys and loads from
    everybody within seconds; answers to writes are gone, but for those that an ingress gave itself.
    """

    def __init__(self, answer_bytes: int, answer_s: float, lease_s: float) -> None:
        self._keys = KeyLedger(lease_s)
        self._answers = AnswerLedger(answer_bytes, answer_s, lease_s)
        self._loads = LoadBoard()

    async def settle(self, process: str, reports: Sequence[KeyReport]) -> dict[str, KeyGrant]:
        """Answer as `KeyLedger.settle`."""
        return self._keys.settle(process, reports)

    async def claim(self, process: str, key: bytes, asked: bytes) -> Claim:
        """Answer as `AnswerLedger.claim`."""
        return self._answers.claim(process, key, asked)

    async def end(self, process: str, key: bytes, answer: KeptAnswer | None) -> None:
        """Take what `AnswerLedger.end` does."""
        self._answers.end(process, key, answer)

    async def post(self, load: ActorLoad) -> None:
        """Take an actor's load."""
        self._loads.post(load)

    async def read(self, after: int) -> tuple[int, Sequence[ActorLoad]]:
        """Answer as `LoadBoard.read`."""
        return await self._loads.read(after)


class LedgerCalls:
    """The methods of the one `Ledger`, by the handle of its deployment."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def settle(self, process: str, reports: Sequence[KeyReport]) -> dict[str, KeyGrant]:
        """Ask `KeyLedger.settle`."""
        found: dict[str, KeyGrant] = await _ask(self._handle.settle.remote, process, reports)
        return found

    async def claim(self, process: str, key: bytes, asked: bytes) -> Claim:
        """Ask `AnswerLedger.claim`."""
        found: Claim = await _ask(self._handle.claim.remote, process, key, asked)
        return found

    async def end(self, process: str, key: bytes, answer: KeptAnswer | None) -> None:
        """Tell `AnswerLedger.end`."""
        await _ask(self._handle.end.remote, process, key, answer)

    async def post(self, load: ActorLoad) -> None:
        """Tell `LoadBoard.post`."""
        await _ask(self._handle.post.remote, load)

    async def read(self, after: int) -> tuple[int, Sequence[ActorLoad]]:
        """Ask `LoadBoard.read`."""
        found: tuple[int, Sequence[ActorLoad]] = await _ask(self._handle.read.remote, after)
        return found


async def _ask(method: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call comes to that is made apart from the request in which it is made."""

    async def call() -> Any:
        return await method(*arguments)

    return await start_apart(call())

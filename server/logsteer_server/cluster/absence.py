"""Why a model has fewer actors than it should, by what Ray Serve says of it."""

import asyncio
import re
from dataclasses import dataclass

from ray import serve

KILLED = "died unexpectedly"
"""In what Ray says of an actor whose process ended without an error."""
LAST_ERROR = re.compile(r"^\S*?(\w*(?:Error|Exception)): (.+)$", re.MULTILINE)


class GivenUpError(RuntimeError):
    """An engine was not started again, because its processes ended too often.

    Nothing says that the next one would: a machine that had no memory may have some again.
    """


@dataclass(frozen=True, slots=True)
class Absence:
    """Why actors are not there. `may_pass`: they may come up if that is tried again later."""

    detail: str
    may_pass: bool = False


async def explain_absence(application: str, nodes: int) -> str | None:
    """Return why Serve has not started the actors of a model's application, each on so many nodes.

    None where it says nothing that helps; it waits for half a minute before it says anything.
    """
    status = await asyncio.to_thread(serve.status)
    if (found := status.applications.get(application)) is None:
        return None
    (own,) = found.deployments.values()
    absence = find_cause(own.message, nodes)
    return None if absence is None else absence.detail


def find_cause(message: str, nodes: int) -> Absence | None:
    """Return what a message of Serve's about a deployment means for whoever runs it.

    Of a traceback that is what its last error says. None where there is no reason in it.
    """
    if "to be scheduled" in message:
        if nodes == 1:
            why = "no node has room for it: add nodes, or lower cpus"
        else:
            why = (
                f"there are no {nodes} nodes with room for it at the same time: add nodes, or "
                "lower cpus or nodes_per_replica"
            )
        return Absence(f"{why}. Serve says: {message}")
    if KILLED in message:
        why = "its actor was killed as it started, which the kernel does where memory runs out"
        return Absence(f"{why}. Ray says: {' '.join(message.split())}", may_pass=True)
    if found := LAST_ERROR.findall(message):
        name, detail = found[-1]
        return Absence(detail, may_pass=name == GivenUpError.__name__)
    return None

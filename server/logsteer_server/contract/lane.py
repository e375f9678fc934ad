"""Whose turn a call takes at an engine, and whose cached work it may see."""

from dataclasses import dataclass
from typing import Literal

Priority = Literal["interactive", "batch"]
"""What waits for an answer, and what may take the time that is left."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Where the calls of one caller wait.

    Those of a `tenant` take turns with those of others; those of priority `batch` let `interactive`
    ones pass. Results and prefixes are shared among jobs of the same `salt` alone. `request_id` is
    what the log calls the request by whose call it is. `replica` runs them while it takes jobs;
    otherwise, and with None, whichever the queue chooses.
    """

    tenant: str = ""
    priority: Priority = "interactive"
    salt: str = ""
    request_id: str = ""
    replica: int | None = None

"""What a key may do."""

from typing import Final, Literal

KeyScope = Literal["score", "steer", "write", "admin"]
"""Read the model and what is stored; change it for a request by steering, override or adapter; store
vectors, overrides and adapters; write to `shared/` and test models."""

SCOPES: Final[tuple[KeyScope, ...]] = ("score", "steer", "write", "admin")

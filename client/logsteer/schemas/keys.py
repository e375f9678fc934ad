"""What a key may do."""

from typing import Final, Literal

KeyScope = Literal["score", "steer", "write", "admin"]
"""`score`: read models and what is stored. `steer`: change a model for a request, by steering, an
override or an adapter. `write`: store vectors, overrides and adapters. `admin`: write to `shared/`,
and test models."""

SCOPES: Final[tuple[KeyScope, ...]] = ("score", "steer", "write", "admin")

"""How a request is refused: with which code, which words, and what else a caller is told."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from logsteer.errors import APIError


@contextmanager
def refused(code: str, match: str | None = None, **fields: Any) -> Iterator[None]:
    """Make sure that the block raises an APIError with this code, these words and these fields.

    with refused("payload_too_large", "max_items", param="items"):
        ...
    """
    with pytest.raises(APIError, match=match) as caught:
        yield
    found = {name: getattr(caught.value, name) for name in ("code", *fields)}
    assert found == {"code": code, **fields}, caught.value

"""The services that the contract suite runs on: every engine, through HTTP, with one client."""

import pytest

from logsteer import Client

REAL = [pytest.param(name, marks=pytest.mark.engine) for name in ("vllm", "tlens")]


@pytest.fixture(params=["fake", *REAL])
def client(request: pytest.FixtureRequest) -> Client:
    """A client of a server with this engine, whose default model has the demo's tokenizer."""
    found: Client = request.getfixturevalue(f"{request.param}_client")
    return found

"""The services that the contract suite runs on: every engine, through HTTP, with one client."""

import pytest

from logsteer import Client


@pytest.fixture(params=["fake", pytest.param("vllm", marks=pytest.mark.engine)])
def client(request: pytest.FixtureRequest) -> Client:
    """A client of a server with this engine, whose default model has the demo's tokenizer."""
    found: Client = request.getfixturevalue(f"{request.param}_client")
    return found

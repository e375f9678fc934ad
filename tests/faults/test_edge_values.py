"""A share of the requests at the edges of the schemas; `edge_values` sends any number of them."""

import pytest

from tests.conftest import Server
from tests.faults.edge_values import attack

pytestmark = pytest.mark.engine

EXAMPLES = 150


def test_no_request_that_the_schemas_allow_ends_vllm(vllm_server: Server) -> None:
    check(vllm_server)


def test_no_request_that_the_schemas_allow_ends_transformer_lens(tlens_server: Server) -> None:
    check(tlens_server)


def check(server: Server) -> None:
    found = attack(server.url, EXAMPLES, model="demo")
    answered = sum(count for key, count in found.items() if key.endswith(" 200"))
    assert answered > EXAMPLES / 3, "most requests come no further than the schemas"

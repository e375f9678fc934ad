"""What the ingress makes of a request, without a Ray."""

from typing import Any

import httpcore
import pytest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own modules


def forward(path: str, query: str = "", **headers: str) -> httpcore.Request:
    """The request that a replica gets."""
    from logsteer_server.cluster.ingress import ForwardedRequest

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ],
        "state": {"id": "one"},
    }
    return ForwardedRequest(scope).copy("127.0.0.1:9", b"{}")


@pytest.mark.parametrize(
    ("path", "query", "target"),
    [
        ("/models", "", b"/models"),
        ("/models/a", "wait_s=1&x=%3F", b"/models/a?wait_s=1&x=%3F"),
        ("/vectors/a%2Fb", "", b"/vectors/a%2Fb"),
    ],
)
def test_a_target_is_forwarded_as_it_came(path: str, query: str, target: bytes) -> None:
    assert forward(path, query).url.target == target


def test_headers_of_the_connection_are_not_forwarded() -> None:
    sized = forward("/logprob", content_length="2", connection="close", x_request_id="caller's")
    assert sized.headers == [(b"content-length", b"2"), (b"x-request-id", b"one")]
    chunked = forward("/logprob", accept="*/*", transfer_encoding="gzip, chunked")
    assert chunked.headers == [
        (b"accept", b"*/*"),
        (b"x-request-id", b"one"),
        (b"transfer-encoding", b"chunked"),
    ]

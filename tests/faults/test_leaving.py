"""A caller who leaves while a long text is scored: the work ends, though much of it is unread."""

import socket
import time

import httpx

from tests.conftest import ServerFactory, fake_model
from tests.faults.processes import read_card, wait_for, wait_for_jobs

TEXT = b"Once upon a time there was a little girl who had a dog. " * 50_000


def test_a_streamed_text_ends_with_its_caller(start_server: ServerFactory) -> None:
    server = start_server({"models": [fake_model(delay_s=0.2)], "cache_bytes": 0})
    url = httpx.URL(server.url)
    head = "POST /perplexity/stream?context_length=64 HTTP/1.1\r\nHost: localhost\r\n"
    with socket.create_connection((url.host, url.port), 60) as caller:
        caller.sendall(f"{head}Content-Length: {len(TEXT)}\r\n\r\n".encode() + TEXT)
        wait_for_jobs(server, "fake")

    def is_idle() -> bool:
        """Whether no job is at work, and none is a second later: between batches none is, too."""
        counts = [own["num_jobs"] for own in read_card(server, "fake")["replicas"]]
        time.sleep(1)
        return not any(counts + [own["num_jobs"] for own in read_card(server, "fake")["replicas"]])

    wait_for(is_idle, 15)

"""A real S3 server of this process, for tests of stores behind a URL."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

HOST = "127.0.0.1"


@dataclass
class Bucket:
    """A bucket, and the server that has it; what is stored outlives the server."""

    port: int = 0
    name: str = field(default_factory=lambda: f"bucket-{uuid.uuid4().hex}")
    _server: Any = None

    @property
    def settings(self) -> dict[str, Any]:
        """What a server that uses the bucket is set to."""
        options = {
            "endpoint": f"http://{HOST}:{self.port}", "region": "us-east-1",
            "access_key_id": "a", "secret_access_key": "b",
        }  # fmt: skip
        return {"store_url": f"s3://{self.name}/logsteer", "store_options": options}

    def start(self) -> None:
        """Have the bucket answer."""
        moto = pytest.importorskip("moto.server", reason="NO S3 STORE IS TESTED: install moto")
        self._server = moto.ThreadedMotoServer(ip_address=HOST, port=self.port, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        """Have nobody listen where the bucket was."""
        if self._server is not None:
            self._server.stop()
        self._server = None


@contextmanager
def open_bucket() -> Iterator[Bucket]:
    """Give an empty bucket that answers."""
    bucket = Bucket()
    bucket.start()
    try:
        made = httpx.put(
            f"http://{HOST}:{bucket.port}/{bucket.name}",
            headers={"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/x"},
        )
        assert made.status_code == 200, made.text
        yield bucket
    finally:
        bucket.stop()

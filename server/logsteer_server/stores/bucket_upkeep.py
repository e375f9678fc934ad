"""What a server does for the store of a URL beside requests: remove waste, see that it answers."""

import asyncio
import logging
import random
import time
from contextlib import suppress

from logsteer.errors import APIError
from logsteer_server.stores.bucket import Bucket
from logsteer_server.stores.bucket_index import collect_bucket
from logsteer_server.stores.threads import StoreThreads

log = logging.getLogger(__name__)

PROBE_EVERY_S = 5.0
WAIT_S = 0.5
"""What whoever asks for a sign waits; what comes later is there for the next one."""


class BucketUpkeep:
    """Collects a bucket's waste about every `grace_s`, and says whether the bucket answers.

    It is used from one event loop.
    """

    def __init__(self, bucket: Bucket, grace_s: float, threads: StoreThreads) -> None:
        self._bucket = bucket
        self._grace_s = grace_s
        self._threads = threads
        self._collecting: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._probed_at = -PROBE_EVERY_S

    def start(self) -> None:
        """Begin to collect."""
        self._collecting = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        while True:
            # Servers that were started together do not collect together.
            await asyncio.sleep(self._grace_s * random.uniform(0.5, 1.5))  # noqa: S311
            try:
                work = self._threads.run(collect_bucket, self._bucket, self._grace_s)
                for line in await work:
                    log.info("%s: %s", self._bucket.url, line)
            except APIError as error:
                log.warning("%s was not cleaned: %s", self._bucket.url, error.detail)

    async def find_trouble(self) -> str | None:
        """Return why the bucket did not answer when it was last asked; None where it did."""
        if self._probing is None and time.monotonic() - self._probed_at >= PROBE_EVERY_S:
            self._probing = asyncio.create_task(self._probe())
        if self._probing is not None:
            await asyncio.wait({self._probing}, timeout=WAIT_S)
        return self._bucket.trouble

    async def _probe(self) -> None:
        try:
            with suppress(APIError):
                await self._threads.run(self._bucket.probe)
        finally:
            self._probed_at, self._probing = time.monotonic(), None

    def close(self) -> None:
        """Collect and ask no more."""
        for task in (self._collecting, self._probing):
            if task is not None:
                task.cancel()
        self._bucket.close()

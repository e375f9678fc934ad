"""The keys in force: from a bearer token to who calls, with the file read anew when it changes.

token known lately      a keyed digest of it is looked up: microseconds
id unknown, no token    refused at once, without a hash
id known                scrypt in one thread, some 50 ms; remembered, right or wrong
"""

import asyncio
import hashlib
import hmac
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cachetools import LRUCache, TTLCache

from logsteer.errors import APIError, api_error
from logsteer_server.contract.lane import Lane
from logsteer_server.keys.caller import (
    Allowance,
    MakeAllowance,
    Requester,
    make_own_allowance,
    salt_caches,
)
from logsteer_server.keys.entries import (
    TOKEN,
    KeyEntry,
    is_open_to_others,
    locate_keys,
    read_keys,
)
from logsteer_server.settings import ConfigurationError, Settings

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Between two looks at the file."""
REMEMBERED_TOKENS = 4096
REMEMBERED_WRONG = 4096
WRONG_FOR_S = 30.0
HASHES_PER_ID = 2
"""Secrets of one id that are hashed or wait for it at once; further ones are told to come back."""

UNAUTHORIZED = "This server asks for a key: send the header Authorization: Bearer <key>."


class KeyRing:
    """Whoever may call: everybody, who has the one `api_key`, or the keys of a file.

    It is used from one event loop. Errors of the first reading: ConfigurationError.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        make_allowance: MakeAllowance = make_own_allowance,
    ) -> None:
        self._api_key = None if settings.api_key is None else settings.api_key.encode()
        self._shares_caches = settings.share_caches
        self._path = locate_keys(settings)
        self._clock = clock
        self._make_allowance = make_allowance
        self._everybody = Allowance()
        self._keys: dict[str, KeyEntry] = {}
        self._allowances: dict[str, Allowance] = {}
        self._digest_key = secrets.token_bytes(32)
        self._verified: LRUCache[bytes, str] = LRUCache(REMEMBERED_TOKENS)
        self._wrong: TTLCache[bytes, None] = TTLCache(REMEMBERED_WRONG, WRONG_FOR_S, clock)
        self._hashing: dict[bytes, asyncio.Future[bool]] = {}
        self._hashing_ids: Counter[str] = Counter()
        self._hash_thread: ThreadPoolExecutor | None = None
        self._mark: tuple[int, ...] = ()
        self._looked_at = clock()
        if self._path is not None:
            self._hash_thread = ThreadPoolExecutor(1, "key-hash")
            self._load(self._path)

    @property
    def needs_key(self) -> bool:
        """Whether callers must show a key."""
        return self._api_key is not None or self._path is not None

    async def find(self, authorization: str) -> Requester:
        """Return who sent a request with this header. Errors: APIError `unauthorized`."""
        if not self.needs_key:
            return Requester(allowance=self._everybody)
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise api_error("unauthorized", UNAUTHORIZED)
        if self._path is None:
            if not hmac.compare_digest(token.encode(), self._api_key or b""):
                raise api_error("unauthorized", UNAUTHORIZED)
            return Requester(allowance=self._everybody)
        self._look(self._path)
        return self._make_caller(await self._verify(token))

    def _make_caller(self, key: KeyEntry) -> Requester:
        salt = "" if self._shares_caches else salt_caches(key.name)
        lane = Lane(key.name, key.priority, salt)
        return Requester(frozenset(key.scopes), key.name, lane, self._allowances[key.id])

    async def _verify(self, token: str) -> KeyEntry:
        """Return the key of a token. Errors: APIError `unauthorized`, `rate_limited`."""
        digest = hashlib.blake2b(token.encode(), key=self._digest_key, digest_size=32).digest()
        known = self._keys.get(self._verified.get(digest, ""))
        if known is not None:
            return known
        found = TOKEN.fullmatch(token)
        key = None if found is None else self._keys.get(found[1])
        if found is None or key is None or digest in self._wrong:
            raise _refuse_key()
        if not await self._hash(digest, key, found[2]):
            self._wrong[digest] = None
            raise _refuse_key()
        if self._keys.get(key.id) != key:  # revoked while it was hashed
            raise _refuse_key()
        self._verified[digest] = key.id
        return key

    async def _hash(self, digest: bytes, key: KeyEntry, secret: str) -> bool:
        """Return whether the secret is right; requests with one token share one hash."""
        loop = asyncio.get_running_loop()
        if (work := self._hashing.get(digest)) is None:
            if self._hashing_ids[key.id] >= HASHES_PER_ID:
                detail = "Too many wrong secrets of this key are being tried; come back shortly."
                raise api_error("rate_limited", detail, retry_after=1)
            work = loop.run_in_executor(self._hash_thread, key.verify, secret)
            self._hashing[digest] = work
            self._hashing_ids[key.id] += 1

            def end(_: asyncio.Future[bool]) -> None:
                del self._hashing[digest]
                self._hashing_ids[key.id] -= 1
                if not self._hashing_ids[key.id]:
                    del self._hashing_ids[key.id]

            work.add_done_callback(end)
        # A caller who hangs up does not end the hash that others wait for.
        return await asyncio.shield(work)

    def _look(self, path: Path) -> None:
        """Read the file again where it has changed; what cannot be read changes nothing."""
        now = self._clock()
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        try:
            mark = _mark(path.stat())
        except OSError as error:
            if self._mark:
                log.error(
                    "key_file: %s cannot be read (%s): the keys stay as they were",
                    path, error.strerror,
                )  # fmt: skip
            self._mark = ()
            return
        if mark == self._mark:
            return
        try:
            self._load(path)
        except ConfigurationError as error:
            self._mark = mark  # said once for each change
            log.error("%s: the keys stay as they were", error)

    def _load(self, path: Path) -> None:
        """Put the keys of the file into force. Errors: ConfigurationError."""
        keys, found = read_keys(path)
        self._mark = _mark(found)
        if is_open_to_others(found):
            log.warning("key_file: others may read %s: chmod 600 it", path)
        old, self._keys = self._keys, {key.id: key for key in keys}
        for token, key_id in list(self._verified.items()):
            before, now = old.get(key_id), self._keys.get(key_id)
            if before is None or now is None or before.hash != now.hash:
                del self._verified[token]
        self._wrong.clear()
        kept: dict[str, Allowance] = {}
        for key in keys:
            if (allowance := self._allowances.get(key.id)) is not None:
                allowance.change(key.limits)
            kept[key.id] = allowance or self._make_allowance(key.id, key.limits, self._clock)
        self._allowances = kept
        log.info("%d keys are in force", len(keys))

    def close(self) -> None:
        """End the thread that hashes."""
        if self._hash_thread is not None:
            self._hash_thread.shutdown(wait=False, cancel_futures=True)


def _mark(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def _refuse_key() -> APIError:
    return api_error("unauthorized", "No key of this server is the one that was sent.")

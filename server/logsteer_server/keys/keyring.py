"""The keys in force: from a bearer token to who calls, with the file read anew when it changes."""

import hashlib
import hmac
import logging
import os
from pathlib import Path

from logsteer.errors import api_error
from logsteer_server.contract.jobs import Lane, Priority
from logsteer_server.keys.caller import Allowance, Requester, TokenCounts
from logsteer_server.keys.entries import (
    TOKEN,
    KeyEntry,
    is_open_to_others,
    locate_keys,
    read_keys,
)
from logsteer_server.settings import ConfigurationError, Settings

log = logging.getLogger(__name__)

WRONG_KEY = "The key that was sent is not one of this server's: it is mistyped or was removed."
UNAUTHORIZED = "This server asks for a key: send the header Authorization: Bearer <key>."


class KeyRing:
    """Whoever may call: everybody, who has the one `api_key`, or the keys of a file.

    It is used from one event loop. Each request compares the file's times with those of the last
    reading, so a key that is revoked or replaced is refused from then on.
    Errors of the first reading: ConfigurationError.
    """

    def __init__(self, settings: Settings) -> None:
        self._api_key = None if settings.api_key is None else settings.api_key.encode()
        self._shares_caches = settings.share_caches
        self._path = locate_keys(settings)
        self.needs_key = self._api_key is not None or self._path is not None
        """Whether callers must show a key."""
        self._counts = TokenCounts(settings.limits_url)
        self._everybody = Allowance()
        self._keys: dict[str, KeyEntry] = {}
        self._allowances: dict[str, Allowance] = {}
        self._version: tuple[int, ...] = ()
        if self._path is not None:
            self._load(self._path)

    async def close(self) -> None:
        """Close what counts tokens."""
        await self._counts.close()

    def identify(
        self, authorization: str, priority: Priority = "interactive", request_id: str = ""
    ) -> Requester:
        """Return who sent a request with this header. Errors: APIError `unauthorized`.

        `priority` is what the request asks for: it may lower its key's, not raise it.
        """
        token = _read_bearer(authorization) if self.needs_key else ""
        if self.needs_key and not token:
            raise api_error("unauthorized", UNAUTHORIZED)
        if self._path is None:
            if self._api_key and not hmac.compare_digest(token.encode(), self._api_key):
                raise api_error("unauthorized", WRONG_KEY)
            lane = Lane(priority=priority, request_id=request_id)
            return Requester(lane=lane, allowance=self._everybody)
        self._reload_if_changed(self._path)
        key = self._verify(token)
        lane = Lane(
            key.name,
            "batch" if priority == "batch" else key.priority,
            "" if self._shares_caches else name_cache(key.name),
            request_id,
        )
        return Requester(frozenset(key.scopes), key.name, lane, self._allowances[key.id])

    def _verify(self, token: str) -> KeyEntry:
        """Return the key of a token. Errors: APIError `unauthorized`."""
        found = TOKEN.fullmatch(token)
        key = None if found is None else self._keys.get(found[1])
        if found is None or key is None or not key.verify(found[2]):
            raise api_error("unauthorized", WRONG_KEY)
        return key

    def _reload_if_changed(self, path: Path) -> None:
        """Read the file again where it has changed; what cannot be read changes nothing."""
        try:
            version = _read_version(path.stat())
        except OSError as error:
            if self._version:
                log.error(
                    "key_file: %s cannot be read (%s): the keys stay as they were",
                    path, error.strerror,
                )  # fmt: skip
            self._version = ()
            return
        if version == self._version:
            return
        try:
            self._load(path)
        except ConfigurationError as error:
            self._version = version  # said once for each change
            log.error("%s: the keys stay as they were", error)

    def _load(self, path: Path) -> None:
        """Put the keys of the file into force; what a key has at work stays counted.

        Errors: ConfigurationError.
        """
        keys, found = read_keys(path)
        self._version = _read_version(found)
        if is_open_to_others(found):
            log.warning("key_file: others may read %s: chmod 600 it", path)
        self._keys = {key.id: key for key in keys}
        allowances = self._allowances
        self._allowances = {}
        for key in keys:
            allowance = allowances.get(key.id) or Allowance(key.id, counts=self._counts)
            allowance.limits = key.limits
            self._allowances[key.id] = allowance
        log.info("%d keys are in force", len(keys))


def check_metrics_key(key: str | None, authorization: str) -> None:
    """Refuse a request for metrics without their key. Errors: APIError `unauthorized`."""
    token = _read_bearer(authorization)
    if key is not None and not hmac.compare_digest(token.encode(), key.encode()):
        detail = "Metrics ask for a key: send the header Authorization: Bearer <metrics_key>."
        raise api_error("unauthorized", detail)


def _read_bearer(authorization: str) -> str:
    """Return the token of a header; empty where it has none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _read_version(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def name_cache(key: str) -> str:
    """Return what a key's cached results and prefixes are marked with: the same at every start."""
    return hashlib.sha256(b"logsteer-salt:" + key.encode()).hexdigest()

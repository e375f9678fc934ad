"""The keyring: map a bearer token to its caller, and reload the key file when it changes.

The file has one entry for each key, with the hash of its secret, and is rewritten as a whole:

    {"keys": [{"name": "ann", "id": "3f9c52d01b7e", "sha256": "…", "scopes": ["score", "steer"],
               "limits": {"concurrency": 8}, "created": "…"}]}

A token is `ls_<id>_<secret>`. Only the token contains the secret, 256 random bits. These cannot be
guessed however fast the hash is, so a slow hash, as for passwords, would add nothing.
"""

import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkstemp

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from logsteer.errors import api_error
from logsteer.schemas import KeyScope
from logsteer.schemas.faults import explain
from logsteer_server.contract.jobs import Priority, Routing
from logsteer_server.keys.caller import Allowance, KeyLimits, Requester, TokenCounts
from logsteer_server.settings import ConfigurationError, Settings

log = logging.getLogger(__name__)

WRONG_KEY = "This server does not know the key: it is mistyped, or was removed."
UNAUTHORIZED = "This server needs a key: send the header Authorization: Bearer <key>."
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
"""A key's name is also the name of its directory."""
TOKEN = re.compile(r"ls_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
MAX_FILE_BYTES = 16 * 2**20


class KeyEntry(BaseModel):
    """One key, without its secret."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=NAME)
    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="Of the secret.")
    scopes: tuple[KeyScope, ...] = Field(min_length=1)
    limits: KeyLimits = KeyLimits()
    priority: Priority = "interactive"
    created: str = ""

    def verify(self, secret: str) -> bool:
        """Compare a secret with the key's, in constant time."""
        return hmac.compare_digest(_hash(secret), self.sha256)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class KeyFile(BaseModel):
    """The content of a key file."""

    model_config = ConfigDict(extra="forbid")

    keys: list[KeyEntry] = []

    @field_validator("keys")
    @classmethod
    def _are_distinct(cls, keys: list[KeyEntry]) -> list[KeyEntry]:
        for field in ("name", "id"):
            values = [str(getattr(key, field)).casefold() for key in keys]
            if len(set(values)) != len(values):
                raise ValueError(f"two keys have the same {field}")
        return keys


def make_key(
    name: str, scopes: tuple[KeyScope, ...], limits: KeyLimits, priority: Priority
) -> tuple[KeyEntry, str]:
    """Create a key; return its entry and its token, not stored. Errors: ValidationError."""
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    entry = KeyEntry(
        name=name,
        id=key_id,
        sha256=_hash(secret),
        scopes=scopes,
        limits=limits,
        priority=priority,
        created=_now(),
    )
    return entry, f"ls_{key_id}_{secret}"


def replace_secret(key: KeyEntry) -> tuple[KeyEntry, str]:
    """Replace the secret of a key; return the key, and its token, which is not stored."""
    secret = secrets.token_urlsafe(32)
    entry = key.model_copy(update={"sha256": _hash(secret), "created": _now()})
    return entry, f"ls_{key.id}_{secret}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def read_keys(path: Path) -> tuple[list[KeyEntry], os.stat_result]:
    """Return the keys of a file, and the file's identity at that time.

    Errors: ConfigurationError if it cannot be read, is not a key file, or is writable by anybody.
    The message contains no secret.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"key_file: {path} cannot be read: {error.strerror}") from error
    if found.st_mode & stat.S_IWOTH:
        raise ConfigurationError(f"key_file: anybody may write to {path}: chmod 600 it")
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(f"key_file: {path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return KeyFile.model_validate_json(content).keys, found
    except ValidationError as error:
        raise ConfigurationError(
            f"key_file: {path} is not a key file: {explain(error, KeyFile)} "
            "`logsteer-server keys add NAME --scope … --file FILE` writes one."
        ) from None


@contextmanager
def change_keys(path: Path) -> Iterator[list[KeyEntry]]:
    """Yield the keys of a file for changes in place, then write them, mode 0600, in one rename.

    A lock serializes commands on the same file. Errors: OSError; as `read_keys`.
    """
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = read_keys(path)[0] if path.exists() else []
        yield keys
        handle, draft = mkstemp(dir=path.parent, prefix=f".{path.name}.")  # of mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(KeyFile(keys=keys).model_dump_json(indent=1).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            Path(draft).replace(path)
        finally:
            Path(draft).unlink(missing_ok=True)
    finally:
        os.close(lock)


def locate_keys(settings: Settings) -> Path | None:
    """Return the configured key file, if any."""
    given = settings.key_file
    return None if given is None else settings.directory / given.expanduser()


def check_key_file(settings: Settings) -> None:
    """Check that the key file can be used. Errors: ConfigurationError."""
    if (path := locate_keys(settings)) is not None:
        read_keys(path)


class KeyRing:
    """Authenticate callers: everybody, by the single `api_key`, or by the keys of a file.

    Use it from one event loop. Each request compares the file's times with those of the last read,
    so a revoked or replaced key is refused at once. Errors of the first read: ConfigurationError.
    """

    def __init__(self, settings: Settings) -> None:
        self._api_key = None if settings.api_key is None else settings.api_key.encode()
        self._shares_caches = settings.share_caches
        self._path = locate_keys(settings)
        self.needs_key = self._api_key is not None or self._path is not None
        """Whether callers need a key."""
        self._counts = TokenCounts(settings.limits_url)
        self._everybody = Allowance()
        self._keys: dict[str, KeyEntry] = {}
        self._allowances: dict[str, Allowance] = {}
        self._version: tuple[int, ...] = ()
        if self._path is not None:
            self._load(self._path)

    async def close(self) -> None:
        """Close the token counts."""
        await self._counts.close()

    def identify(
        self, authorization: str, priority: Priority = "interactive", request_id: str = ""
    ) -> Requester:
        """Return the caller of a request with this header. Errors: APIError `unauthorized`.

        `priority` is the requested one; it may lower the key's, not raise it.
        """
        token = _read_bearer(authorization) if self.needs_key else ""
        if self.needs_key and not token:
            raise api_error("unauthorized", UNAUTHORIZED)
        if self._path is None:
            if self._api_key and not hmac.compare_digest(token.encode(), self._api_key):
                raise api_error("unauthorized", WRONG_KEY)
            routing = Routing(priority=priority, request_id=request_id)
            return Requester(routing=routing, allowance=self._everybody)
        self._reload_if_changed(self._path)
        found = TOKEN.fullmatch(token)
        key = None if found is None else self._keys.get(found[1])
        if found is None or key is None or not key.verify(found[2]):
            raise api_error("unauthorized", WRONG_KEY)
        return self._admit(key, priority, request_id)

    def find_caller(self, namespace: str | None, request_id: str) -> Requester:
        """Return the caller whose namespace this is, for work that outlives its request.

        Its priority is `batch`. Errors: APIError `unauthorized` where its key was revoked.
        """
        if namespace is None:
            routing = Routing(priority="batch", request_id=request_id)
            return Requester(routing=routing, allowance=self._everybody)
        if self._path is not None:
            self._reload_if_changed(self._path)
        for key in self._keys.values():
            if key.name == namespace:
                return self._admit(key, "batch", request_id)
        raise api_error("unauthorized", f"The key {namespace} was revoked.")

    def _admit(self, key: KeyEntry, priority: Priority, request_id: str) -> Requester:
        routing = Routing(
            key.name,
            "batch" if priority == "batch" else key.priority,
            "" if self._shares_caches else name_cache(key.name),
            request_id,
        )
        return Requester(frozenset(key.scopes), key.name, routing, self._allowances[key.id])

    def _reload_if_changed(self, path: Path) -> None:
        """Reload the file if it has changed; keep the old keys if it cannot be read."""
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
        """Apply the keys of the file; running requests of a key stay counted.

        Errors: ConfigurationError.
        """
        keys, found = read_keys(path)
        self._version = _read_version(found)
        if found.st_mode & (stat.S_IRGRP | stat.S_IROTH):  # the hashes are not for everybody
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
        detail = "/metrics needs a key: send the header Authorization: Bearer <metrics_key>."
        raise api_error("unauthorized", detail)


def _read_bearer(authorization: str) -> str:
    """Return the token of a header; empty without one."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _read_version(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def name_cache(key: str) -> str:
    """Return the cache namespace of a key, the same after each restart."""
    return hashlib.sha256(b"logsteer-salt:" + key.encode()).hexdigest()

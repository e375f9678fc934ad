"""The stores of every namespace: everybody's, and those of each key below `keys/`.

<store>/vectors, overrides, adapters              everybody's; with keys: `shared/NAME`
<store>/keys/<name>/vectors, overrides, adapters  those of the key of that name
"""

import logging

from cachetools import LRUCache

from logsteer.errors import api_error
from logsteer.schemas import AdapterCard, OverrideCard, VectorCard
from logsteer_server.interventions.interventions import Stores
from logsteer_server.keys.caller import Requester
from logsteer_server.settings import ConfigurationError, Settings
from logsteer_server.stores.bucket_store import BucketStore, SharedFiles
from logsteer_server.stores.directory_store import DirectoryStore
from logsteer_server.stores.layout import C
from logsteer_server.stores.namespace import KEYS_DIRECTORY, Namespace
from logsteer_server.stores.store import ADAPTERS, OVERRIDES, VECTORS, Kind, Store
from logsteer_server.stores.threads import StoreThreads
from logsteer_server.stores.vectors import ParsedVectors, VectorStore

log = logging.getLogger(__name__)

OPEN_NAMESPACES = 256
"""Those used lately stay open; opening one reads its directory."""


class RootStores:
    """A store of each kind at one place, of the settings' sizes or of at most `max_bytes`.

    `files` are those of `store_url`; None: the place is in `store_directory`.
    Errors: ConfigurationError where the directory cannot be used. Blocks.
    """

    def __init__(
        self,
        settings: Settings,
        files: SharedFiles | None,
        name: str | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self._files = files
        self._place = "" if name is None else f"{KEYS_DIRECTORY}/{name}/"
        self._root = settings.store_path / self._place
        self._max_bytes = max_bytes
        self._lock_timeout_s = settings.store_lock_timeout_s
        self.vectors: Store[VectorCard] = self._open(VECTORS, settings.vector_store_bytes)
        self.overrides: Store[OverrideCard] = self._open(OVERRIDES, settings.override_store_bytes)
        self.adapters: Store[AdapterCard] = self._open(ADAPTERS, settings.adapter_store_bytes)

    def _open(self, kind: Kind[C], max_bytes: int) -> Store[C]:
        own = max_bytes if self._max_bytes is None else min(max_bytes, self._max_bytes)
        if self._files is not None:
            return BucketStore(kind, self._files, self._place + kind.plural, own)
        return DirectoryStore(kind, self._root, own, self._lock_timeout_s)


class NamespaceRegistry:
    """Gives each caller the stores that it sees. It is used from one event loop.

    Errors here: ConfigurationError where everybody's stores cannot be used. Blocks.
    """

    def __init__(self, settings: Settings, threads: StoreThreads) -> None:
        self._settings = settings
        self._threads = threads
        shared = settings.shared_store
        self.files = None if shared is None else SharedFiles.open(shared)
        self._shared = RootStores(settings, self.files)
        self._parsed = ParsedVectors()
        self._opened: LRUCache[tuple[object, ...], Stores] = LRUCache(OPEN_NAMESPACES)

    async def find(self, caller: Requester) -> Stores:
        """Return a caller's stores. Errors: APIError `internal` where they cannot be used."""
        place = caller.namespace, caller.allowance.limits.stored_bytes, caller.scopes
        stores = self._opened.get(place)
        if stores is None:
            stores = await self._threads.run(self._open, caller)
            self._opened[place] = stores
        return stores

    def _open(self, caller: Requester) -> Stores:
        own = shared = self._shared
        if caller.namespace is not None:
            try:
                max_bytes = caller.allowance.limits.stored_bytes
                own = RootStores(self._settings, self.files, caller.namespace, max_bytes)
            except ConfigurationError as error:
                log.error("the stores of key %s cannot be used: %s", caller.namespace, error)
                raise api_error("internal", "The stores of this key cannot be used.") from error
        may_share = "admin" in caller.scopes
        vectors = Namespace(own.vectors, shared.vectors, may_share=may_share)
        return Stores(
            VectorStore(vectors, self._parsed),
            Namespace(own.overrides, shared.overrides, may_share=may_share),
            Namespace(own.adapters, shared.adapters, may_share=may_share),
            may_steer="steer" in caller.scopes,
        )

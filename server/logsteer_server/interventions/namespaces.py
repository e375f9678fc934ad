"""The stores of every namespace: everybody's, and those of each key below `keys/`.

vectors, overrides, adapters              everybody's; with keys: `shared/NAME`
keys/<name>/vectors, overrides, adapters  those of the key of that name
"""

from cachetools import LRUCache

from logsteer_server.interventions.interventions import Stores
from logsteer_server.keys.caller import Requester
from logsteer_server.settings import Settings
from logsteer_server.stores.namespace import KEYS_DIRECTORY, Namespace
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.store import ADAPTERS, OVERRIDES, VECTORS, C, Kind, Store
from logsteer_server.stores.upkeep import SHARED_BYTES
from logsteer_server.stores.vectors import ParsedVectors, VectorStore

OPEN_NAMESPACES = 256
"""Those used lately stay open, and remember the cards that they have read."""


class NamespaceRegistry:
    """Gives each caller the stores that it sees. It is used from one event loop."""

    def __init__(self, settings: Settings, objects: Objects) -> None:
        self._settings = settings
        self._objects = objects
        self._parsed = ParsedVectors()
        self._opened: LRUCache[tuple[object, ...], Stores] = LRUCache(OPEN_NAMESPACES)
        self._shared = (self._open(VECTORS), self._open(OVERRIDES), self._open(ADAPTERS))

    def _open(self, kind: Kind[C], prefix: str = "", max_bytes: int = SHARED_BYTES) -> Store[C]:
        return Store(kind, self._objects, max_bytes, prefix, self._settings.store_grace_s)

    async def find(self, caller: Requester) -> Stores:
        """Return a caller's stores."""
        quota = caller.allowance.limits.stored_bytes
        place = caller.namespace, quota, caller.scopes
        if (known := self._opened.get(place)) is not None:
            return known
        vectors, overrides, adapters = shared = self._shared
        if caller.namespace is not None:
            prefix = f"{KEYS_DIRECTORY}/{caller.namespace}/"
            max_bytes = self._settings.max_key_bytes if quota is None else quota
            vectors, overrides, adapters = (
                self._open(VECTORS, prefix, max_bytes),
                self._open(OVERRIDES, prefix, max_bytes),
                self._open(ADAPTERS, prefix, max_bytes),
            )
        may_share = "admin" in caller.scopes
        stores = self._opened[place] = Stores(
            VectorStore(Namespace(vectors, shared[0], may_share=may_share), self._parsed),
            Namespace(overrides, shared[1], may_share=may_share),
            Namespace(adapters, shared[2], may_share=may_share),
            may_steer="steer" in caller.scopes,
        )
        return stores

"""The contents of a kind that one caller sees: its own, and shared ones under `shared/`."""

from typing import Generic, cast

from logsteer.errors import APIError, api_error
from logsteer_server.stores.store import C, Store, StoredContent, StoreListing
from logsteer_server.stores.upload import Upload

SHARED = "shared"
PREFIX = f"{SHARED}/"
KEYS_DIRECTORY = "keys"
"""First part of the places of all keys' stores."""


class Namespace(Generic[C]):
    """Resolve a caller's names: `happy` in its own store, `shared/happy` in the shared one.

    Without keys both are one store, and `shared/happy` is `happy`. Methods and errors are those of
    `Store`. Methods that write also raise APIError `forbidden` for a shared name if `may_share` is
    false.
    """

    def __init__(self, own: Store[C], shared: Store[C] | None = None, *, may_share: bool = True):
        self._own = own
        self._shared = own if shared is None else shared
        self._may_share = may_share

    @property
    def max_bytes(self) -> int:
        """Limit of the caller's own contents, in bytes."""
        return self._own.max_bytes

    def _locate(self, name: str) -> tuple[Store[C], str]:
        """Return the store of a name, and its name there."""
        if name.startswith(PREFIX):
            return self._shared, name.removeprefix(PREFIX)
        return self._own, name

    def _locate_writable(self, name: str) -> tuple[Store[C], str]:
        self.check_writing(name)
        return self._locate(name)

    def check_writing(self, name: str) -> None:
        """Check that this caller may write under a name. Errors: APIError."""
        if name.startswith(PREFIX) and not self._may_share:
            kind = self._own.kind
            detail = (
                f"{name}: what is shared takes a key with the scope admin to write; store the "
                f"{kind.noun} under a name without {PREFIX}."
            )
            raise api_error("forbidden", detail)
        if name == SHARED and self._own is not self._shared:
            detail = f"{SHARED} is what shared names begin with; choose another name."
            raise api_error("invalid_request", detail, param="name")

    def receive(self, name: str, announced: int = 0) -> Upload:
        """Open a file for the upload of a name; see `Store.receive`."""
        store, bare = self._locate_writable(name)
        return store.receive(bare, announced)

    def find_repeat(self, name: str, request: str, *, overwrite: bool) -> C | None:
        """Return the card that an equal request stored; see `Store.find_repeat`."""
        store, bare = self._locate_writable(name)
        card = store.find_repeat(bare, request, overwrite=overwrite)
        return None if card is None else self._show(store, card)

    def put(self, upload: Upload, card: C, request: str = "", *, overwrite: bool = True) -> C:
        """Point the card's name to its received upload; see `Store.put`."""
        store, bare = self._locate_writable(card.name)
        stored = store.put(upload, _rename(card, bare), request, overwrite=overwrite)
        return self._show(store, stored)

    def look_up(self, name: str) -> tuple[C, StoredContent]:
        """Return the card of a name, and its content."""
        store, bare = self._locate(name)
        card, found = store.look_up(bare)
        return self._show(store, card), StoredContent(name, found.sha256, found.source)

    def _show(self, store: Store[C], card: C) -> C:
        """Return a store's card with the name that this caller uses."""
        return card if store is self._own else _rename(card, PREFIX + card.name)

    def find_content(self, sha256: str) -> tuple[C, StoredContent]:
        """Return the own or shared content with a SHA-256, and the card of a name that has it."""
        try:
            return self._own.find_content(sha256)
        except APIError as error:
            if error.code != self._own.kind.unknown or self._shared is self._own:
                raise
        return self._shared.find_content(sha256)

    def list_all(self) -> StoreListing[C]:
        """Return every card, own ones first; `num_bytes` counts own contents."""
        own = self._own.list_all()
        if self._shared is self._own:
            return own
        shared = self._shared.list_all()
        return StoreListing(
            own.cards + [self._show(self._shared, card) for card in shared.cards],
            own.damaged + [PREFIX + name for name in shared.damaged],
            own.num_bytes,
        )

    def delete(self, name: str) -> str | None:
        """Remove a name; return its SHA-256, or None if the card was damaged."""
        store, bare = self._locate_writable(name)
        return store.delete(bare)

    def read(self, found: StoredContent) -> bytes:
        """Return the bytes of a content; see `Store.read`."""
        return self._own.read(found)

    def report_damage(self, found: StoredContent) -> APIError:
        """Return the error for a damaged content; see `Store`."""
        return self._own.report_damage(found)


def _rename(card: C, name: str) -> C:
    """Return the card with another name."""
    return cast(C, card.model_copy(update={"name": name}))

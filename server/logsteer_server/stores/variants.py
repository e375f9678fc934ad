"""The store of variants: names for a resident model together with interventions and options.

All callers see the variants in the server's configuration.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256

from logsteer.errors import api_error
from logsteer.schemas import VariantCard, VariantFields
from logsteer_server.stores.store import (
    PREFIX,
    Namespace,
    Store,
    StoredContent,
    StoreListing,
    stamp,
)

FIELDS = set(VariantFields.model_fields)


def write_variant(variant: VariantFields) -> bytes:
    """Return a variant's fields as its content, JSON."""
    fields = variant.model_dump(mode="json", include=FIELDS, exclude_unset=True)
    return json.dumps(fields, sort_keys=True).encode()


def make_card(name: str, variant: VariantFields, created: str = "") -> VariantCard:
    """Return the card of a variant under a name."""
    content = write_variant(variant)
    about = {"sha256": sha256(content).hexdigest(), "bytes": len(content), "created": created}
    return VariantCard(name=name, **about, **json.loads(content))


class VariantStore(Namespace[VariantCard]):
    """The variants that a caller sees: the configured ones, its own, and shared ones."""

    def __init__(
        self,
        own: Store[VariantCard],
        shared: Store[VariantCard] | None = None,
        *,
        configured: Iterable[VariantCard] = (),
        may_share: bool = True,
    ) -> None:
        super().__init__(own, shared, may_share=may_share)
        self._configured = {card.name: card for card in configured}

    def look_up(self, name: str) -> tuple[VariantCard, StoredContent]:
        """Return the card of a name, and its content."""
        if (card := self._configured.get(name)) is not None:
            return card, StoredContent(name, card.sha256, "")
        return super().look_up(name)

    def list_all(self) -> StoreListing[VariantCard]:
        """Return every card: configured ones, own ones, shared ones."""
        listing = super().list_all()
        return replace(listing, cards=[*self._configured.values(), *listing.cards])

    def store(self, name: str, variant: VariantFields, *, overwrite: bool) -> VariantCard:
        """Point a name to a variant; return the name's card, as `Store.put`.

        Errors: APIError `exists` for a configured name, `invalid_request` for a shared variant that
        names an unshared content.
        """
        if name in self._configured:
            raise api_error("exists", f"The variant {name!r} is one of the server's file.")
        own = [other for _, other in list_names(variant) if not other.startswith(PREFIX)]
        if own and name.startswith(PREFIX) and self.own is not self.shared:
            detail = f"{name} is everybody's, and {own[0]}, which it names, is yours: share that"
            raise api_error("invalid_request", f"{detail}, too, as {PREFIX}{own[0]}.")
        content = write_variant(variant)
        store = self.of_writable(name)
        upload = store.receive(name, len(content))
        try:
            upload.write(content)
            digest = upload.finish()
            return store.put(upload, make_card(name, variant, stamp()), digest, overwrite=overwrite)
        finally:
            upload.discard()


def list_names(variant: VariantFields | VariantCard) -> list[tuple[str, str]]:
    """Return the kinds and names of the stored contents that a variant uses."""
    fields = variant.model_dump(mode="json")
    found = [("adapter", fields["adapter"])] if fields["adapter"] else []
    found += [("override", fields["override"]["name"])] if fields["override"] else []
    waiting = [fields["steering"]]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, dict):
            kinds = (("vector", node.get("name")), ("sae", node.get("sae")))
            found += [(kind, name) for kind, name in kinds if name]
            node = list(node.values())
        waiting += node if isinstance(node, list) else []
    return found

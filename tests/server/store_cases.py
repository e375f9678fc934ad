"""Contents and cards of each kind, for tests of stores."""

import hashlib
from typing import Any

import numpy as np
from safetensors.numpy import save

from logsteer.schemas import VectorAbout
from logsteer_server.stores.contents import ContentFiles
from logsteer_server.stores.store import ADAPTERS, OVERRIDES, SAES, VARIANTS, VECTORS, Store

ABOUT = VectorAbout(source="upload", format="safetensors")
FIELDS: dict[str, dict[str, Any]] = {
    VECTORS.noun: {
        "hook": "resid_post", "layers": [1], "width": 3, "norms": {"1": 0.1}, "about": ABOUT,
    },
    OVERRIDES.noun: {
        "model": "a", "weights_digest": "b", "tensors": 2, "moved": 1, "total": 2, "norm": 0.1,
    },
    ADAPTERS.noun: {
        "model": "a", "weights_digest": "b", "rank": 4, "alpha": 6.0, "modules": ["q_proj"],
        "tensors": 2, "norm": 0.1,
    },
    SAES.noun: {
        "architecture": "standard", "hook": "resid_post", "layer": 1, "width": 3, "features": 9,
        "labels": 0,
    },
    VARIANTS.noun: {"model": "a"},
}  # fmt: skip


def make_content(seed: int, count: int = 100) -> bytes:
    """Return a file of random numbers."""
    numbers = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    return save({"weight": numbers, "bias": numbers[:3]})


def put_content(
    store: Store[Any], name: str, data: bytes, request: str = "", *, overwrite: bool = True
) -> Any:
    """Upload bytes to a store of any kind, and return the card."""
    upload = store.receive(name, len(data))
    try:
        upload.write(data[:7])
        upload.write(data[7:])
        card = store.kind.card(
            name=name, sha256=upload.finish(), bytes=upload.size, created="now",
            **FIELDS[store.kind.noun],
        )  # fmt: skip
        return store.put(upload, card, request, overwrite=overwrite)
    finally:
        upload.discard()


def read_content(store: Store[Any], name: str) -> bytes:
    """Return the content of a name, by what has fetched nothing yet."""
    files = ContentFiles(store.objects, 2**20)
    try:
        with files.open(store.kind, store.look_up(name)[1]) as path:
            return path.read_bytes()
    finally:
        files.close()


def read_state(store: Store[Any]) -> dict[str, bytes]:
    """Return each name's content, all of it whole: nothing is damaged, and the sizes are right."""
    listing = store.list_all()
    assert listing.damaged == []
    state = {card.name: read_content(store, card.name) for card in listing.cards}
    for card in listing.cards:
        assert hashlib.sha256(state[card.name]).hexdigest() == card.sha256
    assert listing.num_bytes == sum({hash(data): len(data) for data in state.values()}.values())
    return state

"""Contents and cards of each kind, for tests of stores."""

from typing import Any

import numpy as np
from safetensors.numpy import save

from logsteer.schemas import VectorAbout
from logsteer_server.stores.directory_store import DirectoryStore
from logsteer_server.stores.store import ADAPTERS, OVERRIDES, VECTORS, Store

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
}  # fmt: skip


def make_content(seed: int, count: int = 100) -> bytes:
    """Return a file of random numbers."""
    numbers = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    return save({"weight": numbers, "bias": numbers[:3]})


def put_content(store: Store[Any], name: str, data: bytes) -> Any:
    """Upload bytes to a store of any kind, and return the card."""
    upload = store.receive(name, len(data))
    try:
        upload.write(data[:7])
        upload.write(data[7:])
        card = store.kind.card(
            name=name, sha256=upload.finish(), bytes=upload.size, created="now",
            **FIELDS[store.kind.noun],
        )  # fmt: skip
        store.put(upload, card)
    finally:
        upload.discard()
    return card


def list_files(store: DirectoryStore[Any]) -> list[str]:
    """Return what lies in a store's directory, its lock aside."""
    found = [path for path in store.directory.rglob("*") if path.is_file() and path.name != "lock"]
    return sorted(str(path.relative_to(store.directory)) for path in found)

"""The store of steering vectors, which come in and go out parsed."""

import hashlib
import threading
from contextlib import suppress
from dataclasses import dataclass

from cachetools import LRUCache

from logsteer.schemas import VectorAbout, VectorCard
from logsteer_server.stores.layer_vectors import LayerVectors, parse_content
from logsteer_server.stores.store import Store, StoredContent, stamp
from logsteer_server.stores.upload import report_faults

PARSED_BYTES = 64 * 2**20
"""Of contents that were read lately; they are checked once, not at each request."""


@dataclass(frozen=True, slots=True)
class StoredVectors:
    """Vectors, and the name that they were found under: None where found by SHA-256."""

    name: str | None
    sha256: str
    vectors: LayerVectors


class VectorStore:
    """Vectors in a store, those used lately in memory; threads may share it.

    Its methods block, and raise what those of `Store` raise.
    """

    def __init__(self, files: Store[VectorCard]) -> None:
        self.files = files
        self._lock = threading.Lock()
        self._parsed: LRUCache[str, LayerVectors] = LRUCache(PARSED_BYTES, lambda v: v.num_bytes)

    def put(self, name: str, vectors: LayerVectors, about: VectorAbout) -> VectorCard:
        """Point a name to vectors, whatever it pointed to before; return their card."""
        upload = self.files.receive(name, len(vectors.content))
        try:
            upload.write(vectors.content)
            card = VectorCard(
                name=name,
                sha256=upload.finish(),
                hook=vectors.hook,
                layers=list(vectors.layers),
                width=vectors.width,
                norms={str(layer): norm for layer, norm in vectors.norms().items()},
                bytes=upload.size,
                created=stamp(),
                about=about,
            )
            self.files.put(upload, card)
        finally:
            upload.discard()
        return card

    def find(self, name: str) -> StoredVectors:
        """Return the vectors of a name."""
        while True:
            found = self.files.find(name)
            with report_faults(found.path), suppress(FileNotFoundError):  # replaced just now
                return StoredVectors(name, found.sha256, self._load(found))

    def find_content(self, sha256: str) -> StoredVectors:
        """Return the vectors with a SHA-256."""
        while True:
            found = self.files.find_content(sha256)
            with report_faults(found.path), suppress(FileNotFoundError):  # deleted just now
                return StoredVectors(None, sha256, self._load(found))

    def _load(self, found: StoredContent) -> LayerVectors:
        """Return a content's vectors. Errors: FileNotFoundError; APIError for a damaged one."""
        with self._lock:
            if found.sha256 in self._parsed:
                return self._parsed[found.sha256]
        content = found.path.read_bytes()
        if hashlib.sha256(content).hexdigest() != found.sha256:
            raise self.files.report_damage(found.name, found.path)
        try:
            vectors = parse_content(content)
        except ValueError as error:
            raise self.files.report_damage(found.name, found.path) from error
        if vectors.num_bytes <= PARSED_BYTES:
            with self._lock:
                self._parsed[found.sha256] = vectors
        return vectors

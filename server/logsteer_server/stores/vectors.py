"""The stores of steering vectors, which are parsed and cached, and of sparse autoencoders, of which
only the needed parts are read.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cachetools import LRUCache, cachedmethod

from logsteer.errors import APIError
from logsteer.schemas import Recommendation, SaeCard, VectorAbout, VectorCard, VectorReadout
from logsteer_server.stores.contents import ContentFiles
from logsteer_server.stores.formats.sae_file import SaeFile, open_sae
from logsteer_server.stores.layer_vectors import LayerVectors, parse_safetensors
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.store import SAES, VECTORS, Namespace, Store, StoredContent, stamp

PARSED_BYTES = 64 * 2**20
"""Size of the cache of parsed contents, which are checked once and not at each request."""
ENTRY_BYTES, LAYER_BYTES, READOUT_BYTES = 1024, 192, 320
"""Memory of a cached content beyond its numbers: per content, per layer, and per readout. Measured
with tracemalloc at 590, 150 and 240, and 300 for its entry in the cache."""


@dataclass(frozen=True, slots=True)
class StoredVectors:
    """Vectors, and the name that they were looked up by; None for a lookup by SHA-256.

    `recommendation`: from the vector's training, if any. `weights_digest`: of the model it was
    trained on, if it was trained; of a combination, that of all its parts.
    """

    name: str | None
    sha256: str
    vectors: LayerVectors
    recommendation: Recommendation | None = None
    weights_digest: str | None = None


class ParsedVectors:
    """A cache of parsed vectors by SHA-256; threads and stores may share it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.vectors: LRUCache[str, LayerVectors] = LRUCache(PARSED_BYTES, _measure)


def _measure(vectors: LayerVectors) -> int:
    layer_bytes = 4 * vectors.width + LAYER_BYTES
    return ENTRY_BYTES + layer_bytes * len(vectors.layers) + READOUT_BYTES * len(vectors.readouts)


class SaeStore(Namespace[SaeCard]):
    """Autoencoders by name. Methods block; errors are those of `Store`."""

    def __init__(
        self,
        own: Store[SaeCard],
        shared: Store[SaeCard] | None = None,
        *,
        files: ContentFiles,
        may_share: bool = True,
    ) -> None:
        super().__init__(own, shared, may_share=may_share)
        self._files = files

    @contextmanager
    def open(self, found: StoredContent) -> Iterator[SaeFile]:
        """Open the autoencoder of a content while the block runs."""
        with self._files.open(SAES, found) as path:
            yield open_sae(path)

    def find_feature(self, name: str, feature: int | str, *, reads: bool) -> StoredVectors:
        """Return a feature's vectors from `SaeFile.read_vectors`, named NAME/FEATURE.

        Errors: APIError `unknown_sae`, `invalid_sae`; `invalid_request` for an unknown feature.
        """
        _, found = self.look_up(name)
        with self.open(found) as file:
            number = file.find(feature)
            vectors = file.read_vectors(number, reads=reads)
        return StoredVectors(f"{name}/{number}", vectors.sha256, vectors)


class VectorStore(Namespace[VectorCard]):
    """Vectors by name, with a cache; threads may share it. Methods block; errors are those of
    `Store`.
    """

    def __init__(
        self,
        own: Store[VectorCard],
        shared: Store[VectorCard] | None = None,
        *,
        files: ContentFiles,
        parsed: ParsedVectors,
        saes: SaeStore,
        may_share: bool = True,
    ) -> None:
        super().__init__(own, shared, may_share=may_share)
        self._files = files
        self._saes = saes
        self._parsed = parsed

    def put(
        self,
        name: str,
        vectors: LayerVectors,
        about: VectorAbout,
        request: str = "",
        *,
        overwrite: bool = True,
    ) -> VectorCard:
        """Point a name to vectors; return the name's card, as `Store.put`."""
        store = self.of_writable(name)
        upload = store.receive(name, len(vectors.content))
        try:
            upload.write(vectors.content)
            readouts = {str(n): VectorReadout(**asdict(r)) for n, r in vectors.readouts.items()}
            card = VectorCard(
                name=name,
                sha256=upload.finish(),
                hook=vectors.hook,
                layers=list(vectors.layers),
                width=vectors.width,
                norms={str(layer): norm for layer, norm in vectors.norms().items()},
                readouts=readouts or None,
                bytes=upload.size,
                created=stamp(),
                about=about,
            )
            return store.put(upload, card, request, overwrite=overwrite)
        finally:
            upload.discard()

    def find(self, name: str) -> StoredVectors:
        """Return the vectors of a name."""
        card, found = self.look_up(name)
        about, vectors = card.about, self._load(found)
        return StoredVectors(
            name, found.sha256, vectors, about.recommendation, about.weights_digest
        )

    def find_content(self, sha256: str) -> StoredVectors:
        """Return the vectors with a SHA-256."""
        card, found = self.look_up_content(sha256)
        return StoredVectors(
            None, sha256, self._load(found), weights_digest=card.about.weights_digest
        )

    def find_feature(self, name: str, feature: int | str, *, reads: bool) -> StoredVectors:
        """Return the vectors of a feature: see `SaeStore.find_feature`."""
        return self._saes.find_feature(name, feature, reads=reads)

    @cachedmethod(
        lambda self: self._parsed.vectors,
        key=lambda _, found: found.sha256,
        lock=lambda self: self._parsed.lock,
    )
    def _load(self, found: StoredContent) -> LayerVectors:
        """Return a content's vectors. Errors: APIError `internal` for damaged ones."""
        with self._files.open(VECTORS, found) as path:
            content = path.read_bytes()
        try:
            return parse_safetensors(content)
        except APIError as error:
            raise VECTORS.report_damage(found.describe(VECTORS), found.source) from error


def open_vectors(directory: Path, max_bytes: int = 0) -> VectorStore:
    """Return the vectors and autoencoders of a server's `store_directory`."""
    objects = Objects(directory)
    files = ContentFiles(objects, 0)
    saes = SaeStore(Store(SAES, objects, max_bytes), files=files)
    own = Store(VECTORS, objects, max_bytes)
    return VectorStore(own, files=files, parsed=ParsedVectors(), saes=saes)

"""The stores of steering vectors, which are passed in and out parsed, and of sparse autoencoders,
of which only the requested parts are read.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from cachetools import LRUCache, cachedmethod

from logsteer.schemas import Recommendation, SaeCard, VectorAbout, VectorCard, VectorReadout
from logsteer_server.stores.contents import ContentFiles, DamagedContentError
from logsteer_server.stores.formats.sae_file import SaeFile, open_sae
from logsteer_server.stores.layer_vectors import LayerVectors, parse_content
from logsteer_server.stores.namespace import Namespace
from logsteer_server.stores.store import StoredContent, stamp

PARSED_BYTES = 64 * 2**20
"""Of contents that were read lately; they are checked once, not at each request."""
ENTRY_BYTES, LAYER_BYTES, READOUT_BYTES = 1024, 192, 320
"""What a content takes there beyond its numbers: in all, for each layer, and for each readout.
Measured with tracemalloc at 590, 150 and 240, and 300 for its place."""


@dataclass(frozen=True, slots=True)
class StoredVectors:
    """Vectors, and the name that they were found under: None where found by SHA-256.

    `recommendation` is what the training of that name recommends, where it does; `weights_digest`
    that of the model it was trained on, where it was; of a combination, that of all its parts.
    """

    name: str | None
    sha256: str
    vectors: LayerVectors
    recommendation: Recommendation | None = None
    weights_digest: str | None = None


class ParsedVectors:
    """Contents that were read lately, by SHA-256; threads, and stores, may share it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.vectors: LRUCache[str, LayerVectors] = LRUCache(PARSED_BYTES, _measure)


def _measure(vectors: LayerVectors) -> int:
    further = LAYER_BYTES * len(vectors.layers) + READOUT_BYTES * len(vectors.readouts)
    return vectors.num_bytes + ENTRY_BYTES + further


@dataclass(frozen=True, slots=True)
class SaeStore:
    """Autoencoders by name. Its methods block, and raise what those of `Store` raise."""

    names: Namespace[SaeCard]
    files: ContentFiles

    @contextmanager
    def open(self, found: StoredContent) -> Iterator[SaeFile]:
        """Give the autoencoder of a content, whose file stays for so long."""
        try:
            with self.files.open(found.sha256, found.source) as path:
                yield open_sae(path)
        except (FileNotFoundError, DamagedContentError) as error:
            raise self.names.report_damage(found) from error

    def find_feature(self, name: str, feature: int | str, *, reads: bool) -> StoredVectors:
        """Return a feature's vectors, as `SaeFile.read_vectors` does, named NAME/FEATURE.

        Errors: APIError `unknown_sae`, `invalid_sae`; `invalid_request` for a feature that is not
        there.
        """
        _, found = self.names.look_up(name)
        with self.open(found) as file:
            number = file.find(feature)
            vectors = file.read_vectors(number, reads=reads)
        return StoredVectors(f"{name}/{number}", vectors.sha256, vectors)


class VectorStore:
    """Vectors in a store, those used lately in memory; threads may share it.

    Its methods block, and raise what those of `Store` raise.
    """

    def __init__(
        self,
        files: Namespace[VectorCard],
        parsed: ParsedVectors | None = None,
        features: SaeStore | None = None,
    ) -> None:
        self.files = files
        self._features = features
        self._parsed = parsed or ParsedVectors()

    def put(
        self,
        name: str,
        vectors: LayerVectors,
        about: VectorAbout,
        request: str = "",
        *,
        overwrite: bool = True,
    ) -> VectorCard:
        """Point a name to vectors; return the card that the name has then: see `Store.put`."""
        upload = self.files.receive(name, len(vectors.content))
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
            return self.files.put(upload, card, request, overwrite=overwrite)
        finally:
            upload.discard()

    def find(self, name: str) -> StoredVectors:
        """Return the vectors of a name."""
        card, found = self.files.look_up(name)
        about, vectors = card.about, self._load(found)
        return StoredVectors(
            name, found.sha256, vectors, about.recommendation, about.weights_digest
        )

    def find_content(self, sha256: str) -> StoredVectors:
        """Return the vectors with a SHA-256."""
        card, found = self.files.find_content(sha256)
        return StoredVectors(
            None, sha256, self._load(found), weights_digest=card.about.weights_digest
        )

    def find_feature(self, name: str, feature: int | str, *, reads: bool) -> StoredVectors:
        """Return the vectors of a feature: see `SaeStore.find_feature`."""
        assert self._features is not None, "what resolves requests has autoencoders"
        return self._features.find_feature(name, feature, reads=reads)

    @cachedmethod(
        lambda self: self._parsed.vectors,
        key=lambda _, found: found.sha256,
        lock=lambda self: self._parsed.lock,
    )
    def _load(self, found: StoredContent) -> LayerVectors:
        """Return a content's vectors. Errors: APIError `internal` for damaged ones."""
        try:
            return parse_content(self.files.read(found))
        except ValueError as error:
            raise self.files.report_damage(found) from error

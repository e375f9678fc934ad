"""The store of sparse autoencoders, which are read where they lie: as much as is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from logsteer.schemas import SaeCard
from logsteer_server.stores.contents import ContentFiles, DamagedContentError
from logsteer_server.stores.formats.sae_file import SaeFile, open_sae
from logsteer_server.stores.namespace import Namespace
from logsteer_server.stores.store import StoredContent
from logsteer_server.stores.vectors import StoredVectors


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

"""Stores at a URL of one process, as several machines would open them."""

from pathlib import Path
from typing import Any

from logsteer_server.settings import ModelSettings, Settings, SharedStore
from logsteer_server.stores.bucket_store import BucketStore, SharedFiles
from logsteer_server.stores.store import OVERRIDES, Kind
from tests.server.shared_store.object_store import ObjectStore

MIB = 2**20
URL = "objects://bucket/logsteer"


def shared_at(directory: Path, url: str = URL, **fields: Any) -> SharedStore:
    settings = Settings(
        models=[ModelSettings(id="a", path="p")],
        directory=directory,
        store_directory=Path("own"),
        store_url=url,
        **{"store_timeout_s": 5.0} | fields,
    )
    assert settings.shared_store is not None
    return settings.shared_store


def open_at(shared: SharedStore, kind: Kind[Any] = OVERRIDES, max_bytes: int = MIB) -> Any:
    return BucketStore(kind, SharedFiles.open(shared), kind.plural, max_bytes)


def find_card(name: str) -> str:
    """The file of an override's name, which has one."""
    (found,) = [own for own in ObjectStore.files if f"/overrides/names/{name}/" in own]
    return found


def read_state(store: Any) -> dict[str, bytes]:
    """Each name's content, as the store gives it."""
    return {card.name: store.read(store.find(card.name)) for card in store.list_all().cards}

"""A directory behind a file:// URL, which others change while it is listed."""

import os
from pathlib import Path
from typing import Any

import pytest

from logsteer.errors import OverloadedError
from logsteer_server.stores.bucket import Bucket
from logsteer_server.stores.local_files import list_below, write_file
from tests.server.shared_store.bucket_cases import open_at, shared_at
from tests.server.store_cases import make_content, put_content


@pytest.fixture
def change_while_listed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have something happen, so many times, between what a directory has and what each file is."""

    def arrange(directory: Path, change: Any, times: int) -> None:
        original = os.scandir
        left = times

        class Listing:
            def __init__(self, path: Any) -> None:
                self._entries = original(path)
                self._path = Path(path)

            def __enter__(self) -> Any:
                nonlocal left
                with self._entries:
                    found = list(self._entries)
                if left and self._path == directory:
                    left -= 1
                    change()
                return iter(found)

            def __exit__(self, *_: object) -> None: ...

        monkeypatch.setattr(os, "scandir", Listing)

    return arrange


def test_a_name_that_is_replaced_while_it_is_listed_is_found(
    tmp_path: Path, change_while_listed: Any
) -> None:
    url = f"file://{tmp_path}/r"
    store, other = (open_at(shared_at(tmp_path / name, url)) for name in "ab")
    put_content(store, "a", make_content(1))
    card = []
    names = tmp_path / "r" / "overrides" / "names" / "a"
    change_while_listed(names, lambda: card.append(put_content(other, "a", make_content(2))), 1)
    assert store.find("a").sha256 == card[0].sha256
    assert [own.name for own in store.list_all().cards] == ["a"]


def test_what_goes_alone_is_left_out(tmp_path: Path, change_while_listed: Any) -> None:
    for name in ("a", "b", "c/d", "c/e/f"):
        write_file(tmp_path / name, name.encode())
    (tmp_path / "link").symlink_to(tmp_path / "a")
    change_while_listed(tmp_path, (tmp_path / "a").unlink, 1)
    found = list_below(tmp_path)
    assert {name: about.st_size for name, about in found.items()} == {"b": 1, "c/d": 3, "c/e/f": 5}
    assert list_below(tmp_path / "nothing") == {}


def test_a_directory_that_never_rests_is_given_up(tmp_path: Path, change_while_listed: Any) -> None:
    """Each listing finds a file that is gone when it is asked about."""
    count = 0
    write_file(tmp_path / "r" / "0", b"")

    def replace() -> None:
        nonlocal count
        write_file(tmp_path / "r" / str(count + 1), b"")
        (tmp_path / "r" / str(count)).unlink()
        count += 1

    change_while_listed(tmp_path / "r", replace, -1)
    with pytest.raises(OverloadedError, match="does not answer"):
        Bucket(shared_at(tmp_path / "own", f"file://{tmp_path}/r")).list_files()

"""How processes import: what the garbage collector is kept from."""

import gc
from collections.abc import Iterator

import pytest

from logsteer_server.imports import hold_collector


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The collector as it was before the test."""
    yield
    gc.unfreeze()
    gc.enable()


def test_what_is_imported_is_never_looked_through_again() -> None:
    made = []
    with hold_collector():
        assert not gc.isenabled()
        made.append({"a": [1]})
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert not any(found is made[0] for found in gc.get_objects())


def test_a_failed_import_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), hold_collector():
        import logsteer_server.no_such_module  # noqa: F401
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with hold_collector():
        pass
    assert not gc.isenabled()

"""What is wrong with single items of a request: it refuses all of them, or the one alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from logsteer.errors import APIError, api_error
from logsteer.schemas import LogprobItem
from logsteer.schemas.common import OnError


class ItemProblems:
    """The problems of a request's items, which are the entries of `field`, or with `is_one` it.

    With `fail` the first one is raised. With `report` each is kept, for the item's result.
    """

    def __init__(self, field: str, on_error: OnError = "fail", *, is_one: bool = False) -> None:
        self._field = field
        self._is_one = is_one
        self._fails = on_error == "fail"
        self._found: dict[int, APIError] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._found

    def __bool__(self) -> bool:
        return bool(self._found)

    def name_item(self, index: int) -> str:
        """Return an item's place in the request."""
        return self._field if self._is_one else f"{self._field}[{index}]"

    @contextmanager
    def catch(self, index: int) -> Iterator[None]:
        """Add what the block raises as a problem of an item. Errors: as `add`."""
        try:
            yield
        except APIError as error:
            self.add(index, error)

    def add(self, index: int, error: APIError, part: str | None = None) -> None:
        """Keep the first problem of an item; `part` is what of it is wrong, such as `targets[2]`.

        None: what the error names. Errors: APIError that names the item where it fails the request;
        the error itself where it names a field of the request, such as `bos`.
        """
        part = part or error.param
        if part is not None and part.partition("[")[0] not in LogprobItem.model_fields:
            raise error
        place = self.name_item(index)
        param = f"{place}.{part}" if part else place
        if self._fails:
            raise api_error(error.code, f"{param}: {error.detail}", param=param) from error
        self._found.setdefault(index, api_error(error.code, error.detail, param=param))

    def fill(self, results: list[dict[str, Any]], request_id: str) -> list[dict[str, Any]]:
        """Return the results of all items: of the good ones these, in order, else the problem."""
        if not self._found:
            return results
        good = iter(results)
        count = len(results) + len(self._found)
        found = self._found
        return [
            {"problem": found[n].problem(request_id).model_dump()} if n in found else next(good)
            for n in range(count)
        ]

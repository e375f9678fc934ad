"""The `overrides` of the two clients: directions of the parameters that the server keeps."""

from urllib.parse import quote

from logsteer._call import Call
from logsteer._upload import AsyncSource, Source, Upload
from logsteer._vectors import Ask, AsyncAsk
from logsteer.errors import InvalidRequestError
from logsteer.schemas import DeletedOverride, OverrideCard, OverrideList


class Overrides:
    """What `Client.overrides` can do; every method raises the errors of `logsteer.errors`."""

    def __init__(self, ask: Ask, model: str | None) -> None:
        self._ask = ask
        self._model = model

    def list(self) -> OverrideList:
        """The card of every kept override, by name."""
        return self._ask(list_overrides())

    def get(self, name: str) -> OverrideCard:
        """The card of one override; NotFoundError where none has this name."""
        return self._ask(show_override(name))

    def put(self, name: str, source: Source | bytes, model: str | None = None) -> OverrideCard:
        """The card of the direction in a file, which this name stands for from now on.

        `source` is a path, an open binary file, or the file's bytes: safetensors, a tensor for each
        parameter that moves, under its name in transformers' `state_dict`.
        """
        return self._ask(put_override(name, source, model or self._model))

    def delete(self, name: str) -> DeletedOverride:
        """The name that is gone, and the content that it stood for."""
        return self._ask(delete_override(name))


class AsyncOverrides:
    """What `AsyncClient.overrides` can do: the same as `Overrides`."""

    def __init__(self, ask: AsyncAsk, model: str | None) -> None:
        self._ask = ask
        self._model = model

    async def list(self) -> OverrideList:
        """As `Overrides.list`."""
        return await self._ask(list_overrides())

    async def get(self, name: str) -> OverrideCard:
        """As `Overrides.get`."""
        return await self._ask(show_override(name))

    async def put(
        self, name: str, source: AsyncSource | bytes, model: str | None = None
    ) -> OverrideCard:
        """As `Overrides.put`; an asynchronous iterable is a source, too."""
        return await self._ask(put_override(name, source, model or self._model))

    async def delete(self, name: str) -> DeletedOverride:
        """As `Overrides.delete`."""
        return await self._ask(delete_override(name))


def list_overrides() -> Call[OverrideList]:
    """The call for every kept override."""
    return Call("GET", "/overrides", OverrideList)


def show_override(name: str) -> Call[OverrideCard]:
    """The call for one override's card."""
    return Call("GET", _path(name), OverrideCard)


def put_override(name: str, source: AsyncSource | bytes, model: str | None) -> Call[OverrideCard]:
    """The call that uploads a direction."""
    return Call(
        "PUT",
        _path(name),
        OverrideCard,
        upload=Upload([source] if isinstance(source, bytes) else source),
        upload_type="application/octet-stream",
        params={"model": model} if model else {},
    )


def delete_override(name: str) -> Call[DeletedOverride]:
    """The call that forgets an override; not repeated, because it would not find it again."""
    return Call("DELETE", _path(name), DeletedOverride, retry_safe=False)


def _path(name: str) -> str:
    if not name:
        raise InvalidRequestError("invalid_request", "the override's name is empty", param="name")
    return f"/overrides/{quote(name, safe='')}"

"""The `adapters` of the two clients: LoRA adapters that the server keeps."""

from os import PathLike
from pathlib import Path
from urllib.parse import quote

from logsteer._call import Call
from logsteer._upload import Form, Upload
from logsteer._vectors import Ask, AsyncAsk
from logsteer.errors import InvalidRequestError
from logsteer.schemas import AdapterCard, AdapterList, DeletedAdapter

_FILES = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
"""Part of the form -> the file of PEFT's that goes there."""


class Adapters:
    """What `Client.adapters` can do; every method raises the errors of `logsteer.errors`."""

    def __init__(self, ask: Ask, model: str | None) -> None:
        self._ask = ask
        self._model = model

    def list(self) -> AdapterList:
        """The card of every kept adapter, by name."""
        return self._ask(list_adapters())

    def get(self, name: str) -> AdapterCard:
        """The card of one adapter; NotFoundError where none has this name."""
        return self._ask(show_adapter(name))

    def put(
        self, name: str, directory: str | PathLike[str], model: str | None = None
    ) -> AdapterCard:
        """The card of the adapter in a directory, which this name stands for from now on.

        `directory` is what PEFT's `save_pretrained` writes: adapter_config.json and
        adapter_model.safetensors, which are read while they are sent.
        """
        return self._ask(put_adapter(name, directory, model or self._model))

    def delete(self, name: str) -> DeletedAdapter:
        """The name that is gone, and the content that it stood for."""
        return self._ask(delete_adapter(name))


class AsyncAdapters:
    """What `AsyncClient.adapters` can do: the same as `Adapters`."""

    def __init__(self, ask: AsyncAsk, model: str | None) -> None:
        self._ask = ask
        self._model = model

    async def list(self) -> AdapterList:
        """As `Adapters.list`."""
        return await self._ask(list_adapters())

    async def get(self, name: str) -> AdapterCard:
        """As `Adapters.get`."""
        return await self._ask(show_adapter(name))

    async def put(
        self, name: str, directory: str | PathLike[str], model: str | None = None
    ) -> AdapterCard:
        """As `Adapters.put`."""
        return await self._ask(put_adapter(name, directory, model or self._model))

    async def delete(self, name: str) -> DeletedAdapter:
        """As `Adapters.delete`."""
        return await self._ask(delete_adapter(name))


def list_adapters() -> Call[AdapterList]:
    """The call for every kept adapter."""
    return Call("GET", "/adapters", AdapterList)


def show_adapter(name: str) -> Call[AdapterCard]:
    """The call for one adapter's card."""
    return Call("GET", _path(name), AdapterCard)


def put_adapter(name: str, directory: str | PathLike[str], model: str | None) -> Call[AdapterCard]:
    """The call that uploads an adapter. Errors: OSError for a file that cannot be read."""
    files = {part: Path(directory) / file for part, file in _FILES.items()}
    missing = [path.name for path in files.values() if not path.is_file()]
    if missing:
        detail = (
            f"{Path(directory)} has no {' and no '.join(missing)}: give the directory that PEFT's "
            f"save_pretrained (with safe_serialization) writes, {' and '.join(_FILES.values())}"
        )
        raise InvalidRequestError("invalid_request", detail, param="directory")
    form = Form(files)
    return Call(
        "PUT",
        _path(name),
        AdapterCard,
        upload=Upload(form),
        upload_type=form.content_type,
        params={"model": model} if model else {},
    )


def delete_adapter(name: str) -> Call[DeletedAdapter]:
    """The call that forgets an adapter; not repeated, because it would not find it again."""
    return Call("DELETE", _path(name), DeletedAdapter, retry_safe=False)


def _path(name: str) -> str:
    if not name:
        raise InvalidRequestError("invalid_request", "the adapter's name is empty", param="name")
    return f"/adapters/{quote(name, safe='')}"

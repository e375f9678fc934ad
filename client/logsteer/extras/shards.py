"""Activations of many texts as files in a directory: what `Client.capture` writes.

    index.json                  what was asked for, of which model, and the shards that are whole
    activations-00000.safetensors, …

A shard is the file of one answer of `/activations`. A capture that was interrupted goes on where
its index ends.
"""

import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypeAlias, overload

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from logsteer._calls import build_call
from logsteer._progress import CountingProgress
from logsteer.errors import InvalidRequestError, PayloadTooLargeError
from logsteer.extras.activations import Activations, open_activations
from logsteer.extras.datasets import Source, check_counts, read_prompts

INDEX = "index.json"


class _Shard(TypedDict):
    """One file: its texts, their rows of a layer, and a digest of the texts."""

    file: str
    items: int
    rows: int
    texts_sha256: str


class _Index(TypedDict):
    """What `index.json` says: what was asked for of each text, and which files are whole."""

    version: Literal[1]
    asked: dict[str, Any]
    shards: list[_Shard]
    model: NotRequired[dict[str, str]]
    """The model and the digest of its weights, once it has answered."""


_INDEX = TypeAdapter(_Index)


_Item: TypeAlias = str | dict[str, Any]
"""A text, or a conversation as its item of the request."""


class ActivationShards(Sequence[Activations]):
    """The shards of a directory, each opened when it is needed; `contents` is what its index
    file says.

    Errors: OSError without an index, InvalidRequestError for one of another kind.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        path = self.directory / INDEX
        try:
            self.contents = _INDEX.validate_json(path.read_bytes())
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = ".".join(map(str, fault["loc"]))
            detail = (
                f"{path} is not an index of this version: {where or 'all of it'}: {fault['msg']}"
            )
            raise _refuse(f"{detail}; name another directory") from error
        self._files = [shard["file"] for shard in self.contents["shards"]]

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, place: int) -> Activations: ...
    @overload
    def __getitem__(self, place: slice) -> list[Activations]: ...
    def __getitem__(self, place: int | slice) -> Activations | list[Activations]:
        if isinstance(place, slice):
            return [open_activations(self.directory / name) for name in self._files[place]]
        return open_activations(self.directory / self._files[place])

    @property
    def num_items(self) -> int:
        """Texts of all shards."""
        return sum(shard["items"] for shard in self.contents["shards"])

    @property
    def num_rows(self) -> int:
        """Activations of a layer, of all texts."""
        return sum(shard["rows"] for shard in self.contents["shards"])


def capture_shards(
    options: Mapping[str, Any],
    source: Source,
    directory: str | Path,
    layers: Sequence[int] | None,
    field: str,
    batch_size: int,
    progress: bool,
) -> Generator[dict[str, Any], Activations, ActivationShards]:
    """Yield the arguments of each call of `activations`, be sent its answer, return the shards.

    A call that is answered by PayloadTooLargeError has it thrown in, and is made again with half
    as many texts. The arguments are those of `Client.capture`.
    """
    check_counts(batch_size=batch_size)
    texts: list[_Item] = [
        row.prompt if row.messages is None else {"messages": row.row[field]}
        for row in read_prompts(source, field)
    ]
    values = {**options, "layers": layers}
    writer = _ShardWriter(Path(directory), _describe(values))
    first = writer.count_done(texts)
    with CountingProgress("capturing texts", len(texts), first, progress) as bar:
        while first < len(texts):
            batch = texts[first : first + batch_size]
            try:
                answer = yield {**values, "items": batch}
            except PayloadTooLargeError:
                if len(batch) == 1:
                    raise
                batch_size = len(batch) // 2
                continue
            writer.write(batch, answer)
            first += len(batch)
            bar.advance(len(batch))
    return ActivationShards(directory)


def _describe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is asked for of each text, as the request says it."""
    body = build_call("activations", {**values, "items": ["any"]}, None).body
    described: dict[str, Any] = json.loads(body or b"{}")
    del described["items"]
    return described


class _ShardWriter:
    """Writes shards, and the index once each is whole."""

    def __init__(self, directory: Path, asked: dict[str, Any]) -> None:
        self._directory = directory
        self._index: _Index = {"version": 1, "asked": asked, "shards": []}
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / INDEX).exists():
            found = ActivationShards(directory).contents
            if found["asked"] != asked:
                raise _refuse(
                    f"{directory} has captures of {found['asked']}, and these are {asked}; name "
                    "another directory"
                )
            self._index = found

    def count_done(self, texts: Sequence[_Item]) -> int:
        """Return how many texts are captured already. Errors: where they were others."""
        done = 0
        for shard in self._index["shards"]:
            batch = texts[done : done + shard["items"]]
            done += shard["items"]
            if _digest(batch) != shard["texts_sha256"]:
                raise _refuse(
                    f"{self._directory / shard['file']} is of other texts than the source has "
                    "now; name another directory"
                )
        return done

    def write(self, texts: Sequence[_Item], answer: Activations) -> None:
        """Write the shard of these texts. Errors: where another model answered than before."""
        model = {
            "model": answer.answer.model,
            "weights_digest": answer.answer.provenance.weights_digest,
        }
        if self._index.setdefault("model", model) != model:
            raise _refuse(
                f"{self._directory} has captures of {self._index['model']}, and this answer is of "
                f"{model}; name another directory"
            )
        shards = self._index["shards"]
        name = f"activations-{len(shards):05d}.safetensors"
        self._replace(name, answer.file)
        shards.append({
            "file": name,
            "items": len(texts),
            "rows": int(answer.row_starts[-1]),
            "texts_sha256": _digest(texts),
        })  # fmt: skip
        self._replace(INDEX, json.dumps(self._index, indent=1).encode())

    def _replace(self, name: str, content: Any) -> None:
        """Write a file that is whole as soon as it has its name."""
        new = self._directory / f"{name}.new"
        new.write_bytes(content)
        new.replace(self._directory / name)


def _digest(texts: Sequence[_Item]) -> str:
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()


def _refuse(detail: str) -> InvalidRequestError:
    return InvalidRequestError("invalid_request", detail, param="directory")

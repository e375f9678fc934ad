"""Activations as numpy arrays and files: what `Client.activations` and `Client.capture` give.

A file is safetensors; `ActivationsAnswer` says what is in it. A capture writes a directory:

    index.json                  what was asked for, of which model, and the shards that are whole
    activations-00000.safetensors, …

A shard is the file of one answer of `/activations`. An interrupted capture resumes after its index.

Axis letters: N rows of all items, T rows of one item, D width of an activation.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypeAlias, TypeVar, overload

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from logsteer._calls import read_request
from logsteer._progress import CountingProgress
from logsteer.errors import AnswerError, InvalidRequestError, PayloadTooLargeError
from logsteer.extras.datasets import Source, check_counts, read_prompts
from logsteer.extras.tensors import TensorFile, import_numpy
from logsteer.schemas import ActivationsHeader

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    Floats: TypeAlias = npt.NDArray[np.float32]
    Ids: TypeAlias = npt.NDArray[np.int32]

_FILE_DTYPES = ("F32", "I32")
_FEATURES = ("feature_ids", "feature_activations")
_SIDE = ("row_starts", "token_ids", "token_starts", "positions", *_FEATURES)
"""Tensors that are no activations."""


@dataclass(frozen=True)
class ActivationsOfItem:
    """The activations of one text: by layer, [T, D], of the tokens at `positions` of `token_ids`.

    With an autoencoder there are no layers: `feature_ids` and `feature_activations` [T, K] are the
    strongest features of each token, -1 and 0 where no further one is active.

    A mean has one row and no positions; `sinks` are by layer the tokens that it leaves out.
    `truncated_tokens` were dropped before `token_ids`; `flags` says where a number is not finite.
    """

    layers: "Mapping[int, Floats]"
    token_ids: "Ids"
    positions: "Ids | None"
    truncated_tokens: int
    flags: list[str]
    sinks: dict[int, list[int]]
    feature_ids: "Ids | None" = None
    feature_activations: "Floats | None" = None


S = TypeVar("S")


class OpenedSequence(Sequence[S]):
    """A sequence that makes each entry when it is read; a slice is a list of entries."""

    @overload
    def __getitem__(self, place: int) -> S: ...
    @overload
    def __getitem__(self, place: slice) -> list[S]: ...
    def __getitem__(self, place: int | slice) -> S | list[S]:
        found = range(len(self))[place]  # IndexError, and places from the end
        return self._open(found) if isinstance(found, int) else [*map(self._open, found)]

    @abstractmethod
    def _open(self, index: int) -> S: ...


class Activations(OpenedSequence[ActivationsOfItem]):
    """The activations of some texts, in their order.

    `layers` has, by layer, the rows of all of them, in order: float32 [N, D]; those of
    text i are `row_starts[i]` to `row_starts[i + 1]`. So have `feature_ids` and
    `feature_activations` [N, K], which an autoencoder gives; `answer.sae` has their labels.
    Arrays share the memory of `file`, and are read-only. `answer` is what else the server said:
    usage, provenance, receipts.
    """

    def __init__(self, file: "bytes | np.memmap[Any, Any]") -> None:
        try:
            found = TensorFile(file)
            tensors = {name: found.read(name, _FILE_DTYPES) for name in found.entries}
            document = json.loads(found.metadata["answer"])
            self.answer = ActivationsHeader.model_validate(document)
            self._items: list[dict[str, Any]] = document["results"]
            self.row_starts: Ids = tensors["row_starts"]
            self._token_starts: Ids = tensors["token_starts"]
            self._token_ids: Ids = tensors["token_ids"]
            self._positions: Ids | None = tensors.get("positions")
            self.feature_ids: Ids | None = tensors.get("feature_ids")
            self.feature_activations: Floats | None = tensors.get("feature_activations")
            self.layers: dict[int, Floats] = {
                int(name.rpartition(".")[2]): array
                for name, array in tensors.items()
                if name not in _SIDE
            }
        except (KeyError, ValueError, TypeError, ValidationError) as error:
            raise AnswerError(f"no file of /activations: {error}") from error
        self.file: Any = file

    def __repr__(self) -> str:
        rows = int(self.row_starts[-1])
        return f"<Activations: {len(self)} texts, {rows} rows, layers {sorted(self.layers)}>"

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def _open(self, index: int) -> ActivationsOfItem:
        rows = slice(*self.row_starts[index : index + 2].tolist())
        read = slice(*self._token_starts[index : index + 2].tolist())
        return ActivationsOfItem(
            {layer: array[rows] for layer, array in self.layers.items()},
            self._token_ids[read],
            None if self._positions is None else self._positions[rows],
            self._items[index]["truncated_tokens"],
            self._items[index]["flags"],
            {int(layer): places for layer, places in self._items[index]["sinks"].items()},
            None if self.feature_ids is None else self.feature_ids[rows],
            None if self.feature_activations is None else self.feature_activations[rows],
        )

    def save(self, path: str | Path) -> None:
        """Write the file, which `open_activations` and any reader of safetensors reads."""
        Path(path).write_bytes(memoryview(self.file))

    def to_pandas(self) -> "pd.DataFrame":
        """Return a row per activation: its text, its token, and its norm at each layer.

        Of an autoencoder, a row per feature that is active: its label and its activation. The
        numbers themselves are in `layers`. Errors: ImportError that says what to install.
        """
        from logsteer.extras.rows import to_frame

        return to_frame(self._list_norms() if self.feature_ids is None else self._list_features())

    def _list_features(self) -> list[dict[str, Any]]:
        assert self.answer.sae is not None, "features come with their autoencoder"
        labels, found = self.answer.sae.labels, []
        for item, one in enumerate(self):
            assert one.positions is not None and one.feature_ids is not None
            assert one.feature_activations is not None
            for place, ids, values in zip(
                one.positions.tolist(), one.feature_ids.tolist(),
                one.feature_activations.tolist(), strict=True,
            ):  # fmt: skip
                where = {"item": item, "position": place, "token_id": int(one.token_ids[place])}
                for feature, value in zip(ids, values, strict=True):
                    if feature >= 0:
                        told = {"feature": feature, "label": labels.get(str(feature))}
                        found.append({**where, **told, "activation": value})
        return found

    def _list_norms(self) -> list[dict[str, Any]]:
        np = import_numpy()
        found = []
        for item, one in enumerate(self):
            norms = {
                f"norm@{layer}": np.linalg.norm(rows, axis=1).tolist()
                for layer, rows in one.layers.items()
            }
            # A mean has no position.
            places = [None] if one.positions is None else one.positions.tolist()
            for row, place in enumerate(places):
                token = None if place is None else int(one.token_ids[place])
                sizes = {name: values[row] for name, values in norms.items()}
                found.append({"item": item, "position": place, "token_id": token, **sizes})
        return found


def open_activations(path: str | Path) -> Activations:
    """Open a file of activations; its arrays are read from the disk where they are looked at.

    Errors: AnswerError for another file, OSError, ImportError that says what to install.
    """
    try:
        file = import_numpy().memmap(path, mode="r")
    except ValueError as error:  # it is empty
        raise AnswerError(f"no file of /activations: {error}") from error
    return Activations(file)


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


class ActivationShards(OpenedSequence[Activations]):
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
            raise _refuse_directory(f"{detail}; name another directory") from error
        self._files = [shard["file"] for shard in self.contents["shards"]]

    def __len__(self) -> int:
        return len(self._files)

    def _open(self, index: int) -> Activations:
        return open_activations(self.directory / self._files[index])

    @property
    def num_items(self) -> int:
        """Texts of all shards."""
        return sum(shard["items"] for shard in self.contents["shards"])

    @property
    def num_rows(self) -> int:
        """Activations of a layer, of all texts."""
        return sum(shard["rows"] for shard in self.contents["shards"])


class CaptureRun:
    """The state of one capture: which texts are left, and the shards of the others.

    The arguments are those of `Client.capture`; `bar` shows how far it is. Errors:
    InvalidRequestError for a directory of another capture, OSError.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        source: Source,
        directory: str | Path,
        layers: Sequence[int] | None,
        field: str,
        batch_size: int,
        progress: bool,
    ) -> None:
        check_counts(batch_size=batch_size)
        self._texts: list[_Item] = [
            row.prompt if row.messages is None else {"messages": row.row[field]}
            for row in read_prompts(source, field)
        ]
        self._values = {**options, "layers": layers}
        self._batch_size = batch_size
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        message = read_request("activations", {**self._values, "items": ["a"]})
        asked = message.model_dump(mode="json", exclude_unset=True, exclude={"items"})
        self._index: _Index = {"version": 1, "asked": asked, "shards": []}
        if (self._directory / INDEX).exists():
            self._index = self.shards.contents
        if self._index["asked"] != asked:
            raise _refuse_directory(
                f"{directory} has captures of {self._index['asked']}, and these are {asked}; name "
                "another directory"
            )
        self._done = 0
        for shard in self._index["shards"]:
            if _digest(self._cut(shard["items"])) != shard["texts_sha256"]:
                raise _refuse_directory(
                    f"{self._directory / shard['file']} is of other texts than the source has "
                    "now; name another directory"
                )
            self._done += shard["items"]
        self.bar = CountingProgress("capturing texts", len(self._texts), self._done, progress)

    @property
    def shards(self) -> ActivationShards:
        """The shards that are whole."""
        return ActivationShards(self._directory)

    def next_call(self) -> dict[str, Any] | None:
        """Return the arguments of the next call of `activations`; None at the end."""
        batch = self._cut(self._batch_size)
        return {**self._values, "items": batch} if batch else None

    def halve(self, error: PayloadTooLargeError) -> None:
        """Make calls of half as many texts; raise the error where there was one text."""
        count = len(self._cut(self._batch_size))
        if count == 1:
            raise error
        self._batch_size = count // 2

    def keep(self, answer: Activations) -> None:
        """Write the answer as the next shard. Errors: where another model answered than before."""
        model = {
            "model": answer.answer.model,
            "weights_digest": answer.answer.provenance.weights_digest,
        }
        if self._index.setdefault("model", model) != model:
            raise _refuse_directory(
                f"{self._directory} has captures of {self._index['model']}, and this answer is of "
                f"{model}; name another directory"
            )
        texts, shards = self._cut(self._batch_size), self._index["shards"]
        name = f"activations-{len(shards):05d}.safetensors"
        self._replace(name, answer.file)
        shards.append({
            "file": name,
            "items": len(texts),
            "rows": int(answer.row_starts[-1]),
            "texts_sha256": _digest(texts),
        })  # fmt: skip
        self._replace(INDEX, json.dumps(self._index, indent=1).encode())
        self._done += len(texts)
        self.bar.count(len(texts))

    def _cut(self, count: int) -> list[_Item]:
        return self._texts[self._done : self._done + count]

    def _replace(self, name: str, content: Any) -> None:
        """Write a file that is whole as soon as it has its name."""
        new = self._directory / f"{name}.new"
        new.write_bytes(content)
        new.replace(self._directory / name)


def _digest(texts: Sequence[_Item]) -> str:
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()


def _refuse_directory(detail: str) -> InvalidRequestError:
    return InvalidRequestError("invalid_request", detail, param="directory")

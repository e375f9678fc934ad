"""Activations as numpy arrays and files: what `Client.activations` and `Client.capture` give.

A file is safetensors; `ActivationsAnswer` says what is in it, and `CaptureShard` what is in the
shards of a data set, which a directory has beside its index:

    index.json                  a `CaptureIndex`
    shard-00000.safetensors, …

Axis letters: N rows of all items, T rows of one item, D width of an activation.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import httpx
from pydantic import ValidationError

from logsteer._calls import build_call
from logsteer._exchange import ClientSettings, Exchange
from logsteer.errors import AnswerError, InvalidRequestError
from logsteer.extras import import_package
from logsteer.extras.datasets import check_counts
from logsteer.extras.tensors import read_tensors
from logsteer.schemas import ActivationsHeader, CaptureIndex
from logsteer.schemas.captures import name_shard

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    Floats: TypeAlias = npt.NDArray[np.float32]
    Ids: TypeAlias = npt.NDArray[np.int32]

_OF_ROWS = ("positions", "feature_ids", "feature_activations")


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


class Activations(list[ActivationsOfItem]):
    """The activations of some texts, in their order.

    `layers` has, by layer, the rows of all of them, in order: float32 [N, D]; those of
    text i are `row_starts[i]` to `row_starts[i + 1]`. So have `feature_ids` and
    `feature_activations` [N, K], which an autoencoder gives; `answer.sae` has their labels.
    `answer` is what else the server said: usage, provenance, receipts.
    """

    def __init__(self, file: bytes) -> None:
        super().__init__()
        self.file = file
        try:
            tensors, metadata = read_tensors(file)
            document = json.loads(metadata["answer"])
            self.answer = ActivationsHeader.model_validate(document)
            self.row_starts: Ids = tensors["row_starts"]
            self.feature_ids: Ids | None = tensors.get("feature_ids")
            self.feature_activations: Floats | None = tensors.get("feature_activations")
            layers = {int(n.rpartition(".")[2]): tensors[n] for n in tensors if "." in n}
            self.layers: dict[int, Floats] = dict(sorted(layers.items()))
            for item, (first, end) in zip(
                document["results"], pairwise(tensors["token_starts"].tolist()), strict=True
            ):
                rows = slice(*self.row_starts[len(self) : len(self) + 2].tolist())
                own = {n: a[rows] for n, a in tensors.items() if n in _OF_ROWS}
                self.append(
                    ActivationsOfItem(
                        {layer: array[rows] for layer, array in self.layers.items()},
                        tensors["token_ids"][first:end],
                        own.get("positions"),
                        item["truncated_tokens"],
                        item["flags"],
                        {int(layer): places for layer, places in item["sinks"].items()},
                        own.get("feature_ids"),
                        own.get("feature_activations"),
                    )
                )
        except (KeyError, ValueError, TypeError, ValidationError) as error:
            raise AnswerError(f"no file of /activations: {error}") from error

    def __repr__(self) -> str:
        rows = int(self.row_starts[-1])
        return f"<Activations: {len(self)} texts, {rows} rows, layers {sorted(self.layers)}>"

    def save(self, path: str | Path) -> None:
        """Write the file, which `open_activations` and any reader of safetensors reads."""
        Path(path).write_bytes(self.file)

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
        import numpy as np

        found = []
        for item, one in enumerate(self):
            # A mean has no position.
            places = [None] if one.positions is None else one.positions.tolist()
            for row, place in enumerate(places):
                token = None if place is None else int(one.token_ids[place])
                sizes = {f"norm@{n}": float(np.linalg.norm(x[row])) for n, x in one.layers.items()}
                found.append({"item": item, "position": place, "token_id": token, **sizes})
        return found


def open_activations(path: str | Path) -> Activations:
    """Read a file of activations.

    Errors: AnswerError for another file, OSError, ImportError that says what to install.
    """
    return Activations(Path(path).read_bytes())


INDEX = "index.json"


@dataclass(frozen=True)
class ActivationShard:
    """Activations of consecutive documents: by layer [N, D], and which token each row belongs to.

    `documents`, `positions` and `token_ids` [N]; of a mean, the last two are -1.
    """

    layers: "Mapping[int, Floats]"
    documents: "Ids"
    positions: "Ids"
    token_ids: "Ids"


class ActivationShards:
    """The shards of a data set of activations, each read when it is needed.

    `contents` says what they hold, and `read` returns the file of a number. Errors of reading:
    AnswerError for another file; OSError.
    """

    def __init__(self, index: CaptureIndex, read: Callable[[int], bytes]) -> None:
        self.contents = index
        self._read = read
        self._numbers = [number for number, shard in enumerate(index.shards) if shard.bytes]

    @classmethod
    def of_directory(cls, directory: str | PathLike[str]) -> Self:
        """Return those of a directory that `Client.capture` has filled.

        Errors: OSError without an index, InvalidRequestError for one of another kind.
        """
        path = Path(directory) / INDEX
        try:
            index = CaptureIndex.model_validate_json(path.read_bytes())
        except ValidationError as error:
            detail = f"{path} is not an index of a capture: {error}"
            raise InvalidRequestError("invalid_request", detail, param="directory") from error
        return cls(index, lambda number: (path.parent / name_shard(number)).read_bytes())

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> ActivationShard:
        try:
            arrays, _ = read_tensors(self._read(self._numbers[index]))
            layers = {
                layer: arrays[f"{self.contents.hook}.{layer}"] for layer in self.contents.layers
            }
            return ActivationShard(
                layers, arrays["document"], arrays["position"], arrays["token_ids"]
            )
        except (ValueError, KeyError) as error:
            raise AnswerError(f"no shard of activations: {error}") from error


def list_missing(directory: str | PathLike[str], index: CaptureIndex) -> list[int]:
    """Return the numbers of a data set's shards that a directory, made if need be, has not whole.

    Errors: InvalidRequestError for the directory of another data set.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    if Path(directory, INDEX).exists():
        of = ActivationShards.of_directory(directory).contents
        if (of.name, of.digest, of.created) != (index.name, index.digest, index.created):
            detail = f"{directory} has {of.name!r} of {of.created}; name another directory"
            raise InvalidRequestError("invalid_request", detail, param="directory")
    sizes = {path.name: path.stat().st_size for path in Path(directory).iterdir()}
    return [
        number
        for number, shard in enumerate(index.shards)
        if shard.bytes and sizes.get(name_shard(number)) != shard.bytes
    ]


def write_part(directory: str | PathLike[str], name: str, content: bytes) -> None:
    """Write a file of a directory of shards."""
    Path(directory, name).write_bytes(content)


def read_remotely(settings: ClientSettings, name: str) -> Callable[[int], bytes]:
    """Return what downloads a shard of a capture. It blocks, and needs no client: a worker of a
    DataLoader may call it, too. Errors: APIError, httpx.HTTPError.
    """

    def read(number: int) -> bytes:
        call = build_call("captures.shard", {"name": name, "number": str(number)}, None)
        exchange = Exchange(call, settings)
        transport = httpx.HTTPTransport(**settings.transport) if settings.transport else None
        with httpx.Client(transport=transport, **settings.http) as http:
            response = http.get(call.path, headers=exchange.write_headers())
        exchange.check(response)
        return response.content

    return read


def load_activations(
    shards: ActivationShards,
    batch_size: int,
    shuffle_buffer: int = 0,
    layer: int | None = None,
    seed: int = 0,
    repeat: bool = False,
) -> Any:
    """Return a torch `IterableDataset` of float32 tensors [batch, D], as trainers of SAEs take.

    Shards come in random order. Rows are mixed in a buffer of `shuffle_buffer`: once it is full,
    half of it is given in random order. 0: all rows in order. `repeat`: again without end, in
    another order each time. A worker of a DataLoader reads its own shards. Errors: ImportError that
    says what to install; InvalidRequestError where `layer` is not among several.
    """
    check_counts(batch_size=batch_size)
    missing = ImportError("a loader gives tensors of torch: pip install torch")
    torch = import_package("torch", missing)
    import_package("torch.utils.data", missing)
    import numpy as np

    layers = shards.contents.layers
    own = layers[0] if layer is None else layer
    if own not in layers or (layer is None and len(layers) > 1):
        detail = f"layer is {layer}; choose one of {layers}"
        raise InvalidRequestError("invalid_request", detail, param="layer")

    def mix(numbers: Sequence[int], random: Any) -> Iterator[Any]:
        """Yield rows in pieces, mixed."""
        pool, half = np.zeros((0, shards.contents.width), "f4"), max(1, shuffle_buffer // 2)
        for number in random.permutation(numbers) if shuffle_buffer else numbers:
            rows = shards[int(number)].layers[own]
            for start in range(0, len(rows), half) if shuffle_buffer else ():
                pool = np.concatenate([pool, rows[start : start + half]])
                if len(pool) >= shuffle_buffer:
                    random.shuffle(pool)
                    yield pool[:half]
                    pool = pool[half:]
            if not shuffle_buffer:
                yield rows
        random.shuffle(pool)
        yield pool

    class ActivationDataset(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
        """Batches of activations."""

        def __iter__(self) -> Iterator[Any]:
            worker = torch.utils.data.get_worker_info()
            first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
            numbers = range(len(shards))[first::step]
            random = np.random.default_rng([seed, first])
            rest: list[Any] = []
            for _ in count() if repeat and numbers else range(1):
                for piece in mix(numbers, random):
                    rows = np.concatenate([*rest, piece]) if rest else piece
                    whole = len(rows) // batch_size * batch_size
                    for start in range(0, whole, batch_size):
                        yield torch.from_numpy(rows[start : start + batch_size].astype("f4"))
                    rest = [rows[whole:]] if whole < len(rows) else []
            for rows in rest:
                yield torch.from_numpy(rows.astype("f4"))

    return ActivationDataset()

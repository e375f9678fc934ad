"""The answer of `/activations` as numpy arrays: what `Client.activations` gives, and files of it.

The file is safetensors; `ActivationsAnswer` says what is in it. Axis letters: N rows of all items,
T rows of one item, D width of an activation.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from pydantic import ValidationError

from logsteer.errors import AnswerError
from logsteer.extras.tensors import TensorFile, import_numpy
from logsteer.schemas import ActivationsHeader

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    Floats: TypeAlias = npt.NDArray[np.float32]
    Ids: TypeAlias = npt.NDArray[np.int32]

_DTYPES = ("F32", "I32")
_FEATURES = ("feature_ids", "feature_activations")
_SIDE = ("row_starts", "token_ids", "token_starts", "positions", *_FEATURES)
"""Tensors that are no activations."""


@dataclass(frozen=True)
class ActivationsOfItem:
    """The activations of one text: by layer, [T, D], of the tokens at `positions` of `token_ids`.

    With an autoencoder there are no layers: `feature_ids` and `feature_activations` [T, K] are the
    strongest features of each token, -1 and 0 where no further one is active.

    A mean has one row and no positions. `truncated_tokens` were dropped before `token_ids`;
    `flags` says where a number is not finite.
    """

    layers: "Mapping[int, Floats]"
    token_ids: "Ids"
    positions: "Ids | None"
    truncated_tokens: int
    flags: list[str]
    feature_ids: "Ids | None" = None
    feature_activations: "Floats | None" = None


class Activations(Sequence[ActivationsOfItem]):
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
            tensors = {name: found.read(name, _DTYPES) for name in found.entries}
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

    @overload
    def __getitem__(self, place: int) -> ActivationsOfItem: ...
    @overload
    def __getitem__(self, place: slice) -> list[ActivationsOfItem]: ...
    def __getitem__(self, place: int | slice) -> ActivationsOfItem | list[ActivationsOfItem]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        index = range(len(self))[place]  # IndexError, and places from the end
        rows = slice(*self.row_starts[index : index + 2].tolist())
        read = slice(*self._token_starts[index : index + 2].tolist())
        return ActivationsOfItem(
            {layer: array[rows] for layer, array in self.layers.items()},
            self._token_ids[read],
            None if self._positions is None else self._positions[rows],
            self._items[index]["truncated_tokens"],
            self._items[index]["flags"],
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
        norms = {
            f"norm@{layer}": np.linalg.norm(rows, axis=1) for layer, rows in self.layers.items()
        }
        found = []
        for item, one in enumerate(self):
            first = int(self.row_starts[item])
            for row in range(int(self.row_starts[item + 1]) - first):
                place = None if one.positions is None else int(one.positions[row])
                token = None if place is None else int(one.token_ids[place])
                sizes = {name: float(values[first + row]) for name, values in norms.items()}
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

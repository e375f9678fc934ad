"""Statistics of activations, as they come: moments and norms in float64, and highest readings.

Axis letters: N rows, D width of an activation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load

from logsteer.errors import api_error
from logsteer.schemas.captures import (
    CaptureExample,
    CaptureIndex,
    CaptureNorms,
    CaptureReduce,
    CaptureRequest,
    CaptureSums,
    CaptureTop,
)
from logsteer.schemas.common import ByLayer
from logsteer_server.interventions.probes import ResolvedProbe
from logsteer_server.numerics.sae import Floats
from logsteer_server.numerics.sinks import find_sinks
from logsteer_server.stores.captures import CaptureStore, name_sums

Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]

ROWS_AT_ONCE = 4096
"""Rows that are in float64 at once."""


class Reduction:
    """The requested sums over all rows added.

    `sums` has by layer `sum.LAYER` [D], the sum of x; `outer.LAYER` [D, D], of xx'; `norms.LAYER`,
    of |x| and |x|^2; and `ends.LAYER`, the largest -|x| and |x|. Rows with a number that is not
    finite are left out. BOS, and tokens that
    are attention sinks at a layer, are in none of them: one of their rows outweighs a document.
    """

    def __init__(
        self,
        asked: CaptureReduce,
        probes: Sequence[ResolvedProbe],
        bos_id: int | None = None,
        sums: Mapping[str, Doubles] | None = None,
        before: CaptureSums | None = None,
    ) -> None:
        self._asked = asked
        self._probes = probes
        self._bos_id = bos_id
        self.sums = dict(sums or {})
        self._rows, self._non_finite = (before.rows, before.non_finite) if before else (0, 0)
        self._sinks = before.sinks if before else 0
        known = before.top if before else None
        self._top = [one.examples for one in known] if known else [[] for _ in probes]

    def add(
        self, layers: Mapping[int, Floats], rows_N3: Places, write: Callable[[int], str]
    ) -> None:
        """Add rows of whole documents: by layer [N, D]; document, position and token id of each.

        `write` returns the text that shows a row.
        """
        is_finite_N = np.logical_and.reduce([np.isfinite(x).all(1) for x in layers.values()])
        finite_N = np.flatnonzero(is_finite_N)
        kept_N = finite_N[~self._find_sinks(layers, rows_N3, finite_N)]
        self._rows += len(kept_N)
        self._non_finite += len(is_finite_N) - len(finite_N)
        self._sinks += len(finite_N) - len(kept_N)
        for start in range(0, len(kept_N), ROWS_AT_ONCE):
            own_N = kept_N[start : start + ROWS_AT_ONCE]
            for layer, x_ND in layers.items():
                self._sum(layer, x_ND[own_N].astype(np.float64))
        for found, one in zip(self._top, self._probes, strict=True):
            x_ND = layers[one.probe.layer][kept_N]
            norms_N = np.linalg.norm(x_ND, axis=1)
            readings_N = one.convert(x_ND @ one.probe.direction, norms_N)
            best_N = np.argsort(-readings_N)[: self._asked.k]  # NaN, a cosine of nothing, is last
            for n in best_N[np.isfinite(readings_N[best_N])]:
                row = int(kept_N[n])
                document, position, token_id = rows_N3[row].tolist()
                found.append(
                    CaptureExample(
                        reading=float(readings_N[n]),
                        document=document,
                        position=position,
                        token_id=token_id,
                        text=write(row),
                    )
                )
            found.sort(key=lambda example: -(example.reading or 0.0))
            del found[self._asked.k :]

    def _find_sinks(
        self, layers: Mapping[int, Floats], rows_N3: Places, chosen_N: Indices
    ) -> npt.NDArray[np.bool_]:
        """Return which of the chosen rows are BOS, or sinks of their document at a layer."""
        if not len(chosen_N):
            return np.zeros(0, bool)
        documents_N, positions_N, ids_N = rows_N3[chosen_N].T
        is_sink_N: npt.NDArray[np.bool_] = (positions_N == 0) & (
            ids_N == (-1 if self._bos_id is None else self._bos_id)
        )
        starts = np.flatnonzero(np.diff(documents_N)) + 1
        for x_ND in layers.values():
            norms = np.split(np.linalg.norm(x_ND[chosen_N], axis=1), starts)
            is_sink_N |= np.concatenate([find_sinks(norms_T) for norms_T in norms])
        return is_sink_N

    def _sum(self, layer: int, x_ND: Doubles) -> None:
        asked = self._asked
        if asked.mean or asked.covariance:
            self._count(f"sum.{layer}", x_ND.sum(0))
        if asked.covariance:
            self._count(f"outer.{layer}", x_ND.T @ x_ND)
        if asked.norms:
            norms_N = np.linalg.norm(x_ND, axis=1)
            self._count(f"norms.{layer}", np.array([norms_N.sum(), (norms_N**2).sum()]))
            self._count(f"ends.{layer}", np.array([-norms_N.min(), norms_N.max()]), np.maximum)

    def _count(self, name: str, more: Doubles, join: Callable[..., Any] = np.add) -> None:
        self.sums[name] = join(self.sums[name], more) if name in self.sums else more

    def describe(self) -> CaptureSums:
        """Return what a card says of it."""
        norms = {
            layer: self._describe_norms(layer)
            for kind, _, layer in (name.partition(".") for name in self.sums)
            if kind == "norms"
        }
        top = [
            CaptureTop(**one.describe(), examples=found)
            for found, one in zip(self._top, self._probes, strict=True)
        ]
        return CaptureSums(
            rows=self._rows,
            non_finite=self._non_finite,
            sinks=self._sinks,
            norms=ByLayer[CaptureNorms](norms) or None,
            top=top or None,
        )

    def _describe_norms(self, layer: str) -> CaptureNorms:
        total, squares = self.sums[f"norms.{layer}"].tolist()
        smallest, largest = (self.sums[f"ends.{layer}"] * [-1, 1]).tolist()
        mean = total / self._rows
        std = math.sqrt(max(0.0, squares / self._rows - mean**2))
        return CaptureNorms(mean=mean, std=std, smallest=smallest, largest=largest)


def load_moments(store: CaptureStore, index: CaptureIndex) -> dict[str, Doubles]:
    """Return a capture's `mean.LAYER` [D] and `covariance.LAYER` [D, D], as asked for; it blocks.

    Errors: APIError `not_found` where `reduce` asked for none, or there are no rows yet.
    """
    asked = CaptureRequest.model_validate(index.request).reduce
    if asked is None or index.reduced is None or not index.reduced.rows:
        detail = f"Capture {index.name!r} has no statistics yet, or was asked for none (reduce)."
        raise api_error("not_found", detail)
    place = store.locate(index.name, name_sums(len(index.shards) - 1))
    moments = {n: x / index.reduced.rows for n, x in load(store.objects.read(place)).items()}
    found: dict[str, Doubles] = {}
    for layer in index.layers:
        mean_D, outer_DD = moments.get(f"sum.{layer}"), moments.get(f"outer.{layer}")
        if asked.mean and mean_D is not None:
            found[f"mean.{layer}"] = mean_D
        if mean_D is not None and outer_DD is not None:
            found[f"covariance.{layer}"] = outer_DD - np.outer(mean_D, mean_D)
    return found

"""Captures: which activations a request asks for beside its answer, and what the answer shows."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import ActivationFields, StoredActivations
from logsteer.schemas.captures import CaptureIndex
from logsteer_server.contract.batches import OutputPart
from logsteer_server.contract.captures import Capture, CapturedActivations
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import GenerateOutput, Job
from logsteer_server.contract.plan import Positions
from logsteer_server.interventions.steering import FindIds, place_positions
from logsteer_server.stores.captures import (
    SOURCE,
    CapturedDocument,
    CaptureStore,
    add_shard,
    begin_index,
    count_shard_rows,
    lay_out,
    refuse_name,
)
from logsteer_server.stores.store import digest_request
from logsteer_server.text.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class CaptureTarget:
    """The data set that what a request captures is written to."""

    store: CaptureStore
    name: str
    request: dict[str, Any]
    """What is captured; as of a job without statistics, `reduce` is null."""
    digest: str
    overwrite: bool

    def check(self) -> None:
        """Make sure that the name may be written to. Errors: APIError `exists`."""
        there = self.store.find(self.name)
        if there is None or there.digest == self.digest:
            return
        if there.state == "running" or not self.overwrite:
            raise refuse_name(there, "capture.to")

    def write(self, index: CaptureIndex, files: dict[str, bytes]) -> None:
        """Write a data set in place of what has its name. Errors: as `check`; `Objects`."""
        with self.store.writing:
            self.check()
            self.store.remove(self.name, lambda file: not file.startswith(SOURCE))
            self.store.write_files(self.name, files)
            self.store.write_index(index)


@dataclass(frozen=True, slots=True)
class ResolvedCapture:
    """What is captured of each job, how wide it is, and the dtype that an answer shows.

    With a `target` it is written there, and the answer shows none.
    """

    capture: Capture
    width: int
    dtype: str
    target: CaptureTarget | None = None


def find_layers(
    hook: str, given: Sequence[int] | None, info: EngineInfo, field: str = ""
) -> tuple[int, ...]:
    """Return layers in order, all where none are given. Errors: APIError where the model lacks hook
    or layer; it names what of `field` is wrong.
    """
    if hook not in info.hooks:
        detail = f"There are no activations of {hook} here: {info.explain_hook(hook)}."
        raise api_error("unsupported_by_engine", detail, param=f"{field}hook")
    layers = tuple(sorted(given)) if given else tuple(range(info.num_layers))
    if layers[-1] >= info.num_layers:
        detail = f"layers has {layers[-1]}; this model's layers are 0 to {info.num_layers - 1}."
        raise api_error("invalid_request", detail, param=f"{field}layers")
    return layers


def resolve_capture(
    request: ActivationFields, info: EngineInfo, codec: TextCodec, store: CaptureStore | None
) -> ResolvedCapture | None:
    """Return what a request captures of a model; it blocks. Errors: as `find_layers`; `forbidden`
    without a store that its caller may write to, and those of `CaptureTarget.check`.

    A mean over all tokens leaves BOS out, as `/activations` does.
    """
    asked, target = request.capture, None
    if asked is None:
        return None
    if asked.to is not None:
        if store is None:
            detail = "capture.to needs a key with the scope write, which this one lacks."
            raise api_error("forbidden", detail, param="capture.to")
        body = request.model_dump(mode="json", exclude={"capture": {"overwrite"}})
        digest = digest_request("capture", weights_digest=info.weights_digest, **body)
        name = asked.to.removeprefix("store://")
        told = {**body["capture"], "reduce": None}
        target = CaptureTarget(store, name, told, digest, asked.overwrite)
        target.check()
    layers = find_layers(asked.hook, asked.layers, info, "capture.")
    positions = place_positions(asked.positions, codec.decode)
    if asked.read == "mean" and positions.kind == "all" and codec.bos_id is not None:
        bos = Positions("slices", find=FindIds((codec.bos_id,)))
        positions = Positions(without=(bos,))
    capture = Capture(layers, asked.hook, asked.read, positions, asked.point == "before")
    width = info.hook_widths.get(asked.hook, info.hidden_size)
    return ResolvedCapture(capture, width, asked.dtype, target)


def show_activations(
    resolved: ResolvedCapture | None, found: CapturedActivations | None
) -> dict[str, Any]:
    """Return what an answer shows of a job's activations, as `TokenActivations`, under its name."""
    if resolved is None or found is None or resolved.target is not None:
        return {}
    layers = map(str, resolved.capture.layers)
    shown = {
        "positions": found.places.astype(np.int32),
        "layers": dict(zip(layers, found.activations_LTD.astype(resolved.dtype), strict=True)),
        "sinks": {str(layer): places for layer, places in found.sinks.items()},
    }
    return {"activations": shown}


class CapturedJobs:
    """What is captured of a request's jobs, for its target."""

    def __init__(self, resolved: ResolvedCapture) -> None:
        self._resolved = resolved
        self._batches: list[Sequence[Job]] = []
        self._tokens: dict[tuple[int, int], list[Any]] = {}
        self._found: dict[tuple[int, int], list[CapturedActivations]] = {}

    def add(self, jobs: Sequence[Job], part: OutputPart) -> None:
        """Add outputs of jobs of a batch, or pieces of them."""
        if not self._batches or self._batches[-1] is not jobs:
            self._batches.append(jobs)
        for index, output in zip(part.indices, part.outputs, strict=True):
            job, key = jobs[index], (len(self._batches), index)
            if job.capture is not None:
                tokens = self._tokens.setdefault(key, [job.tokens])
                if isinstance(output, GenerateOutput):
                    tokens.append(output.token_ids)
                if output.activations is not None:
                    self._found.setdefault(key, []).append(output.activations)

    def write(
        self, order: Sequence[int] | None, model: str, weights_digest: str, seconds: float
    ) -> dict[str, Any]:
        """Write all to the target; return the fields of `StoredActivations`. It blocks.

        `order`: the job of each document; None: each job is one. Errors: as `CaptureTarget.write`.
        """
        resolved = self._resolved
        target = resolved.target
        assert target is not None
        keys = sorted(self._tokens)
        keys = keys if order is None else [keys[job] for job in order]
        index = begin_index(
            resolved.capture,
            name=target.name,
            model=model,
            weights_digest=weights_digest,
            dtype=resolved.dtype,
            width=resolved.width,
            documents_total=len(keys),
            server=socket.gethostname(),
            request=target.request,
            source=target.digest,
            digest=target.digest,
        )
        most_rows, rows = count_shard_rows(index), 0
        files: dict[str, bytes] = {}
        own: list[CapturedDocument] = []
        for number, key in enumerate(keys):
            found = CapturedActivations.join(self._found[key])
            own.append(CapturedDocument(number, np.concatenate(self._tokens[key]), found))
            rows += own[-1].num_rows
            if rows >= most_rows or number + 1 == len(keys):
                index, more = add_shard(index, own, lay_out(index, own))
                files |= more
                own, rows = [], 0
        # Of a continuation, the last token is not read.
        tokens = sum(sum(map(len, ids)) - (len(ids) > 1) for ids in self._tokens.values())
        index = index.model_copy(update={"state": "done", "seconds": seconds, "tokens": tokens})
        target.write(index, files)
        return index.model_dump(include=set(StoredActivations.model_fields))

"""Captures: which activations a request asks for beside its answer, and what the answer shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import CaptureOptions
from logsteer_server.contract.captures import Capture, CapturedActivations
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.plan import Positions
from logsteer_server.interventions.steering import FindIds, place_positions
from logsteer_server.text.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class ResolvedCapture:
    """What is captured of each job, how wide it is, and the dtype that an answer shows."""

    capture: Capture
    width: int
    dtype: str


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
    asked: CaptureOptions | None, info: EngineInfo, codec: TextCodec
) -> ResolvedCapture | None:
    """Return what a request captures of a model. Errors: as `find_layers`.

    A mean over all tokens leaves BOS out, as `/activations` does.
    """
    if asked is None:
        return None
    layers = find_layers(asked.hook, asked.layers, info, "capture.")
    positions = place_positions(asked.positions, codec.decode)
    if asked.read == "mean" and positions.kind == "all" and codec.bos_id is not None:
        bos = Positions("slices", find=FindIds((codec.bos_id,)))
        positions = Positions(without=(bos,))
    capture = Capture(layers, asked.hook, asked.read, positions, asked.point == "before")
    return ResolvedCapture(capture, info.hook_widths.get(asked.hook, info.hidden_size), asked.dtype)


def show_activations(resolved: ResolvedCapture, found: CapturedActivations) -> dict[str, Any]:
    """Return what an answer shows of a job's activations, as `TokenActivations`, under its name."""
    layers = map(str, resolved.capture.layers)
    shown = {
        "positions": found.places.astype(np.int32),
        "layers": dict(zip(layers, found.activations_LTD.astype(resolved.dtype), strict=True)),
        "sinks": {str(layer): places for layer, places in found.sinks.items()},
    }
    return {"activations": shown}

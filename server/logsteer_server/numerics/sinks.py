"""Attention sinks: tokens whose activations have far larger norms than all others of a sequence.

They are the first token or two, to which heads attend that have nothing to attend to (Xiao et al.
2023, arXiv 2309.17453; Sun et al. 2024, arXiv 2402.17762). In SmolLM2-135M the first token's stream
has norm 22,650 at layers 12 to 27, all others 200 to 300: a mean over tokens is that one token.
Divided by the median of their sequence, norms of sinks are 4 to 180 in SmolLM2-135M and in Gemma 3
270M, those of other tokens hardly ever above 2.8.

Axis letters: T tokens, L layers, D width of an activation.
"""

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.captures import Capture, CapturedActivations, Places

Floats = npt.NDArray[np.float32]

SINK_FACTOR = 3.0
"""A sink's norm exceeds this multiple of the median norm of its sequence at a layer."""


def find_sinks(norms_T: npt.NDArray[np.floating]) -> npt.NDArray[np.bool_]:
    """Return which of a sequence's activations are sinks, from their norms."""
    found: npt.NDArray[np.bool_] = norms_T > SINK_FACTOR * np.median(norms_T)
    return found


def average_changes(tokens: int, total: float, first: float) -> float:
    """Return the mean of |change| / |activation| over a sequence's changed tokens.

    `total`: the sum of these ratios; `first`: that of the sequence's first token. The first token,
    a sink in most models, is left out unless it alone was changed.
    """
    others = tokens - (first != 0)
    return (total - first) / others if others else first


def finish_capture(
    capture: Capture, places: Places, activations_LTD: Floats
) -> CapturedActivations:
    """Return a capture's result from the activations of the tokens at these positions.

    A mean is summed in float64 and leaves out sinks; without tokens there is no mean.
    """
    if capture.read != "mean" or not len(places):
        return CapturedActivations(activations_LTD, places)
    means, sinks = [], {}
    for layer, activations_TD in zip(capture.layers, activations_LTD, strict=True):
        sinks_T = find_sinks(np.linalg.norm(activations_TD, axis=-1))
        means.append(activations_TD[~sinks_T].mean(0, dtype=np.float64))
        if sinks_T.any():
            sinks[layer] = places[sinks_T].tolist()
    return CapturedActivations(np.stack(means)[:, None].astype(np.float32), places, sinks)

"""Layers by tokens as a map: what a lens reads of each layer, what a patch at each place does."""

import math
from dataclasses import dataclass

from logsteer.errors import LogsteerError
from logsteer.extras.labels import label_layers
from logsteer.schemas import LensAnswer, LensTarget, PatchAnswer
from logsteer.schemas.common import Float


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Values [layers][tokens], and what to call them.

    `marks` say more of each cell than its value. `signed` values are changes from 0;
    others run from 0 to 1.
    """

    title: str
    unit: str
    layers: list[str]
    tokens: list[str]
    values: list[list[Float]]
    marks: list[list[str]] | None = None
    signed: bool = False


def map_lens(target: LensTarget) -> LayerMap:
    """Return the probability of each of a target's tokens at each layer.

    Where alternatives were asked for, a cell is marked with the most probable token.
    """
    rows = target.layers.values()
    marks = [[names[0] for names in one.top.tokens] for one in rows if one.top] or None
    return LayerMap(
        f"Lens on {target.target!r}",
        "probability of the token" + (", and the most probable one" if marks else ""),
        list(target.layers),
        target.tokens,
        [[None if value is None else math.exp(value) for value in one.logprobs] for one in rows],
        marks,
    )


def map_lens_answer(answer: LensAnswer) -> LayerMap:
    """Return the map of an answer's only target; LogsteerError where it has several or none."""
    targets = [target for item in answer.results for target in item.targets]
    if len(targets) != 1:
        raise LogsteerError(
            f"draw one of the {len(targets)} targets: answer.results[0].targets[0].plot()"
        )
    return map_lens(targets[0])


def map_patch(answer: PatchAnswer, pair: int = 0) -> LayerMap:
    """Return how each patch of a pair changes the metric, from that of the run patched into."""
    result = answer.results[pair]
    base = result.corrupted if answer.direction == "denoise" else result.clean
    changes: list[list[Float]] = [
        [None if value is None or base is None else value - base for value in row]
        for row in result.matrix
    ]
    into, other = ("corrupted", "clean")[:: 1 if answer.direction == "denoise" else -1]
    return LayerMap(
        f"{answer.hook} of the {other} run put into the {into} one",
        {"kl": "change of KL, nats"}.get(answer.metric, f"change of {answer.metric}, nats"),
        [label_layers(layers) for layers in result.layers],
        result.tokens,
        changes,
        signed=True,
    )

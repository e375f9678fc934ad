"""What a vector does to contrasting texts, scale by scale: its dose-response.

Each pair is cut where its texts begin to differ: what they share is a context, and the rests are
its two targets. The preference is log P(positive rest) - log P(negative rest); a vector that stands
for what tells the texts apart raises it with the scale, and lowers it below 0.

    "The day was sunny and warm" / "The day was rainy and cold"
        context "The day was", targets " sunny and warm" and " rainy and cold"
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from logsteer.errors import InvalidRequestError, LogsteerError
from logsteer.schemas import ContrastPair, Message, SweepAnswer, VectorCard
from logsteer.schemas.common import Float, Plotted, Reply

PLAIN_SCALES = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)
"""For a vector that nothing is recommended for."""
PAIRS_A_REQUEST = 32


class DosePoint(Reply):
    """Means over the pairs at one scale; null where a text has no finite log-probability."""

    scale: float
    preference: Float
    preference_change: Float
    positive_change: Float
    negative_change: Float
    preferred: float
    """Share of pairs whose positive text is the more probable one."""
    kl: Float
    """KL(unsteered || steered) of the token at which the texts part, in nats."""
    relative_norm: Float
    """Mean of |change| / |activation| over steered tokens and layers."""


class DoseResponse(Plotted):
    """The points in the order of their scales, for a vector at some layers (None: its own)."""

    name: str
    model: str
    layers: list[int] | None
    num_pairs: int
    points: list[DosePoint]


def evaluate_vector(
    client: Any,
    name: str,
    pairs: Iterable[ContrastPair | Mapping[str, str]],
    *,
    scales: Sequence[float] | None = None,
    layers: Sequence[int] | None = None,
    **options: Any,
) -> DoseResponse:
    """Return what adding a stored vector does to the pairs' log-probabilities, scale by scale.

    `client` is a `Client`. `scales` and `layers` are those recommended by the vector's training
    unless given; `options` go to `client.sweep`. The pairs are sent 32 at a time. Pairs that the
    vector was not trained on say the most. Raises LogsteerError for no pairs, and what the client
    raises.
    """
    cut = [_cut_pair(pair) for pair in pairs]
    if not cut:
        raise LogsteerError("there are no pairs to evaluate on")
    card: VectorCard = client.vectors.get(name)
    chosen = sorted({0.0, *(_choose_scales(card) if scales is None else scales)})
    advice = card.about.recommendation
    own = None if advice is None else [advice.layer]
    places = own if layers is None else list(layers)
    steering = {"vectors": [{"name": name, "layers": places}]}
    answers: list[SweepAnswer] = [
        client.sweep(steering, chosen, items=cut[start : start + PAIRS_A_REQUEST],
                     **options)
        for start in range(0, len(cut), PAIRS_A_REQUEST)
    ]  # fmt: skip
    return DoseResponse(
        name=name,
        model=answers[0].model,
        layers=places,
        num_pairs=len(cut),
        points=[_sum_up(scale, index, answers) for index, scale in enumerate(chosen)],
    )


def _cut_pair(pair: ContrastPair | Mapping[str, str]) -> dict[str, Any]:
    """Return the item for a pair: it is cut before the word in which its texts begin to differ.

    Conversations that differ in the assistant's last turn are cut before that. Errors:
    InvalidRequestError for others.
    """
    checked = ContrastPair.model_validate(pair if isinstance(pair, ContrastPair) else dict(pair))
    positive, negative = checked.positive, checked.negative
    if not (isinstance(positive, str) and isinstance(negative, str)):
        return _cut_conversations(positive, negative)
    letters = enumerate(zip(positive, negative, strict=False))
    shorter = min(len(positive), len(negative))
    place = next((index for index, (one, other) in letters if one != other), shorter)
    while place and not all(text[place : place + 1].isspace() for text in (positive, negative)):
        place -= 1
    return {"context": positive[:place], "targets": [positive[place:], negative[place:]]}


def _cut_conversations(
    positive: str | list[Message], negative: str | list[Message]
) -> dict[str, Any]:
    if isinstance(positive, list) and isinstance(negative, list):
        ends = (positive[-1], negative[-1])
        is_answered = len(positive) > 1 and all(end.role == "assistant" for end in ends)
        if is_answered and positive[:-1] == negative[:-1]:
            return {"messages": positive[:-1], "targets": [end.content for end in ends]}
    detail = "conversations of a pair are scored where they differ in the assistant's last turn"
    raise InvalidRequestError("invalid_request", detail, param="pairs")


def _choose_scales(card: VectorCard) -> Sequence[float]:
    """Return scales to evaluate a vector at: about the one recommended, and their opposites."""
    advice = card.about.recommendation
    if advice is None:
        return PLAIN_SCALES
    upward = [share * advice.scale for share in (0.25, 0.5, 1, 2, 4)]
    return [*(-scale for scale in upward), *upward]


def _sum_up(scale: float, index: int, answers: Sequence[SweepAnswer]) -> DosePoint:
    points = [answer.points[index] for answer in answers]
    items = [item for point in points for item in point.items]
    positive = [item.targets[0] for item in items]
    negative = [item.targets[1] for item in items]
    gaps = [_subtract(p.logprob, n.logprob) for p, n in zip(positive, negative, strict=True)]
    changes = [_subtract(p.change, n.change) for p, n in zip(positive, negative, strict=True)]
    # The requests' means, each weighted by its pairs.
    norms = [(point.relative_norm, len(point.items)) for point in points]
    told = [norm * count for norm, count in norms if norm is not None]
    return DosePoint(
        scale=scale,
        preference=_average(gaps),
        preference_change=_average(changes),
        positive_change=_average([target.change for target in positive]),
        negative_change=_average([target.change for target in negative]),
        preferred=sum(gap is not None and gap > 0 for gap in gaps) / len(gaps),
        kl=_average([item.kl for item in items]),
        relative_norm=sum(told) / len(items) if told else None,
    )


def _subtract(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _average(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return math.fsum(found) / len(found) if len(found) == len(values) else None

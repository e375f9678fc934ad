"""Recommend layer and scale for a trained vector from its effect: preference gained, text harmed.

A pair whose texts begin with the same tokens is a beginning and two continuations:

    "Tom was very happy." / "Tom was very sad."
        beginning "Tom was very", continuations " happy." and " sad."

The *gain* of a layer and a scale is the mean over pairs of the change, under steering, of

    log P(positive continuation | beginning) - log P(negative continuation | beginning)

with the vector trained without the pair's fold. The *harm* is the relative growth of perplexity on
the unsteered model's own continuations of the beginnings, exp(K) - 1 with K = KL(unsteered ||
steered) per token. Beginnings may be as short as one word, so their own tokens are not measured. K
is estimated from sampled tokens x: with d = log p_steered(x) - log p_unsteered(x), the mean of
exp(d) - 1 - d, which is unbiased, never negative, and far less noisy than the mean of -d
(J. Schulman 2020, "Approximating KL divergence", k3). Both are steered at all positions.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import ContrastPair, LayerQuality, Recommendation
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import GenerateJob, GenerateOutput, ScoreJob, ScoreOutput
from logsteer_server.contract.plan import Site, SteeringPlan
from logsteer_server.stores.layer_vectors import Vector
from logsteer_server.tasks.vector_methods import (
    MIDDLE,
    Double,
    Folds,
    TrainedVectors,
    choose_middle,
)

CONTINUATION_TOKENS = 16
"""Tokens of each continuation and of each sample; the first ones show most of the effect."""
TEXT_TOKENS = 64
"""Tokens of each of the caller's texts."""
SAMPLES = 8
"""Continuations to sample, spread evenly over the beginnings."""
STAGE_TOKENS = 16_384
"""Most tokens that a stage of the search reads; with too many pairs, it measures the gain on some
of them."""
COARSE_LAYERS = 10
COARSE_CHANGES = 0.07, 0.2
"""Scales of the first stage, as shares of an activation's norm. Until the model breaks, harm grows
with the square of the scale and gain in proportion to it, so two scales locate the limit of
harm."""
STAGE_SETTINGS = 1 + COARSE_LAYERS * len(COARSE_CHANGES)
"""Settings of the larger stage, including the unsteered model."""
FINE_LAYERS = 5
FINE_SHARES = 0.7, 0.95
"""Scales of the second stage, as shares of the scale at which harm should reach its limit."""
FURTHEST = 4.0
"""Largest factor, up or down, between the nearest scale tried and the expected limit."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """The tokens of a pair with a common beginning; `pair`: its index."""

    pair: int
    beginning: list[int]
    positive: list[int]
    negative: list[int]


def find_contrasts(
    pairs: Sequence[ContrastPair], sequences: Sequence[Sequence[int]], bos_id: int | None
) -> list[Contrast]:
    """Return the pairs with a common beginning of at least one token besides BOS.

    `sequences`: the tokens of each pair's positive text, then of its negative one. Conversations
    have a common beginning if their turns before the last are the same.
    """
    contrasts = []
    for number, pair in enumerate(pairs):
        one, other = sequences[2 * number], sequences[2 * number + 1]
        alike = takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))
        shared = len(list(alike))
        begins = shared > (one[0] == bos_id)
        ends = [list(tokens[shared : shared + CONTINUATION_TOKENS]) for tokens in (one, other)]
        if begins and all(ends) and _answers_alike(pair):
            contrasts.append(Contrast(number, list(one[:shared]), *ends))
    return contrasts


def _answers_alike(pair: ContrastPair) -> bool:
    one, other = pair.positive, pair.negative
    if isinstance(one, list) and isinstance(other, list):
        return one[:-1] == other[:-1]
    return isinstance(one, str) and isinstance(other, str)


def cut_texts(sequences: Iterator[list[int]]) -> list[list[int]]:
    """Return the first tokens of the further texts on which harm is measured.

    Errors: APIError `invalid_request` for a text without a token to score.
    """
    texts = [tokens[:TEXT_TOKENS] for tokens in sequences]
    for number, tokens in enumerate(texts):
        if len(tokens) < 2:
            place = f"harm_texts[{number}]"
            detail = f"{place} has no token behind another: give a longer text."
            raise api_error("invalid_request", detail, param=place)
    return texts


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of one scale at one layer."""

    layer: int
    scale: float
    gain: float = 0.0
    harm: float = 0.0
    stage: int = 0


class EffectSearch:
    """Search for the layer and scale of the largest gain whose harm stays within `max_harm`.

    The first stage tries about ten layers at two scales each; the second, the layers around the
    best, near the scale at which harm should reach its limit. The first 30 % of the layers are left
    out: there, held-out pairs are moved by words that they share with the others. If no pair is
    held out, the last 20 % are left out, too: they may repeat words of the training texts.
    """

    def __init__(
        self,
        contrasts: Sequence[Contrast],
        texts: Sequence[Sequence[int]],
        trained: TrainedVectors,
        folds_N: Folds | None,
        max_harm: float,
        num_layers: int,
    ) -> None:
        self._contrasts, self._texts = contrasts, texts
        self._trained, self._folds_N = trained, folds_N
        self._max_harm = max_harm
        self._samples: list[tuple[list[int], int]] = []
        norms = {layer: norm for layer, norm in trained.vectors.norms().items() if norm}
        last = MIDDLE[1] if folds_N is None else 1.0
        norms = choose_middle(norms, num_layers, last) or norms
        self._relative = {
            layer: norm / (trained.quality[layer].activation_norm or 1.0)
            for layer, norm in norms.items()
        }
        """|v| / |activation|, by layer tried."""
        self._effects: list[Effect] = []
        self._num_pairs = 0

    def plan_samples(self, info: EngineInfo) -> list[GenerateJob]:
        """Return jobs that continue the beginnings, unsteered."""
        beginnings = list(dict.fromkeys(tuple(one.beginning) for one in self._contrasts))
        step = max(1, len(beginnings) // SAMPLES)
        chosen = beginnings[::step][:SAMPLES]
        jobs = []
        for number in range(SAMPLES):
            tokens = np.array(chosen[number % len(chosen)], np.int32)
            room = min(CONTINUATION_TOKENS, info.context_length - len(tokens))
            jobs.append(GenerateJob(tokens, max_tokens=room, seed=number))
        return jobs

    def record_samples(
        self, jobs: Sequence[GenerateJob], outputs: Sequence[GenerateOutput]
    ) -> None:
        """Record the samples drawn."""
        for job, output in zip(jobs, outputs, strict=True):
            beginning = job.tokens.tolist()
            self._samples.append((beginning + output.token_ids.tolist(), len(beginning)))

    def plan_coarse(self) -> list[Effect]:
        """Return the settings of the first stage, their effects unknown."""
        layers = _spread(sorted(self._relative), COARSE_LAYERS)
        return [Effect(n, c / self._relative[n]) for n in layers for c in COARSE_CHANGES]

    def plan_fine(self) -> list[Effect]:
        """Return the settings of the second stage, from the results of the first."""
        bounds = {n: self._find_bound(n) for n in sorted({one.layer for one in self._effects})}
        coarse = list(bounds)
        best, *others = sorted(coarse, key=lambda n: -bounds[n].gain)
        place = coarse.index(best)
        first, last = coarse[max(place - 1, 0)], coarse[min(place + 1, len(coarse) - 1)]
        near = [n for n in sorted(self._relative) if first < n < last]
        layers = sorted({best, *others[:1], *_spread(near, FINE_LAYERS)})
        changes = [math.log(bounds[n].scale * self._relative[n]) for n in coarse]
        reach = {n: math.exp(np.interp(n, coarse, changes)) / self._relative[n] for n in layers}
        return [Effect(n, share * reach[n], stage=1) for n in layers for share in FINE_SHARES]

    def _find_bound(self, layer: int) -> Effect:
        """Return the expected effect of a layer at the scale where harm reaches its bound."""

        def measure(one: Effect) -> float:
            return math.sqrt(self._max_harm / max(one.harm, 1e-12))

        tried = [one for one in self._effects if one.layer == layer]
        nearest = min(tried, key=lambda one: abs(math.log(measure(one))))
        factor = min(max(measure(nearest), 1 / FURTHEST), FURTHEST)
        return Effect(layer, factor * nearest.scale, factor * nearest.gain, self._max_harm)

    def plan_jobs(self, settings: Sequence[Effect]) -> list[ScoreJob]:
        """Return the jobs of a stage: unsteered first, then of each setting in order."""
        others = sum(map(len, self._texts)) + sum(len(tokens) for tokens, _ in self._samples)
        room = max(1, STAGE_TOKENS // (len(settings) + 1) - others)
        sizes = sum(2 * len(c.beginning) + len(c.positive + c.negative) for c in self._contrasts)
        self._used = self._contrasts[:: math.ceil(sizes / room)]
        self._num_pairs = max(self._num_pairs, len(self._used))
        jobs = self._plan_setting(None)
        for setting in settings:
            jobs += self._plan_setting(setting)
        return jobs

    def _plan_setting(self, setting: Effect | None) -> list[ScoreJob]:
        whole, by_fold = None, list[SteeringPlan]()
        if setting is not None:
            whole = self._plan_steering(setting, self._trained.vectors.layers[setting.layer])
            if self._folds_N is not None:
                held_FD = self._trained.held[setting.layer]
                by_fold = [self._plan_steering(setting, vector_D) for vector_D in held_FD]
        jobs = []
        for contrast in self._used:
            plan = whole
            if by_fold and self._folds_N is not None:
                plan = by_fold[self._folds_N[contrast.pair]]
            begin = contrast.beginning
            jobs.append(_score(begin + contrast.positive, len(begin), plan))
            jobs.append(_score(begin + contrast.negative, len(begin), plan))
        jobs += [_score(tokens, first, whole) for tokens, first in self._samples]
        return jobs + [_score(tokens, 1, whole) for tokens in self._texts]

    def _plan_steering(self, setting: Effect, vector_D: Double | Vector) -> SteeringPlan:
        offset_D = (setting.scale * vector_D).astype(np.float32)
        return SteeringPlan((Site(setting.layer, self._trained.vectors.hook, offset_D),))

    def judge(self, settings: Sequence[Effect], outputs: Sequence[ScoreOutput]) -> None:
        """Measure the effects of the settings from the outputs of `plan_jobs`."""
        logprobs = [output.columns["logprob"].astype(np.float64) for output in outputs]
        size = len(logprobs) // (len(settings) + 1)
        pairs, texts = 2 * len(self._used), size - len(self._texts)
        for number, setting in enumerate(settings, 1):
            steered = logprobs[number * size : (number + 1) * size]
            changes = [one - base for one, base in zip(steered, logprobs[:size], strict=True)]
            sums = [change.sum() for change in changes[:pairs]]
            gain = float(np.mean(sums[0::2]) - np.mean(sums[1::2]))
            with np.errstate(over="ignore"):
                sampled = np.concatenate(changes[pairs:texts])
                harm = np.expm1(np.mean(np.expm1(sampled) - sampled))
                if self._texts:
                    harm = max(harm, np.expm1(-np.concatenate(changes[texts:]).mean()))
            self._effects.append(replace(setting, gain=gain, harm=float(harm)))

    def find_best(self) -> dict[int, Effect]:
        """Return, by layer, the effect with the largest gain within the limit of harm, if any.

        The second stage's result is used if there is one: it measures on more pairs.
        """
        best: dict[int, Effect] = {}
        for one in sorted(self._effects, key=lambda one: (one.stage, one.gain)):
            if one.gain > 0 and one.harm <= self._max_harm:
                best[one.layer] = one
        return best

    def describe(self) -> dict[int, LayerQuality]:
        """Return the quality of each layer with its best effect."""
        best = self.find_best()
        return {
            layer: one.model_copy(
                update={name: getattr(best[layer], name) for name in ("scale", "gain", "harm")}
            )
            if layer in best
            else one
            for layer, one in self._trained.quality.items()
        }

    def recommend(self) -> Recommendation | str:
        """Return layer and scale with the largest gain, or why there is no recommendation."""
        if not (found := self.find_best()):
            return (
                f"none of {len(self._effects)} settings of layer and scale raises the preference "
                f"for positive continuations and perplexity by at most {self._max_harm:.0%}: give "
                "more pairs, another read, or a larger max_harm"
            )
        best = max(found.values(), key=lambda one: (one.stage, one.gain))
        which = "held-out pairs" if self._folds_N is not None else "the pairs, none held out"
        return Recommendation(
            layer=best.layer,
            scale=best.scale,
            relative_norm=best.scale * self._relative[best.layer],
            recommended_by="effect",
            gain=best.gain,
            harm=best.harm,
            pairs=self._num_pairs,
            reason=f"scale {best.scale:.3g} at layer {best.layer} raises the preference for "
            f"positive continuations by {best.gain:.3g} nats on {which}, and perplexity by "
            f"{best.harm:.1%}: the largest gain of {len(self._effects)} settings that raise "
            f"perplexity by at most {self._max_harm:.0%}",
        )


def _score(tokens: Sequence[int], first: int, plan: SteeringPlan | None) -> ScoreJob:
    """Return the job that scores the tokens from position `first` on."""
    ids = np.array(tokens, np.int32)
    return ScoreJob(ids[:-1], ids[first:], plan=plan)


def _spread(values: Sequence[int], count: int) -> list[int]:
    """Return `count` of the values, or all, evenly spaced, including the first and the last."""
    if len(values) <= count:
        return list(values)
    return [values[round(at)] for at in np.linspace(0, len(values) - 1, count)]

"""What a vector does to texts, and the layer and scale that follow from it, against definitions."""

import numpy as np
import pytest

from logsteer.schemas import ContrastPair, LayerQuality, Recommendation
from logsteer_server.contract.captures import Capture
from logsteer_server.contract.jobs import GenerateOutput, ScoreJob, ScoreOutput
from logsteer_server.contract.plan import Positions
from logsteer_server.numerics.sinks import finish_capture
from logsteer_server.stores.layer_vectors import LayerVectors
from logsteer_server.tasks.activations import CaptureSite
from logsteer_server.tasks.effect import (
    STAGE_TOKENS,
    Contrast,
    EffectSearch,
    cut_texts,
    find_contrasts,
)
from logsteer_server.tasks.vector_methods import TrainedVectors, plan_folds
from tests.refusals import refused
from tests.server import steering_cases

NUM_LAYERS, BEST, LENGTH = 20, 13, 40.0
BOS = 1


def pair(positive: object, negative: object) -> ContrastPair:
    return ContrastPair.model_validate({"positive": positive, "negative": negative})


def turns(question: str, reply: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


def test_pairs_that_begin_alike_are_cut_where_they_part() -> None:
    text = pair("a b c", "a b d")
    asked = pair(turns("a?", "b"), turns("a?", "c"))
    other = pair(turns("a?", "b"), turns("b?", "c"))
    given = [text, text, text, asked, other]
    long = [1, 5, *range(50, 90)]
    tokens = [
        [1, 5, 6],
        [1, 5, 7, 8],
        [1, 5],
        [1, 6],
        [1, 5],
        [1, 5, 7],
        long,
        [1, 9],
        long,
        [1, 9],
    ]
    found = find_contrasts(given, tokens, bos_id=None)
    # The third has no positive end; the last two turns come after different ones.
    assert [one.pair for one in found] == [0, 1, 3]
    assert found[0] == Contrast(0, [1, 5], [6], [7, 8])
    assert (found[2].beginning, len(found[2].positive)) == ([1], 16)
    assert [one.pair for one in find_contrasts(given, tokens, BOS)] == [0]


def test_texts_of_one_token_cannot_be_scored() -> None:
    assert cut_texts(iter([[1, 2], [3] * 99])) == [[1, 2], [3] * 64]
    with refused("invalid_request", r"harm_texts\[1\] has no token behind another"):
        cut_texts(iter([[1, 2], [3]]))


def test_a_mean_leaves_sinks_out_and_says_which() -> None:
    activations_LTD = np.ones((2, 4, 2), np.float32)
    activations_LTD[1, 2] = 90
    capture = Capture((3, 5), "resid_post", "mean", Positions("slices", ((1, 5),)))
    found = finish_capture(capture, capture.find_places(6, 6, 6), activations_LTD)
    assert (found.activations_LTD.tolist(), found.sinks) == ([[[1, 1]], [[1, 1]]], {5: [3]})
    site = CaptureSite(Capture((3,), read="mean"), 2, BOS)
    assert site.place(np.array([BOS, 5, 6], np.int32)).positions.slices == ((1, 3),)
    for tokens in ([5, 6], [BOS]):
        assert site.place(np.array(tokens, np.int32)).positions.kind == "all"


def search(num_pairs: int = 6, folds: bool = True) -> EffectSearch:
    """Return a search over vectors that differ by layer in length, and by fold in sign."""
    contrasts = [Contrast(n, [1, 10 + n, 3, 4], [5, 6], [7]) for n in range(num_pairs)]
    vectors = {layer: np.array([1.0 + layer, 0, 0]) for layer in range(NUM_LAYERS)}
    quality = {layer: LayerQuality(activation_norm=LENGTH) for layer in vectors}
    folds_N = plan_folds(range(num_pairs)) if folds else None
    held = {
        n: np.stack([v + np.array([0, 0, f]) for f in range(num_pairs)]) for n, v in vectors.items()
    }
    trained = TrainedVectors(LayerVectors(vectors), quality, held)
    return EffectSearch(contrasts, [[1, 8, 9]], trained, folds_N, 0.1, NUM_LAYERS)


def score(job: ScoreJob) -> ScoreOutput:
    """A model that gains in proportion to the change, most at one layer, harmed by its square."""
    logprobs = np.full(len(job.targets), -2.0)
    if job.plan is not None:
        (site,) = job.plan.sites
        assert site.offset is not None
        change = float(site.offset[0]) / LENGTH
        gain = change * np.exp(-(((site.layer - BEST) / 6) ** 2))
        if len(job.tokens) < len(job.targets) + 3:  # a text of the caller's
            logprobs -= 3 * change**2
        elif job.targets[0] == 5:
            logprobs += gain
        elif job.targets[0] == 7:
            logprobs -= gain
        else:
            logprobs += 2 * change * np.array([1, -1])
    return ScoreOutput({"logprob": logprobs.astype(np.float32)})


def advise(one: EffectSearch) -> Recommendation | str:
    samples = one.plan_samples(steering_cases.INFO)
    ids = np.array([8, 9], np.int32)
    none = np.zeros(0, np.float32)
    outputs = [GenerateOutput(ids, "", none, ids, none, "length") for _ in samples]
    one.record_samples(samples, outputs)
    for stage in (one.plan_coarse, one.plan_fine):
        settings = stage()
        jobs = one.plan_jobs(settings)
        one.judge(settings, [score(job) for job in jobs])
    return one.recommend()


def test_the_largest_gain_within_the_bound_of_harm() -> None:
    one = search()
    found = advise(one)
    assert isinstance(found, Recommendation)
    assert (found.layer, found.recommended_by, found.pairs) == (BEST, "effect", 6)
    # Both harms are close to 3 c^2 or less: the bound of 0.1 is at c = 0.18.
    assert found.relative_norm == pytest.approx(found.scale * (1 + BEST) / LENGTH)
    assert 0.15 < found.relative_norm < 0.19
    assert found.gain == pytest.approx(3 * found.relative_norm, rel=1e-3)
    delta = 2 * found.relative_norm * np.array([1, -1])
    sampled = np.expm1(np.mean(np.expm1(delta) - delta))
    given = np.expm1(3 * found.relative_norm**2)
    assert found.harm == pytest.approx(max(sampled, given), rel=1e-3)
    shown = one.describe()[BEST]
    assert (shown.scale, shown.gain, shown.harm) == (found.scale, found.gain, found.harm)


def test_each_pair_is_scored_by_the_vector_without_it() -> None:
    one = search()
    (first, *_) = settings = one.plan_coarse()
    jobs = one.plan_jobs(settings)
    steered = [job.plan.sites[0] for job in jobs if job.plan is not None][:12]
    assert all(site.offset is not None for site in steered)
    assert [site.offset[2] / first.scale for site in steered] == pytest.approx(
        [fold for fold in range(6) for _ in range(2)]
    )
    assert sum(job.plan is None for job in jobs) == 12 + 1  # no samples yet, one text


def test_a_search_reads_a_bounded_number_of_tokens() -> None:
    coarse = (one := search(num_pairs=1200)).plan_coarse()
    read = [sum(len(job.tokens) for job in one.plan_jobs(s)) for s in (coarse, coarse[:1])]
    assert STAGE_TOKENS / 2 < min(read) <= max(read) <= STAGE_TOKENS


def test_without_held_out_pairs_the_middle_alone_is_searched() -> None:
    one = search(folds=False)
    assert {setting.layer for setting in one.plan_coarse()} == set(range(6, 16))
    found = advise(one)
    assert isinstance(found, Recommendation) and "none held out" in found.reason


def test_nothing_is_recommended_where_nothing_gains() -> None:
    one = search()
    one._max_harm = 1e-9
    assert "by at most 0%" in str(advise(one))

"""The draw: its noise is uniform and follows from seeds; its tokens have the frequencies of q."""

import math
from collections.abc import Sequence
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.contract.jobs import GenerateJob, Policy
from logsteer_server.numerics import drawing, sampling
from logsteer_server.numerics.drawing import (
    Drawn,
    RowSampler,
    draw_rows,
    find_uniform,
    mix_bits,
    spec_of_draw,
    unpack_bits,
)
from logsteer_server.numerics.rows import COLUMNS, PUBLIC_COLUMNS, Rows, RowSpec, unpack
from logsteer_server.numerics.sampling import GROWTH, HEAD, shape_rows

NUMBERS = st.floats(-8, 8, width=32) | st.sampled_from([-1.0, 0.0, 1.0])
LOGITS = st.lists(NUMBERS, min_size=2, max_size=12)
POLICIES = st.builds(
    Policy,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.6]),
)


def define(logits: list[float], policy: Policy) -> list[float]:
    """q by the definition: temperature, min_p, top_k, top_p, renormalised."""
    weights = [math.exp((z - max(logits)) / policy.temperature) for z in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    order = [i for i in order if weights[i] >= policy.min_p * weights[order[0]]]
    order = order[: policy.top_k or len(order)]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        mass += weights[i] / total
        if mass >= policy.top_p:
            break
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


def is_close_call(logits: list[float], policy: Policy) -> bool:
    """Whether rounding decides what is cut."""
    weights = sorted(math.exp((z - max(logits)) / policy.temperature) for z in logits)[::-1]
    if any(0 < a - b < 1e-6 for a, b in pairwise(weights)):  # float32 may call them equal
        return True
    if any(abs(w - policy.min_p * weights[0]) < 1e-5 for w in weights):
        return True
    kept = [w for w in weights if w >= policy.min_p * weights[0]][: policy.top_k or None]
    masses = np.cumsum(kept) / sum(kept)
    return bool((abs(masses - policy.top_p) < 1e-5).any()) and policy.top_p < 1


@given(st.lists(st.tuples(LOGITS, POLICIES), min_size=1, max_size=5), st.sampled_from([1, 4, 512]))
def test_the_policy_is_its_definition_whatever_the_other_rows(
    rows: list[tuple[list[float], Policy]], head: int
) -> None:
    size = max(len(logits) for logits, _ in rows)
    logits_RV = torch.tensor([z + [-math.inf] * (size - len(z)) for z, _ in rows])
    with mock.patch.object(sampling, "HEAD", head):
        q_RV = shape_rows(logits_RV, [policy for _, policy in rows]).q_RV
    assert q_RV.dtype == torch.float32
    for q_V, (logits, policy) in zip(q_RV.tolist(), rows, strict=True):
        if not is_close_call(logits, policy):
            assert q_V[: len(logits)] == pytest.approx(define(logits, policy), abs=1e-5)


def test_a_likely_head_is_cut_as_the_whole_is() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_RV = 4 * torch.randn(30, 5000, generator=generator)
    logits_RV[:4] = logits_RV[:4].round()  # many are equally probable
    cuts = [{"top_p": 0.9}, {"top_p": 0.9999}, {"top_k": 40}, {"top_k": 900}, {"min_p": 0.05},
            {"min_p": 1e-7, "top_p": 0.99}, {"top_k": 60, "top_p": 0.8}, {}]  # fmt: skip
    # At the end of the head, and of the next one.
    cuts += [{"top_k": HEAD, "top_p": 0.7}, {"top_k": GROWTH * HEAD, "top_p": 0.98}]
    policies = [Policy(**cut) for cut in cuts] * 3
    found = shape_rows(logits_RV, policies)
    with mock.patch.object(sampling, "HEAD", 5000):
        wanted = shape_rows(logits_RV, policies)
    assert torch.equal(found.q_RV > 0, wanted.q_RV > 0)
    assert (found.head_mass_R - wanted.head_mass_R).abs().max() < 1e-6


def test_the_example_of_the_cut() -> None:
    p_V = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    shaped = shape_rows(p_V.log()[None], [Policy(min_p=0.2, top_p=0.7)])
    assert shaped.q_RV[0].tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0, 0])
    assert shaped.head_mass_R.tolist() == pytest.approx([7 / 9])


def test_greedy_is_certain_and_the_first_of_equals() -> None:
    logits_RV = torch.tensor([[1.0, 5.0, 5.0], [9.0, 0.0, 1.0]])
    q_RV = shape_rows(logits_RV, [Policy(temperature=0.0), Policy(temperature=1e-9, top_k=2)]).q_RV
    assert q_RV.tolist() == [[0, 1, 0], [1, 0, 0]]


def test_a_small_temperature_does_not_overflow() -> None:
    q_RV = shape_rows(torch.tensor([[3e4, 2.9e4, -3e4]]), [Policy(temperature=2e-5)]).q_RV
    assert q_RV.tolist() == [[1, 0, 0]]


def test_without_cuts_nothing_is_lost() -> None:
    logits_RV = torch.linspace(-30, 30, 5000)[None]
    q_RV = shape_rows(logits_RV, [Policy()]).q_RV
    torch.testing.assert_close(q_RV.double(), logits_RV.double().softmax(-1), rtol=1e-5, atol=0)
    assert (shape_rows(logits_RV, [Policy(top_k=5000)]).q_RV > 0).sum() == (q_RV > 0).sum()


def test_a_row_that_is_not_a_number_is_no_error() -> None:
    logits_RV = torch.full((3, 2000), math.nan)
    for policy in (Policy(), Policy(top_p=0.9), Policy(top_k=5), Policy(min_p=0.1)):
        assert shape_rows(logits_RV, [policy] * 3).q_RV.isnan().any()


@pytest.mark.parametrize("top_k", [2000, 2001, 10**30])
def test_a_top_k_of_the_vocabulary_or_more_cuts_nothing(top_k: int) -> None:
    logits_RV = torch.linspace(-3, 3, 2000)[None]
    assert (shape_rows(logits_RV, [Policy(top_k=top_k)]).q_RV > 0).all()


LARGEST = 1 - 2.0**-52
GREEDY = Policy(temperature=0.0)


def as_words(*numbers: int) -> np.ndarray:
    return np.array([number % 2**64 for number in numbers], dtype=np.uint64)


def sample_by(policies: Sequence[Policy], seeds: Sequence[int]) -> RowSampler:
    """A sampler of which nothing but tokens is wanted."""
    return RowSampler([RowSpec((), policy=policy) for policy in policies], seeds)


def chi_square(counts_N: np.ndarray, expected_N: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean; rare values are pooled."""
    rare_N = expected_N < 10
    found = [*counts_N[~rare_N], counts_N[rare_N].sum()]
    wanted = [*expected_N[~rare_N], expected_N[rare_N].sum()]
    terms = [(a - b) ** 2 / b for a, b in zip(found, wanted, strict=True) if b]
    freedom = len(terms) - 1
    return float((sum(terms) - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("head", [2, 16, 512])
def test_of_equally_probable_tokens_the_first_are_drawn_from(head: int) -> None:
    """Ties cross the edge of the cut and the edge of what is looked at first."""
    generator = torch.Generator().manual_seed(3)
    logits_RV = torch.randint(0, 4, (40, 900), generator=generator).float()
    logits_RV[:, 5] = 9.0
    policies = [Policy(top_k=k) for k in range(1, 400, 40)] * 2
    policies += [Policy(top_p=p) for p in (0.2, 0.5, 0.8, 0.93)] * 5
    with mock.patch.object(sampling, "HEAD", head):
        q_RV = shape_rows(logits_RV, policies).q_RV
    for q_V, logits_V, policy in zip(q_RV, logits_RV.tolist(), policies, strict=True):
        assert q_V.tolist() == pytest.approx(define(logits_V, policy), abs=1e-6)


def test_the_noise_is_splitmix64() -> None:
    """Outputs for the seed 1234567, as the reference implementation in C prints them."""
    states = as_words(*(1234567 + n * 0x9E3779B97F4A7C15 for n in range(1, 6)))
    assert mix_bits(states).tolist() == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
        16408922859458223821,
    ]  # fmt: skip


@pytest.mark.parametrize("first", [0, 2**31 - 7, 2**63 - 100, -(2**62)])
def test_the_noise_is_uniform_over_places_seeds_and_pairs(first: int) -> None:
    seeds = as_words(*range(first, first + 400))
    uniform_SI = find_uniform(seeds[:, None], np.arange(500, dtype=np.uint64)[None])
    assert uniform_SI.min() >= 0
    assert uniform_SI.max() <= LARGEST
    assert len(np.unique(uniform_SI)) == uniform_SI.size
    flat = uniform_SI.ravel()
    even = np.full(256, flat.size / 256)
    assert abs(chi_square(np.histogram(flat, 256, (0, 1))[0], even)) < 5
    low_bits = (flat * 2**52).astype(np.uint64) % np.uint64(256)
    assert abs(chi_square(np.bincount(low_bits.astype(int), minlength=256), even)) < 5
    for one, other in ((uniform_SI[:-1], uniform_SI[1:]), (uniform_SI[:, :-1], uniform_SI[:, 1:])):
        pairs = np.histogram2d(one.ravel(), other.ravel(), 16, ((0, 1), (0, 1)))[0].ravel()
        assert abs(chi_square(pairs, np.full(256, one.size / 256))) < 5


def test_no_seed_has_the_sequence_of_another_moved_on() -> None:
    """Seeds that lie a step of the generator apart would have, were they its states."""
    seeds = as_words(5, 5 + 0x9E3779B97F4A7C15)
    uniform_SI = find_uniform(seeds[:, None], np.arange(50, dtype=np.uint64)[None])
    assert not set(uniform_SI[0]) & set(uniform_SI[1])


def test_the_ends_of_the_unit_interval_never_draw_what_is_cut() -> None:
    generator = torch.Generator().manual_seed(1)
    inner_RV = torch.rand((500, 3), generator=generator)
    q_RV = torch.nn.functional.pad(inner_RV / inner_RV.sum(-1, keepdim=True), (1, 1))
    for uniform, wanted in ((0.0, 1), (LARGEST, 3)):
        ids_R = draw_rows(q_RV, torch.full((500,), uniform, dtype=torch.float64))
        assert (ids_R == wanted).all()


def make_tied_logits() -> torch.Tensor:
    """Logits of a half-precision head: of 300 tokens many are equally probable."""
    generator = torch.Generator().manual_seed(8)
    return (2 * torch.randn(300, generator=generator)).bfloat16().float()


def find_tied_edges(logits_V: torch.Tensor) -> tuple[int, float]:
    """A top_k and a top_p whose edges part tokens that are equally probable."""
    sorted_V = logits_V.sort(descending=True).values
    tied = (sorted_V[:-1] == sorted_V[1:]).nonzero().squeeze(-1)
    top_k = int(tied[tied > 20][0]) + 1
    p_V = sorted_V.double().softmax(-1)
    edge = int(tied[tied > 40][0])
    return top_k, float(p_V[:edge].sum() + 0.5 * p_V[edge])


TIED = make_tied_logits()
TOP_K, TOP_P = find_tied_edges(TIED)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(), Policy(0.6), Policy(top_k=TOP_K), Policy(top_p=TOP_P), Policy(min_p=0.05),
        Policy(1.3, 60, 0.9, 0.01), Policy(1e-3), Policy(0.01, top_p=0.9),
    ],
    ids=str,
)  # fmt: skip
def test_100_000_draws_fit_q_ties_included(policy: Policy) -> None:
    """By the function that both engines draw with: 500 seeds, 200 tokens of each."""
    if policy.temperature == 1.0:
        assert not is_close_call(TIED.tolist(), policy)
    rows, steps = 500, 200
    sampler = sample_by([policy] * rows, range(rows))
    logits_RV = TIED.expand(rows, -1)
    counts_V = np.zeros(len(TIED))
    for step in range(steps):
        ids_R = sampler.draw(logits_RV, np.full(rows, step)).ids_R
        counts_V += ids_R.bincount(minlength=len(TIED)).numpy()
    q_V = np.array(define(TIED.tolist(), policy))
    assert not counts_V[q_V == 0].any()
    if policy.temperature > 0.1:
        assert abs(chi_square(counts_V, rows * steps * q_V)) < 5
    else:
        assert counts_V / (rows * steps) == pytest.approx(q_V, abs=0.005)


SHAPES = [GREEDY, Policy(), Policy(top_k=9), Policy(0.7, top_p=0.8), Policy(min_p=0.1)]
SEEDS = [7, -3, 2**63 - 1, 2**64 + 5, 0, 1]


def test_a_row_draws_the_same_whatever_the_others_are() -> None:
    generator = torch.Generator().manual_seed(5)
    logits_RV = 3 * torch.randn((60, 700), generator=generator)
    policies, seeds, index_R = SHAPES * 12, SEEDS * 10, np.arange(60)
    together_R = sample_by(policies, seeds).draw(logits_RV, index_R).ids_R
    with mock.patch.object(drawing, "CHUNK_LOGITS", {"cpu": 1}):
        assert torch.equal(sample_by(policies, seeds).draw(logits_RV, index_R).ids_R, together_R)
    for r, policy in enumerate(policies):
        alone = sample_by([policy], [seeds[r]]).draw(logits_RV[r : r + 1], index_R[r : r + 1])
        assert alone.ids_R.item() == together_R[r]
    assert torch.equal(together_R[::5], logits_RV[::5].argmax(-1))
    other_R = sample_by(policies, seeds).draw(logits_RV, index_R + 1).ids_R
    assert (other_R != together_R).sum() > 20


def test_seeds_count_modulo_64_bits() -> None:
    logits_RV = torch.zeros((2, 5000))
    one, other = sample_by([Policy()] * 2, [-1, 2**64 - 1]).draw(logits_RV, np.array([4, 4])).ids_R
    assert one == other


FOUR = [GREEDY, Policy(), Policy(top_p=0.5), Policy(top_k=3, min_p=0.1)]


def test_logits_that_are_not_numbers_draw_a_token_of_the_vocabulary() -> None:
    logits_RV = torch.full((4, 1000), math.nan)
    drawn = sample_by(FOUR, range(4)).draw(logits_RV, np.zeros(4, np.int64))
    assert ((drawn.ids_R >= 0) & (drawn.ids_R < 1000)).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_logit_that_is_no_number_marks_its_row(value: float) -> None:
    """Also where the token that is drawn has a finite one."""
    logits_RV = torch.randn((8, 1000), generator=torch.Generator().manual_seed(1))
    logits_RV[::2, 500] = value
    columns = RowSpec(("logprob", "log_q"))
    for spec in (RowSpec(()), columns):
        specs = [RowSpec(spec.columns, policy=policy) for policy in FOUR for _ in range(2)]
        drawn = RowSampler(specs, range(8)).draw(logits_RV, np.zeros(8, np.int64))
        assert drawn.finite_R.tolist() == [False, True] * 4


def check_values(drawn: Drawn, specs: Sequence[RowSpec | None], logits_RV: torch.Tensor) -> None:
    """Check what was read with each token against the same columns of that row by itself."""
    for r, spec in enumerate(specs):
        values_1W = drawn.values_RW[r : r + 1]
        if spec is None:
            assert (drawn.ids_R[r], drawn.finite_R[r], values_1W.any()) == (0, True, False)
            continue
        found = unpack(values_1W[:, : spec.width].numpy(), spec)
        own_1V, ids_1 = logits_RV[r : r + 1], drawn.ids_R[r : r + 1]
        rows = Rows(own_1V, ids_1, None, spec.policy, spec.eos_ids, spec.double)
        for name in spec.columns:
            wanted = COLUMNS[name](rows).item()
            assert found[name].item() == pytest.approx(wanted, rel=1e-5, abs=2e-6), name
            assert math.isfinite(wanted), name
        if spec.top:
            wanted_K = own_1V.topk(spec.top).indices
            assert found["top_ids"].tolist() == wanted_K.tolist()
            best = rows.log_probs_RV.gather(-1, wanted_K).squeeze(0).tolist()
            assert found["top_logprobs"][0].tolist() == pytest.approx(best, abs=2e-6)
        assert not values_1W[:, spec.width :].any()


@pytest.mark.parametrize("chunk", [1, 2**18])
def test_each_row_has_the_columns_that_it_wants_of_what_drew_its_token(chunk: int) -> None:
    """Rows of several columns, alternatives and policies, some in float64, some of nobody."""
    generator = torch.Generator().manual_seed(9)
    logits_RV = 4 * torch.randn((60, 700), generator=generator)
    wishes: list[tuple[tuple[str, ...], int, bool]] = [
        (("logprob",), 0, False), (PUBLIC_COLUMNS, 0, False), (("logprob",), 3, False),
        (("logprob", "log_q"), 2, False), ((), 0, False), (PUBLIC_COLUMNS, 1, True),
    ]  # fmt: skip
    specs: list[RowSpec | None] = [
        RowSpec(*wishes[r // 5 % 6][:2], SHAPES[r % 5], (3, 5), wishes[r // 5 % 6][2])
        for r in range(60)
    ]
    specs[7] = specs[30] = None
    with mock.patch.object(drawing, "CHUNK_LOGITS", {"cpu": chunk}):
        drawn = RowSampler(specs, range(60)).draw(logits_RV, np.arange(60))
    check_values(drawn, specs, logits_RV)
    plain_R = sample_by(SHAPES * 12, range(60)).draw(logits_RV, np.arange(60)).ids_R
    own_R = torch.tensor([spec is not None for spec in specs])
    assert torch.equal(drawn.ids_R[own_R], plain_R[own_R]), "what is read changes no token"


def test_a_job_without_log_probabilities_wants_nothing_read() -> None:
    job = GenerateJob(np.array([5], np.int32), 3, top=2, columns=("rank", "logprob"))
    assert spec_of_draw(job, (2,)) == RowSpec(("logprob", "rank"), 2, Policy(), (2,))
    silent = GenerateJob(job.tokens, 3, top=2, logprobs=False, columns=("rank",))
    assert spec_of_draw(silent, (2,)).width == 0


def test_a_row_is_drawn_from_the_tokens_that_it_may_have() -> None:
    """The policy's columns are of these, the model's own of all; other rows are as without."""
    words = torch.tensor([[-1], [0b1100]], dtype=torch.int32)  # signed, as grammars have them
    allowed = unpack_bits(words, 8)
    assert allowed.tolist() == [[True] * 8, [False, False, True, True, *[False] * 4]]
    logits = torch.tensor([[9.0, 8, 0, 0, 0, 0, 0, 0]]).repeat(2, 1)
    columns = ("logprob", "log_q")
    for policy in (Policy(), GREEDY):
        specs = [RowSpec(columns, policy=policy)] * 2
        drawn = RowSampler(specs, [1, 4]).draw(logits, np.zeros(2), allowed)
        free = RowSampler(specs, [1, 4]).draw(logits, np.zeros(2))
        assert torch.equal(drawn.values_RW[0], free.values_RW[0])
        assert drawn.ids_R[0] == free.ids_R[0]
        assert drawn.ids_R[1] in (2, 3)
        logprob, log_q = drawn.values_RW[1, :2].tolist()
        assert logprob == pytest.approx(float(logits[1].log_softmax(0)[2]), abs=1e-5)
        assert log_q == pytest.approx(0 if policy is GREEDY else math.log(0.5), abs=1e-5)


def test_log_q_of_a_drawn_token_is_finite_in_half_precision() -> None:
    """Many tokens of a bfloat16 head are as probable as the last one that is not cut."""
    policies = [Policy(top_k=TOP_K), Policy(0.7, TOP_K), Policy(top_p=TOP_P), Policy(min_p=0.05)]
    specs = [RowSpec(("logprob", "log_q"), policy=policy) for policy in policies] * 100
    logits_RV = TIED.bfloat16().expand(400, -1)
    drawn = RowSampler(specs, range(400)).draw(logits_RV, np.zeros(400, np.int64))
    check_values(drawn, specs, logits_RV)
    logprob_R, log_q_R = drawn.values_RW.unbind(-1)
    assert log_q_R.isfinite().all()
    assert (log_q_R[::4] > logprob_R[::4]).all(), "what is left has a larger part"
